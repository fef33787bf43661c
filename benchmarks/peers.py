"""Meshloom against a loop written by hand and, where they are installed, against other trainers: same machine, same run.

    python benchmarks/peers.py [--sizes debug 30M] [--layouts one dp2 tp2 pp2 2x2x2] [--rounds 3] [--steps 12]
                               [--peers PEERS.toml] [--page benchmarks/peers.md] [--json FILE]

Every contestant of a row trains in a fresh process in turn, the order reversed from round to round; what is compared are
ratios within a round, so that a machine that slows down meanwhile slows all. One thread a rank, fp32. How other trainers
are named in PEERS.toml: benchmarks/peers.md. The loop by hand (benchmarks/floor.py) is of one process.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_SKIPPED = 3  # steps at the start, which do not count
SIZES = {
    "debug": dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=688, vocab_size=2048, seq_len=512, micro_batch_size=4),
    "30M": dict(dim=512, n_layers=10, n_heads=8, n_kv_heads=4, ffn_dim=1408, vocab_size=2048, seq_len=512, micro_batch_size=4),
}  # fmt: skip
LAYOUTS = {  # dp, tp, pp
    "one": (1, 1, 1),
    "dp2": (2, 1, 1),
    "tp2": (1, 2, 1),
    "pp2": (1, 1, 2),
    "2x2x2": (2, 2, 2),
}
_KEYS = {"command", "tokens_per_s", "per_device", "memory_gib", "cwd", "skip", "env"}


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float  # of the whole job
    memory_peak_gib: float | None  # of the fullest rank; None: not told
    wall_s: float  # from the command to its end


def job(size: str, layout: str, n_steps: int, global_batch_size: int) -> dict:
    """What every contestant is told."""
    dp, tp, pp = LAYOUTS[layout]
    return SIZES[size] | dict(
        dp=dp, tp=tp, pp=pp, nproc=dp * tp * pp, steps=n_steps, global_batch_size=global_batch_size, size=size, layout=layout,
        n_microbatches=global_batch_size // (dp * SIZES[size]["micro_batch_size"]), python=sys.executable, root=str(ROOT),
    )  # fmt: skip


def shape_flags(job: dict) -> list[str]:
    """Model and batch, as overrides of debug.toml."""
    model = [
        f"--model.{key}={job[key]}" for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    ]
    return model + [f"--training.{key}={job[key]}" for key in ("seq_len", "micro_batch_size", "global_batch_size")]


def run_meshloom(job: dict, compiled: bool, folder: Path) -> Measured:
    flags = [
        *shape_flags(job), f"--training.steps={job['steps']}", f"--parallel.tp={job['tp']}", f"--parallel.pp={job['pp']}",
        f"--parallel.dp_shard={job['dp']}", "--checkpoint.enabled=false", f"--job.output_dir={folder}/run",
        f"--compile.enabled={str(compiled).lower()}",
    ]  # fmt: skip
    _, wall_s = call([sys.executable, "-m", "trainer.launch", "--nproc", str(job["nproc"]), *flags])
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    rate = statistics.median(record["tokens_per_s"] for record in records[_SKIPPED:])
    return Measured(rate, records[-1]["memory_peak_bytes"] / 2**30, wall_s)


def run_by_hand(job: dict, compiled: bool, folder: Path) -> Measured:
    flags = ["--plain", "--steps", str(job["steps"]), *(["--compile"] if compiled else []), *shape_flags(job)]
    output, wall_s = call([sys.executable, str(ROOT / "benchmarks/floor.py"), *flags])
    seen = json.loads(output.splitlines()[-1])
    rate = seen["tokens_per_step"] / statistics.median(seen["seconds"][_SKIPPED:])
    return Measured(rate, seen["memory_peak_bytes"] / 2**30, wall_s)


def run_foreign(peer: dict, job: dict, folder: Path) -> Measured:
    """``peer``: a table of PEERS.toml. Raises ``ValueError`` if its output holds no rate."""
    fields = job | {"folder": str(folder)}
    command = [part.format(**fields) for part in shlex.split(peer["command"])]
    output, wall_s = call(command, cwd=peer.get("cwd"), extra=peer.get("env", {}))
    rates = numbers_in(output, peer["tokens_per_s"])[peer.get("skip", _SKIPPED) :]
    if not rates:
        raise ValueError(
            f"{peer['tokens_per_s']!r} matches too few lines of what {shlex.join(command)} said: {output[-2000:]}"
        )
    scale = job["nproc"] if peer.get("per_device", False) else 1
    memory = numbers_in(output, peer["memory_gib"]) if "memory_gib" in peer else []
    return Measured(statistics.median(rates) * scale, max(memory, default=None), wall_s)


def numbers_in(text: str, pattern: str) -> list[float]:
    """The first group of each match, with or without thousands separators."""
    return [
        float(match.group(1).replace(",", "")) for match in re.finditer(pattern, re.sub(r"\x1b\[[0-9;]*m", "", text))
    ]


def call(command: list[str], cwd: str | None = None, extra: dict | None = None) -> tuple[str, float]:
    """Output, errors behind it, and seconds. Raises ``RuntimeError`` with its last words."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(ROOT)} if cwd is None else {})
    environment |= {key: str(value) for key, value in (extra or {}).items()}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    wall_s = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(
            f"{shlex.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"
        )
    return (done.stdout if cwd is None else f"{done.stdout}\n{done.stderr}"), wall_s


