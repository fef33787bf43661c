"""The ``verify`` command: is this config, at its layout, the same run as on one process?

Shrinks the config so that it fits, observes the first steps of one process and of the layout, compares
them check by check, and where they differ runs each ingredient of the layout alone to find the one to blame.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from parallelize.layout import AXES
from parallelize.schedules import schedule_of
from trainer.build import with_matching_globs
from trainer.config import ActivationCheckpoint, Compile, Config, Parallel
from trainer.config_rules import Resolved, architecture_keys, architecture_of, resolve_config
from trainer.observe import Observed

# (config, processes) -> what each rank saw. Raises RuntimeError if a rank fails.
Observe = Callable[[Config, int], list[Observed]]

MICRO_BATCHES = "micro-batches"

_MAX_PARAMS = 20_000_000
_MAX_SEQ_LEN = 64


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed differences. ``later_loss`` is per step trained; ``gradient`` a share of a gradient's largest
    entry; ``weights`` the norm of the difference as a share of the norm of what training changed."""

    loss: float
    later_loss: float
    grad_norm: float
    gradient: float
    weights: float


# fp32: rounding of sums in another order. bf16 rounds each matmul's result to 1 in 256: the worst of many layouts
# (docs/parity.md) is about half of these, and as far from one process in bf16 as that is from fp32. (Its weights say
# little: Adam's first steps are as long for a gradient that is zero but for rounding.)
TOLERANCES = {
    "float32": Tolerance(loss=1e-5, later_loss=1e-5, grad_norm=1e-4, gradient=1e-4, weights=1e-2),
    "bfloat16": Tolerance(loss=1e-4, later_loss=3e-3, grad_norm=5e-3, gradient=0.15, weights=1.5),
}


@dataclass(frozen=True)
class Check:
    """One line of the table. ``difference`` in the unit of ``tolerance``."""

    name: str
    difference: float
    tolerance: float
    detail: str

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # False for nan


