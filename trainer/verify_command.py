"""Running ``verify`` with real processes: each observation is a job of its own, whose ranks leave a file each."""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.mesh import Mesh
from trainer.build import compute_dtype
from trainer.config import Config
from trainer.config_load import dump_config, load_config
from trainer.config_rules import Resolved, resolve_config
from trainer.data.loader import make_loader
from trainer.data.rows import IGNORED
from trainer.data.samples import load_samples
from trainer.errors import EXIT_FAILED, UserError
from trainer.launch import count_processes
from trainer.observe import Observed, observe
from trainer.rank import run_rank
from trainer.step import Batch
from trainer.torchrun import run_ranks
from trainer.verify import shrink, verify

_MOST_CPU_PROCESSES = 16


def main(options: argparse.Namespace, config: Config) -> int:
    """Print the comparison. Exit code 0 if the layout is the same run, 1 if it differs."""
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: at least 1 is needed")
    on_gpu = torch.cuda.is_available()
    nproc = count_processes(config, options.nproc, n_nodes=1)
    if not on_gpu and nproc > _MOST_CPU_PROCESSES:
        raise UserError(
            f"the layout needs {nproc} processes, too many for this machine: verify a smaller one of the same kind, "
            "for example with --parallel.dp_shard=2 --parallel.tp=2"
        )
    small = shrink(resolve_config(config, nproc))
    with tempfile.TemporaryDirectory(prefix="meshloom-verify-") as scratch:
        job = itertools.count(1)

        def observe_job(config: Config, world_size: int) -> list[Observed]:
            return _run_job(config, world_size, options.steps, Path(scratch) / str(next(job)))

        verdict = verify(small, nproc, observe_job, compute_dtype(config, "cuda" if on_gpu else "cpu"))
    if options.json:
        print(json.dumps(verdict.as_dict(), indent=1))
    else:
        model = small.model
        print(
            f"{verdict.layout} against one process, {options.steps} steps, shrunk to {model.n_layers} layers of dim {model.dim}"
        )
        print(verdict.table())
    return 0 if verdict.passed else EXIT_FAILED


def _run_job(config: Config, world_size: int, n_steps: int, folder: Path) -> list[Observed]:
    """Observe ``config`` on ``world_size`` processes. Raises ``RuntimeError`` if one of them fails."""
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
    code = run_ranks(world_size, ["-m", "trainer.verify_command", str(folder), str(n_steps)])
    if code:
        raise RuntimeError(f"a rank ended with exit code {code}")
    files = [folder / f"rank-{rank}.pt" for rank in range(world_size)]
    return [Observed(**torch.load(file, weights_only=True)) for file in files]


def batches_for(resolved: Resolved, mesh: Mesh, n_steps: int) -> Iterator[Batch]:
    """This data rank's first batches of the config's own data.

    Ids are folded into the shrunk vocabulary. A seventh to all of each sequence's labels count, depending on
    its content alone: with equal counts a mean of means would pass unnoticed. (Of conversations, as they say.) Where documents are isolated, half of
    them is made a document of its own: short sequences may lie within one.
    """
    config, vocab_size = resolved.config, resolved.architecture.vocab_size
    samples = load_samples(config, vocab_size=2**62)
    loader = make_loader(
        samples, config.data, config.training.global_batch_size, mesh.dp_index, resolved.layout.dp, first_step=1
    )
    masked = any(rows.stream.masked for rows in samples.rows.values())  # of unequal counts as they are
    for batch in itertools.islice(loader, n_steps):
        tokens = batch["tokens"] % vocab_size
        n_kept = config.training.seq_len * (1 + tokens.sum(dim=1, keepdim=True) % 7) // 7
        index = torch.arange(config.training.seq_len)
        ignored = ((index >= n_kept) & (not masked)) | (batch["labels"] == IGNORED)
        labels = (batch["labels"] % vocab_size).masked_fill(ignored, IGNORED)
        if "positions" not in batch:
            yield tokens, labels
            continue
        from_border = index - n_kept // 2
        yield tokens, labels, batch["positions"].where(from_border < 0, batch["positions"].minimum(from_border))


def _rank_main(folder: Path, n_steps: int) -> int:
    config = load_config(str(folder / "config.toml"))

    def work(device: torch.device, _) -> int:
        resolved = resolve_config(config, dist.get_world_size())
        mesh = Mesh(resolved.layout, device.type)
        seen = observe(resolved, mesh, device, batches_for(resolved, mesh, n_steps))
        torch.save(asdict(seen), folder / f"rank-{dist.get_rank()}.pt")
        return 0

    return run_rank(work)


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1]), int(sys.argv[2])))