def read_peers(path: str | None) -> dict[str, dict]:
    """Raises ``ValueError`` for a table that cannot be run."""
    peers = tomli.loads(Path(path).read_text()) if path else {}
    for name, peer in peers.items():
        if wrong := ({"command", "tokens_per_s"} - peer.keys()) | (peer.keys() - _KEYS):
            raise ValueError(
                f"{path}: [{name}]: {', '.join(sorted(wrong))}: command and tokens_per_s are needed, {', '.join(sorted(_KEYS))} are known"
            )
        for key in {"tokens_per_s", "memory_gib"} & peer.keys():
            if re.compile(peer[key]).groups < 1:
                raise ValueError(f"{path}: [{name}]: {key} = {peer[key]!r} needs a group: ([\\d.,]+)")
    return peers


def contestants(peers: dict[str, dict], layout: str) -> dict:
    """Name -> function of (job, folder)."""
    found = {
        "meshloom": lambda job, folder: run_meshloom(job, False, folder),
        "meshloom compiled": lambda job, folder: run_meshloom(job, True, folder),
    }
    if layout == "one":
        found["by hand"] = lambda job, folder: run_by_hand(job, False, folder)
        found["by hand compiled"] = lambda job, folder: run_by_hand(job, True, folder)
    for name, peer in peers.items():
        found[name] = lambda job, folder, peer=peer: run_foreign(peer, job, folder)
    return found


def measure_row(this_job: dict, running: dict, n_rounds: int, only: set[str]) -> dict[str, list[dict]]:
    """Name -> one measurement a round. One that fails is said so and left out of the rounds that follow."""
    seen: dict[str, list[dict]] = {name: [] for name in running if not only or name in only}
    for round_ in range(n_rounds):
        for name in list(seen)[:: -1 if round_ % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="meshloom-peers-") as folder:
                try:
                    measured = running[name](this_job, Path(folder))
                except (RuntimeError, ValueError) as error:
                    print(f"{name} failed: {error}", file=sys.stderr, flush=True)
                    del seen[name]
                    continue
            seen[name].append(asdict(measured))
            print(
                f"{this_job['size']} {this_job['layout']} round {round_ + 1}: {name} {measured.tokens_per_s:,.0f} tokens/s, {measured.wall_s:.0f} s",
                flush=True,
            )
    return seen


def line_of(size: str, layout: str, name: str, row: dict[str, list[dict]]) -> str:
    """One line of the table: median rate, ratio of ours over it, round by round, memory, and time from command to end."""
    ours = row.get("meshloom compiled" if name.endswith("compiled") else "meshloom")
    runs = row[name]
    rates = [run["tokens_per_s"] for run in runs]
    ratio = (
        "" if name.startswith("meshloom") or not ours else spread([a["tokens_per_s"] / b for a, b in zip(ours, rates)])
    )
    memory = [run["memory_peak_gib"] for run in runs if run["memory_peak_gib"] is not None]
    shown = f"{statistics.median(memory):.2f}" if memory else ""
    return f"| {size} | {layout} | {name} | {statistics.median(rates):,.0f} | {ratio} | {shown} | {statistics.median(run['wall_s'] for run in runs):.0f} |"


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def table(results: dict[str, dict[str, dict]]) -> str:
    heads = "| size | layout | trainer | tokens/s | ours / theirs, median (least to most) | peak GiB a rank | command to end, s |\n|---|---|---|---|---|---|---|"
    return "\n".join(
        [
            heads,
            *(
                line_of(size, layout, name, row)
                for size, rows in results.items()
                for layout, row in rows.items()
                for name in row
            ),
        ]
    )


def write_page(path: Path, results: dict, command: str) -> None:
    """Replace what stands below the page's last heading."""
    head, mark, _ = path.read_text().partition("## Figures\n")
    assert mark, f"{path} has no '## Figures'"
    where = (
        f"torch {version('torch')}, {os.cpu_count()} x {platform.machine()}, {time.strftime('%Y-%m-%d')}, `{command}`"
    )
    path.write_text(f"{head}{mark}\n{where}\n\n{table(results)}\n")


def main(options: argparse.Namespace) -> None:
    peers = read_peers(options.peers)
    results: dict[str, dict[str, dict]] = {}
    for size in options.sizes:
        for layout in options.layouts:
            this_job = job(size, layout, options.steps, options.global_batch_size)
            row = measure_row(this_job, contestants(peers, layout), options.rounds, set(options.only))
            results.setdefault(size, {})[layout] = row
            if options.json:  # as far as it has come
                Path(options.json).write_text(json.dumps(results, indent=1))
    print(table(results))
    if options.page:
        write_page(Path(options.page), results, shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help=f"of each run; the first {_SKIPPED} do not count")
    parser.add_argument("--global-batch-size", type=int, default=16, help="sequences a step, in every layout")
    parser.add_argument("--only", nargs="+", default=[], help="these trainers alone, by name")
    parser.add_argument("--peers", metavar="TOML", help="other trainers: see benchmarks/peers.md")
    parser.add_argument("--page", metavar="FILE", help="replace the figures of this page")
    parser.add_argument("--json", metavar="FILE", help="every measurement")
    main(parser.parse_args())