def shrink(resolved: Resolved) -> Config:
    """The config with fewer layers, narrower heads, shorter sequences and smaller batches; all else kept.

    Widths shrink by one common factor, so that their ratios, the number of heads and so what tp divides stay;
    an odd vocabulary stays odd. Every stage keeps a layer, and an uneven split stays uneven.
    """
    config, layout = resolved.config, resolved.layout
    per_stage = resolved.layers_per_stage
    if layout.pp == 1:
        layers = (min(per_stage[0], 2),)
    else:
        layers = tuple(1 if n == min(per_stage) else 2 for n in per_stage)
    shape = {key: getattr(resolved.architecture, key) for key in ("dim", "head_dim", "ffn_dim", "vocab_size")}
    shape["n_layers"] = sum(layers)
    while shape["head_dim"] > 8 and _n_params(resolved, shape) > _MAX_PARAMS:
        halved = {key: value // 2 for key, value in shape.items() if key != "n_layers"}
        halved["vocab_size"] |= shape["vocab_size"] & 1
        shape |= halved
    # All of it spelled out, and with initial weights of its own: those of a directory do not fit any more.
    architecture = architecture_keys(resolved.architecture)
    model = config.model.model_copy(update=architecture | shape | {"hf_path": None})
    tp = layout.tp
    seq_len = min(config.training.seq_len, max(tp, _MAX_SEQ_LEN // tp * tp))
    micro_batch_size = min(config.training.micro_batch_size, 2)
    n_microbatches = _fewest_microbatches(resolved)
    training = config.training.model_copy(
        update={
            "seq_len": seq_len,
            "micro_batch_size": micro_batch_size,
            "global_batch_size": layout.dp * micro_batch_size * n_microbatches,
        }
    )
    parallel = config.parallel
    if parallel.balance != "uniform":
        parallel = parallel.model_copy(update={"balance": layers})
    sections = {"checkpoint": config.checkpoint.model_copy(update={"init_from": None})}
    if config.training.method != "pretrain":  # conversations may be longer than the shorter rows
        sections["data"] = config.data.model_copy(update={"too_long": "truncate"})
    small = config.model_copy(update={"model": model, "training": training, "parallel": parallel, **sections})
    return with_matching_globs(small, architecture_of(small))


def _n_params(resolved: Resolved, shape: dict) -> int:
    return type(resolved.architecture)(**{**vars(resolved.architecture), **shape}).n_params


def _fewest_microbatches(resolved: Resolved) -> int:
    """At most as many as the config has, at least two, and enough for the schedule."""
    layout, parallel, n_stages = resolved.layout, resolved.config.parallel, len(resolved.layers_per_stage)
    if parallel.schedule_microbatches:
        return parallel.schedule_microbatches * min(2, resolved.n_schedule_runs)
    for n in range(min(2, resolved.n_microbatches), resolved.n_microbatches):
        if layout.pp == 1 or not schedule_of(parallel.schedule).microbatch_problem(layout.pp, n_stages, n):
            return n
    return resolved.n_microbatches


def one_process(config: Config) -> Config:
    """The reference: the whole batch in one forward, no parallelism, no recomputation, no compiler."""
    training = config.training.model_copy(update={"micro_batch_size": config.training.global_batch_size})
    return config.model_copy(
        update={
            "parallel": Parallel(),
            "activation_checkpoint": ActivationCheckpoint(),
            "compile": Compile(),
            "training": training,
        }
    )


def compare(reference: Observed, ranks: Sequence[Observed], tolerance: Tolerance) -> list[Check]:
    """Every check, in the order in which a run goes through them."""
    checks = [_batch_check(reference, ranks)]
    for name, title, allowed in (
        ("initial", "initial weights", 0.0),
        ("gradients", "worst gradient, step 1", tolerance.gradient),
        ("clipped", "worst gradient after clipping", tolerance.gradient),
    ):
        checks.append(_tensor_check(name, title, reference, ranks, allowed))
    losses, norms = reference.losses, reference.grad_norms
    checks[2:2] = [
        _number_check("loss, step 1", losses[0], [rank.losses[0] for rank in ranks], tolerance.loss),
        _number_check("gradient norm, step 1", norms[0], [rank.grad_norms[0] for rank in ranks], tolerance.grad_norm),
    ]
    checks.append(_copies_check(reference, ranks))
    last = len(losses)
    checks.append(
        _number_check(
            f"loss, step {last}", losses[-1], [rank.losses[-1] for rank in ranks], tolerance.later_loss * last
        )
    )
    checks.append(_weights_check(f"weights after step {last}", reference, ranks, tolerance.weights))
    return checks


def _batch_check(reference: Observed, ranks: Sequence[Observed]) -> Check:
    """Shares in order of data rank make the global batch, and ranks of one data rank read the same."""
    shares: dict[int, list] = {}
    differing = 0
    for rank in ranks:
        differing += shares.setdefault(rank.dp_index, rank.batches) != rank.batches
    for step, expected in enumerate(reference.batches):
        got = [row for index in sorted(shares) for row in shares[index][step]]
        differing += sum(a != b for a, b in zip(got, expected)) + abs(len(got) - len(expected))
    return Check("batch", differing, 0, f"{sum(map(len, reference.batches))} sequences")


def _tensor_check(name: str, title: str, reference: Observed, ranks: Sequence[Observed], allowed: float) -> Check:
    """The largest difference of any tensor on any rank, as a share of the tensor's largest entry."""
    worst, detail = 0.0, "every parameter"
    expected = getattr(reference, name)
    missing = expected.keys() - set().union(*(getattr(rank, name) for rank in ranks))
    if missing:
        return Check(title, float("inf"), allowed, f"no rank has {sorted(missing)[0]}")
    for number, rank in enumerate(ranks):
        for key, got in getattr(rank, name).items():
            if key not in expected:
                return Check(title, float("inf"), allowed, f"rank {number} has {key}, which the model has not")
            error = _relative(got, expected[key])
            if not error <= worst:
                worst, detail = error, f"{key} on rank {number}"
    return Check(title, worst, allowed, detail)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.float() - want.float()).abs().max().item()
    scale = want.float().abs().max().item()
    return difference / scale if scale > 0 else difference


def _number_check(title: str, want: float, got: Sequence[float], allowed: float) -> Check:
    worst = max(got, key=lambda value: abs(value - want) if value == value else float("inf"))
    if len(set(got)) > 1:
        return Check(title, float("inf"), allowed, f"ranks disagree: {min(got):.7g} to {max(got):.7g}")
    difference = abs(worst - want) / abs(want) if want else abs(worst)
    return Check(title, difference, allowed, f"{want:.7g} and {worst:.7g}")


def _copies_check(reference: Observed, ranks: Sequence[Observed]) -> Check:
    """What several ranks hold (norms over tp, tied weights over pp) is the same bits at the end."""
    seen: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, tensor in [*rank.final.items(), *rank.copies.items()]:
            if not torch.equal(seen.setdefault(name, tensor), tensor):
                return Check("copies on ranks", _relative(tensor, seen[name]), 0.0, f"{name} differs between ranks")
    return Check("copies on ranks", 0.0, 0.0, "the same bits")


def _weights_check(title: str, reference: Observed, ranks: Sequence[Observed], allowed: float) -> Check:
    # Adam turns the sign of a gradient that is zero but for rounding into a whole step, so single entries may
    # differ by that; what training did to a whole parameter may not.
    worst, detail = 0.0, "every parameter"
    for number, rank in enumerate(ranks):
        for name, got in rank.final.items():
            want = reference.final[name].float()
            change = (want - reference.initial[name].float()).norm().item()
            error = (got.float() - want).norm().item() / change if change else float((got != want).any())
            if not error <= worst:
                worst, detail = error, f"{name} on rank {number}"
    return Check(title, worst, allowed, detail)


def ingredients(config: Config) -> dict[str, tuple[Config, int]]:
    """Each thing that sets the layout apart from one process, alone: name -> (config, processes)."""
    alone = {}
    single = one_process(config)
    micro_batched = single.model_copy(update={"training": config.training})
    resolved = resolve_config(config, _world_size(config))
    layout, n_microbatches = resolved.layout, resolved.n_microbatches
    if n_microbatches * layout.dp > 1:
        alone[MICRO_BATCHES] = (micro_batched, 1)
    if config.activation_checkpoint.mode != "none":
        mode = {"activation_checkpoint": config.activation_checkpoint}
        alone[f"activation_checkpoint.mode = {config.activation_checkpoint.mode}"] = (single.model_copy(update=mode), 1)
    if config.compile.enabled:
        alone["compile"] = (single.model_copy(update={"compile": config.compile}), 1)
    for axis in AXES:
        degree = getattr(layout, axis)
        if degree == 1:
            continue
        others = {other: 1 for other in AXES if other != axis}
        if axis == "pp":
            others["dp_shard"] = 1
        parallel = config.parallel.model_copy(update=others | {axis: degree} | ({} if axis == "pp" else _no_pipeline()))
        # Each rank has as many micro-batches as before: the schedule may want them.
        sequences = config.training.micro_batch_size * n_microbatches * (degree if axis.startswith("dp") else 1)
        training = config.training.model_copy(update={"global_batch_size": sequences})
        alone[axis] = (single.model_copy(update={"parallel": parallel, "training": training}), degree)
    return alone


def _no_pipeline() -> dict:
    return {
        key: Parallel.model_fields[key].default
        for key in ("schedule", "schedule_microbatches", "balance", "virtual_stages")
    }


def _world_size(config: Config) -> int:
    assert config.parallel.dp_shard != -1, "verify fills it in"
    parallel = config.parallel
    return parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp


def suspects(config: Config, observe: Observe, tolerance: Tolerance) -> list[str]:
    """The ingredients that already differ from one process alone; empty if only their combination does."""
    found = []
    for name, (part, world_size) in ingredients(config).items():
        try:
            reference = observe(one_process(part), 1)[0]
            failed = [check for check in compare(reference, observe(part, world_size), tolerance) if not check.passed]
        except RuntimeError:  # it cannot even run
            failed = [None]
        if failed and name == MICRO_BATCHES:
            return [name]  # every axis cuts the batch too: nothing can be said about one alone
        if failed:
            found.append(name)
    return found


@dataclass(frozen=True)
class Verdict:
    """The table, and after a failure the first check that failed and the ingredients to suspect."""

    checks: list[Check]
    layout: str
    suspects: list[str]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def as_dict(self) -> dict:
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        return {"passed": self.passed, "layout": self.layout, "checks": checks, "suspects": self.suspects}

    def table(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{'check':<{width}}  {'difference':>10}  {'allowed':>8}"]
        for check in self.checks:
            mark = "ok" if check.passed else "DIFFERS"
            lines.append(
                f"{check.name:<{width}}  {check.difference:>10.1e}  {check.tolerance:>8.0e}  {mark:<7}  {check.detail}"
            )
        if not self.passed:
            first = next(check for check in self.checks if not check.passed)
            blame = " and ".join(self.suspects) or "only the combination: each ingredient alone agrees"
            lines += [f"first difference: {first.name} ({first.detail})", f"suspect: {blame}"]
        return "\n".join(lines)


def verify(config: Config, world_size: int, observe: Observe, compute: str) -> Verdict:
    """Compare a (shrunk) config at its layout with one process. ``compute``: its resolved compute dtype."""
    precision = config.precision
    coarse = "bfloat16" in (compute, precision.param, precision.reduce)
    tolerance = TOLERANCES["bfloat16" if coarse else "float32"]
    resolved = resolve_config(config, world_size)
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"dp_shard": resolved.layout.dp_shard})}
    )
    reference = observe(one_process(config), 1)[0]
    try:
        checks = compare(reference, observe(config, world_size), tolerance)
    except RuntimeError as error:
        checks = [Check("runs to the end", float("inf"), 0.0, str(error).strip().splitlines()[-1])]
    blamed = [] if all(check.passed for check in checks) else suspects(config, observe, tolerance)
    return Verdict(checks, str(resolved.layout), blamed)
