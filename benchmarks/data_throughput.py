"""How fast ``prepare`` tokenizes, against the tokenizers library by itself, and how fast a loader reads; for docs/data.md.

    python benchmarks/data_throughput.py [--megabytes 32] [--rounds 3]

``prepare`` reads JSON Lines, tokenizes and writes shards with checksums; the library's ``encode_batch`` gets the same texts
as strings in memory, in the batches that it takes best, on all cores. Both are given the wall time and the processor time
of all their processes: on a machine where others work as well, the second is the one to compare. The loader reads prepared
shards as a data rank would, at a short and a long sequence. About 3 minutes on 2 cores.
"""

import argparse
import gzip
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def texts_of(n_bytes: int) -> list[str]:
    """The bundled novel's paragraphs, over and over."""
    novel = gzip.decompress((ROOT / "assets/pride_and_prejudice.txt.gz").read_bytes()).decode()
    paragraphs = [part for part in novel.split("\n\n") if part.strip()]
    return paragraphs * max(1, round(n_bytes / len(novel)))


def clock() -> tuple[float, float]:
    """(wall, processor) seconds; the second of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in used)


def timed(work) -> tuple[float, float]:
    start = clock()
    work()
    return tuple(after - before for before, after in zip(start, clock()))


def library(texts: list[str]) -> tuple[float, float]:
    """In a process of its own, which has no other threads and no memory of before. Loading is not counted."""
    reader, writer = os.pipe()
    if not os.fork():
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(ROOT / "assets/smollm2/tokenizer.json"))

        def encode():
            for first in range(0, len(texts), 1000):
                tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False)

        os.write(writer, json.dumps(timed(encode)).encode())
        os._exit(0)
    os.wait()
    return tuple(json.loads(os.read(reader, 1000)))


def prepared(folder: Path, n_workers: int) -> tuple[float, float]:
    from trainer.data.prepare import prepare

    out = folder / f"out-{time.monotonic_ns()}"
    return timed(lambda: prepare([str(folder / "in.jsonl")], "smollm2", out, n_workers))


def loader_rate(folder: Path, seq_len: int, workers: int, n_tokens: int) -> float:
    """Tokens a second of one data rank that does nothing else."""
    from trainer.config_load import Override, load_config
    from trainer.data.loader import checked, make_loader
    from trainer.data.samples import load_samples

    batch = max(1, 65_536 // seq_len)
    keys = {"data.path": next(folder.glob("out-*")), "data.tokenizer": "smollm2", "data.workers": workers}
    keys |= {"training.seq_len": seq_len, "training.global_batch_size": batch, "training.micro_batch_size": 1}
    config = load_config(None, [Override(key, str(value)) for key, value in keys.items()])
    samples = load_samples(config, 49_152)
    batches = checked(iter(make_loader(samples, config.data, batch, 0, 1, first_step=1_000_000)), samples)
    next(batches)
    n_steps, start = max(1, n_tokens // (batch * seq_len)), time.perf_counter()
    for _ in range(n_steps):
        next(batches)
    return n_steps * batch * seq_len / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    n_cores = len(os.sched_getaffinity(0))
    texts = texts_of(options.megabytes * 1_000_000)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory(prefix="meshloom-data-") as scratch:
        folder = Path(scratch)
        (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        seen: dict[str, list[tuple[float, float]]] = {"encode_batch": [], "prepare": []}
        for _ in range(options.rounds):  # in turn, so that a slow minute is nobody's
            seen["encode_batch"].append(library(texts))
            seen["prepare"].append(prepared(folder, n_cores))
        print(f"{megabytes:.1f} MB of text, {n_cores} cores, median of {options.rounds}")
        medians = {name: [statistics.median(times) for times in zip(*runs)] for name, runs in seen.items()}
        for name, (wall_s, cpu_s) in medians.items():
            print(f"{name:<14}{megabytes / wall_s:7.2f} MB/s   {cpu_s / megabytes:6.3f} processor seconds a MB")
        (a_wall, a_cpu), (b_wall, b_cpu) = medians["encode_batch"], medians["prepare"]
        print(f"prepare at {a_wall / b_wall:.0%} of encode_batch by the clock, {a_cpu / b_cpu:.0%} by processor time")
        for seq_len in (128, 4096):
            for workers in (0, 2):
                rate = loader_rate(folder, seq_len, workers, 20_000_000)
                print(f"loader, {seq_len} tokens a row, {workers} workers: {rate / 1e6:.2f} M tokens/s")


if __name__ == "__main__":
    main()
