"""``evaluate``: the loss of a model on the config's data, at any layout. Each rank is a process of one job."""

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tomli_w
import torch
import torch.distributed as dist

from parallelize.mesh import Mesh
from trainer.adapters import weights_of, with_weights_of
from trainer.build import build_model, build_train_step
from trainer.checkpoint import Checkpointer
from trainer.checkpoint_folder import read_state
from trainer.config import Config, Validation
from trainer.config_load import Override, dump_config, load_config
from trainer.config_rules import resolve_config
from trainer.data.loader import batches_in_order
from trainer.data.samples import load_validation_rows
from trainer.errors import EXIT_FAILED, UserError
from trainer.launch import check_files, count_processes
from trainer.rank import run_rank
from trainer.step import Batch
from trainer.torchrun import run_ranks
from trainer.tuning import is_lora


def main(options: argparse.Namespace, overrides: list[Override]) -> int:
    """Print loss and perplexity. Raises ``UserError``."""
    if options.batches is not None and options.batches < 1:
        raise UserError(f"--batches {options.batches}: at least 1 is needed")
    if options.checkpoint is not None and options.config is None:
        config = _config_of_run(Path(options.checkpoint), overrides)
    else:
        config = load_config(options.config, overrides)
    if any(
        override.key.startswith(("data.source", "data.path")) for override in overrides
    ):  # that text is what is asked for
        config = config.model_copy(update={"validation": Validation()})
    elif config.validation.sets:
        config = config.model_copy(update={"validation": config.validation.model_copy(update={"interval": 1})})
    if options.checkpoint is not None:
        config = with_weights_of(config, options.checkpoint)
    nproc = count_processes(config, options.nproc, n_nodes=1)
    resolve_config(config, nproc)
    check_files(config)
    with tempfile.TemporaryDirectory(prefix="meshloom-evaluate-") as scratch:
        folder = Path(scratch)
        (folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
        code = run_ranks(nproc, ["-m", "trainer.evaluate", scratch, str(options.batches or 0)])
        if code:
            return code
        seen = json.loads((folder / "seen.json").read_text())
    if options.json:
        print(json.dumps(seen))
        return 0
    for name, of_set in seen.get("by_set", {}).items():
        print(f"{name}: {_text(of_set)}")
    print(_text(seen))
    return 0


def _text(seen: dict) -> str:
    return f"loss {seen['loss']:.6f}  perplexity {seen['perplexity']:.4f}  over {seen['n_tokens']:,} tokens"


def _config_of_run(checkpoint: Path, overrides: list[Override]) -> Config:
    """The config that a checkpoint was written with, on one process unless ``overrides`` say otherwise."""
    tables = read_state(checkpoint)["config"]
    kept = ("model", "data", "training", "precision", "validation")
    tables = {
        name: {key: value for key, value in tables[name].items() if value is not None}
        for name in kept
        if name in tables
    }
    tables["training"]["micro_batch_size"] = 1  # fits any layout
    if any(override.key == "data.path" for override in overrides):  # instead of the run's own data
        tables["data"] = {key: value for key, value in tables["data"].items() if key not in ("sources", "curriculum")}
    with tempfile.NamedTemporaryFile("wb", prefix="meshloom-", suffix=".toml") as file:
        tomli_w.dump(tables, file)
        file.flush()
        return load_config(file.name, overrides)


def _evaluate(config: Config, device: torch.device, n_batches: int) -> dict:
    resolved = resolve_config(config, dist.get_world_size())
    sets = load_validation_rows(config, resolved.architecture.vocab_size)
    mesh = Mesh(resolved.layout, device.type)
    model = build_model(resolved, mesh, device, initialise=config.checkpoint.init_from is None or is_lora(config))
    step = build_train_step(resolved, model, mesh, device)
    for folder in weights_of(config):
        Checkpointer(config, model, step.optimizer, device).load_weights(folder)
    seen = {}
    for name, rows in sets.items():
        batches = batches_in_order(rows, config.training.global_batch_size, mesh.dp_index, resolved.layout.dp)
        seen[name] = step.evaluate(_on_device(itertools.islice(batches, n_batches or None), device))
    n_tokens = sum(n for _, n in seen.values())
    total = _numbers(sum(loss * n for loss, n in seen.values()) / max(1, n_tokens), n_tokens)
    return total | ({} if "" in seen else {"by_set": {name: _numbers(*numbers) for name, numbers in seen.items()}})


def _numbers(loss: float, n_tokens: int) -> dict:
    return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "n_tokens": n_tokens}


def _on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    for batch in batches:
        yield tuple(tensor.to(device) for tensor in batch)


def _rank_main(folder: Path, n_batches: int) -> int:
    config = load_config(str(folder / "config.toml"))

    def work(device: torch.device, _) -> int:
        seen = _evaluate(config, device, n_batches)
        if not math.isfinite(seen["loss"]):
            print(f"the loss is {seen['loss']}", file=sys.stderr)
            return EXIT_FAILED
        if dist.get_rank() == 0:
            (folder / "seen.json").write_text(json.dumps(seen))
        return 0

    return run_rank(work)


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1]), int(sys.argv[2])))
