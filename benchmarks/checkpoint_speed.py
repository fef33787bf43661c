"""How fast checkpoints are written and read, and how long training waits for them; prints a table for docs/checkpoints.md.

    python benchmarks/checkpoint_speed.py [--nproc 2]

A Llama of 40M parameters on CPU ranks: weights and both moments, 0.45 GiB, against ``torch.save`` and ``torch.load`` of
the same bytes in one process, both waiting for the disk. About 3 minutes on 2 cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

MODEL = [
    "--model.dim=512", "--model.n_layers=8", "--model.n_heads=8", "--model.n_kv_heads=8", "--model.ffn_dim=1536",
    "--model.vocab_size=16384", "--training.seq_len=128", "--training.global_batch_size=4",
    "--training.micro_batch_size=1", "--metrics.tensorboard=false",
]  # fmt: skip
ROUNDS = 3


def train(nproc: int, folder: Path, *arguments: str) -> list[dict]:
    """The records of a run of 6 steps, with a save after each, to ``folder``."""
    command = [sys.executable, "-m", "trainer.launch", *MODEL, "--nproc", str(nproc), f"--job.output_dir={folder}"]
    subprocess.run(
        [*command, "--checkpoint.interval=2", "--checkpoint.keep_latest=1", "--lr_schedule.warmup_steps=1", *arguments],
        check=True, cwd=folder.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def seconds(work) -> float:
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def save_and_sync(tensors: dict, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def main(nproc: int) -> None:
    from trainer.checkpoint_files import read_tensors, stored_tensors, write_tensors

    with tempfile.TemporaryDirectory(prefix="meshloom-checkpoint-") as scratch:
        root = Path(scratch)
        sync = train(nproc, root / "sync", "--training.steps=8")
        background = train(nproc, root / "async", "--training.steps=8", "--checkpoint.async_save=true")
        folder = root / "sync" / "checkpoints" / "step-00000008"
        stored = stored_tensors(folder)
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
        read_tensors(folder, tensors)
        gib = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
        rows = {
            "`torch.save`, one process": lambda: save_and_sync(tensors, root / "whole.pt"),
            "DCP, one process": lambda: write_tensors(root / f"one-{time.time_ns()}", tensors),
            "`torch.load`, one process": lambda: torch.load(root / "whole.pt"),
            "DCP read, one process": lambda: read_tensors(folder, tensors),
        }
        print(f"{gib:.2f} GiB, {nproc} ranks\n\n| | seconds | GiB/s |\n|---|---|---|")
        for name, work in rows.items():
            s = statistics.median(seconds(work) for _ in range(ROUNDS))
            print(f"| {name} | {s:.2f} | {gib / s:.2f} |", flush=True)
        step_s = statistics.median(record["step_time_s"] for record in sync[1:])
        for name, records in (
            ("a save in a run", sync),
            ("a background save in a run: what training waits", background),
        ):
            # The record after a save holds its time. The first one in the background also allocates its copy.
            waits = [record["checkpoint_time_s"] for record in records if record["step"] in (5, 7)]
            s = statistics.median(waits)
            print(f"| {name} | {s:.2f} ({s / step_s:.0%} of a step of {step_s:.2f} s) | {gib / s:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=2)
    main(parser.parse_args().nproc)
