"""Whole runs of the training loop on pooled ranks, with everything real but the process start."""

import contextlib
import io
from pathlib import Path

import torch

from parallelize.grad_norm import local_tensor
from parallelize.mesh import Mesh
from tests.dist.parity import CPU, as_numpy
from tests.dist.pool import mesh_of
from tests.tiny import tiny_config
from trainer import train as train_command
from trainer.config import Config
from trainer.errors import StoppedRun, UserError
from trainer.observe import digest, whole
from trainer.watchdog import Watchdog


class NeverStop:
    requested = False


class StopAt:
    """Asked to stop during a step, counted from this start."""

    def __init__(self, step: int):
        self.step, self.n_looks = step, 0

    @property
    def requested(self) -> bool:
        self.n_looks += 1
        return self.n_looks >= self.step


def run_training(config: Config, poison: tuple[int | tuple[int, ...], int, float] | None = None, stop=None) -> dict:
    """The ``train`` command's own function on this rank. Returns what is left on it.

    poison: (step or steps, rank, value): put ``value`` into one gradient entry of that rank's first parameter.
    """
    seen = {}

    def build_train_step(resolved, model, mesh, device):
        step = original(resolved, model, mesh, device)
        seen.update(step=step, named=model.named, dp_index=mesh.dp_index, batches=[], rates=[])
        _record(step, seen)
        if poison is not None:
            _poison(step, seen, *poison)
        return step

    original = train_command.build_train_step
    train_command.build_train_step, train_command.Mesh = build_train_step, lambda layout, device_type: mesh_of(layout)
    watchdog = Watchdog()
    seen["error"], seen["finished"], console = None, None, io.StringIO()
    try:
        with contextlib.redirect_stdout(console):
            seen["finished"] = train_command._train(config, CPU, stop or NeverStop(), watchdog)
    except StoppedRun as error:
        seen["error"] = str(error)
    finally:
        watchdog.leave()  # else it would end the pooled worker, one day
        train_command.build_train_step, train_command.Mesh = original, Mesh
    named, step = seen.pop("named", {}), seen.pop("step", None)
    seen["console"] = console.getvalue()
    seen["weights"] = as_numpy({name: whole(parameter) for name, parameter in named.items()})
    if step is not None:
        states = {f"{name}.{kind}": t for name, p in named.items() for kind, t in step.optimizer.state[p].items()}
        seen["moments"] = as_numpy({name: whole(tensor) for name, tensor in states.items()})
        seen["dtypes"] = {str(t.dtype) for t in [*named.values(), *states.values()]}
    return seen


def run_config(tmp_path, **overrides):
    keys = dict(
        job__output_dir=str(tmp_path / "run"), model__vocab_size=300, training__steps=5, lr_schedule__warmup_steps=2, lr_schedule__total_steps=9,
        checkpoint__interval=1, checkpoint__keep_latest=2, training__seq_len=32,
    )  # fmt: skip
    return tiny_config(**(keys | overrides))


def refused(config) -> str:
    """The message with which this rank's run is refused."""
    try:
        run_training(config)
    except UserError as error:
        return error.message()
    return "not refused"


def _record(step, seen) -> None:
    """Note each step's sequences on this rank, as digests, and the learning rates that its update uses."""
    forward_backward, update = step.forward_backward, step.update

    def recorded_forward_backward(*batch):
        seen["batches"].append([digest(row) for row in torch.stack([t for t in batch if t is not None], dim=1)])
        return forward_backward(*batch)

    def recorded_update(*totals):
        seen["rates"].append({group["lr"] for group in step.optimizer.param_groups})
        return update(*totals)

    step.forward_backward, step.update = recorded_forward_backward, recorded_update


def _poison(step, seen, at_steps: int | tuple[int, ...], rank: int, value: float) -> None:
    calls = {"n": 0}
    at_steps = at_steps if isinstance(at_steps, tuple) else (at_steps,)
    original = step.forward_backward

    def forward_backward(*batch):
        loss = original(*batch)
        calls["n"] += 1
        if calls["n"] in at_steps and torch.distributed.get_rank() == rank:
            first = next(p for p in seen["named"].values() if local_tensor(p.grad).numel())
            local_tensor(first.grad).view(-1)[0] = value
        return loss

    step.forward_backward = forward_backward


def records(folder: Path) -> list[dict]:
    import json

    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
