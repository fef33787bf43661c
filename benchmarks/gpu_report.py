"""What ``gpu_check.sh`` prints: what it runs on, and at its end a table of what its pieces have left, and a verdict.

python benchmarks/gpu_report.py environment gpu|cpu
python benchmarks/gpu_report.py table gpu|cpu OUT NAME...
"""

import gzip
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.profiler import length_of_union  # noqa: E402
from trainer.runs import print_columns  # noqa: E402

BAR = 0.55  # MFU
_SKIPPED = 4  # steps at the start; and the last, which is traced
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def environment(mode: str) -> int:
    """What this machine is; 1 where the check makes no sense on it."""
    import torch

    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name(0) if has_gpu else "no GPU"
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {gpu}, Python {sys.version.split()[0]}", flush=True)
    if mode == "gpu" and not has_gpu:
        print("error: torch sees no GPU; benchmarks/gpu_check.sh --cpu tries this script on a CPU", file=sys.stderr)
        return 1
    return 0


def table(mode: str, out: Path, names: list[str]) -> int:
    """0 if everything ran and the verdict is good."""
    lines = [tests_line(out / "tests", mode), equality_line(out)]
    rows, problems = [], []
    for name in names:
        folder = out / name
        if (code := _code(folder)) != 0:
            problems.append(name)
            rows.append((name, *[""] * 6, _why(folder, code)))
        else:
            rows.append((name, *variant_cells(folder, mode)))
    print()
    heads = (
        "variant",
        "tokens/s",
        "MFU",
        "TFLOP/s",
        "peak GiB",
        "no kernel",
        "first step s",
        "loss, or what went wrong",
    )
    print_columns(list(heads), rows, right=heads[1:7])
    print()
    good = True
    for fine, text in [*lines, verdict(out, names, mode)]:
        print(("ok    " if fine else "FAIL  ") + text)
        good &= fine
    if problems:
        print(f"FAIL  did not run to the end: {', '.join(problems)}")
    return 0 if good and not problems else 1


def variant_cells(folder: Path, mode: str) -> tuple[str, ...]:
    records = _records(folder)
    counted = counted_records(folder)
    mfu = _median(counted, "mfu")
    return (
        f"{_median(counted, 'tokens_per_s'):,.0f}",
        "" if mfu is None else f"{mfu:.1%}",
        f"{_median(counted, 'tflops_per_device'):,.4g}",
        f"{records[-1]['memory_peak_bytes'] / 2**30:.2f}",
        f"{idle_share(folder, mode):.1%}",
        f"{records[0]['first_step_time_s']:.1f}",
        f"{records[-1]['loss']:.5f}",
    )


def counted_records(folder: Path) -> list[dict]:
    return [record for record in _records(folder)[:-1] if record["step"] > _SKIPPED]


def idle_share(folder: Path, mode: str) -> float:
    """The part of the traced step, from its first kernel to the end of its last, in which none ran (on a CPU: no operation).

    The profiler's own work on the host is in it: an upper bound where the host is what the GPU waits for.
    """
    (path,) = (folder / "profile").glob("*.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    categories = _ON_GPU if mode == "gpu" else ("cpu_op",)
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in categories and "dur" in e]
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    return 1 - length_of_union(spans) / span


def tests_line(folder: Path, mode: str) -> tuple[bool, str]:
    said = _last_line(folder)
    fine = _code(folder) == 0 and (mode == "cpu" or "passed" in said)  # without a GPU all of them are skipped
    return fine, f"GPU tests: {said}"


def equality_line(out: Path) -> tuple[bool, str]:
    pair = [out / name for name in ("tiny-cpu", "tiny-gpu")]
    for folder in pair:
        if (code := _code(folder)) != 0:
            return False, f"losses of CPU and GPU: {folder.name}: {_why(folder, code)}"
    gaps = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(*map(_records, pair))]
    fine = gaps[0] < 1e-5 and max(gaps) < 1e-4
    return (
        fine,
        f"losses of CPU and GPU, tiny model in fp32: {gaps[0]:.1e} apart at step 1 (allowed 1e-5), {max(gaps):.1e} at most in {len(gaps)} steps (1e-4)",
    )


def verdict(out: Path, names: list[str], mode: str) -> tuple[bool, str]:
    reached = {}
    for name in names:
        if name.startswith("1B") and _code(out / name) == 0:
            reached[name] = _median(counted_records(out / name), "mfu")
    reached = {name: mfu for name, mfu in reached.items() if mfu is not None}
    if not reached:
        return (
            mode == "cpu",
            f"verdict: none: no MFU of a 1B variant is known ({'as expected on a CPU' if mode == 'cpu' else 'see above'})",
        )
    best = max(reached, key=reached.get)
    return reached[best] >= BAR, f"verdict: {best} reaches {reached[best]:.1%} MFU in bf16; the bar is {BAR:.0%}"


def _median(records: list[dict], key: str) -> float | None:
    values = [record[key] for record in records]
    return None if None in values else statistics.median(values)


def _records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _code(folder: Path) -> int:
    try:
        return int((folder / "code").read_text())
    except FileNotFoundError:
        return 1


def _why(folder: Path, code: int) -> str:
    lines = (folder / "console.log").read_text(errors="replace").splitlines()
    said = next((line for line in lines if line.startswith("error: ") or "out of memory" in line), _last_line(folder))
    return f"{'out of time' if code in (124, 137) else f'exit code {code}'}: {said}"


def _last_line(folder: Path) -> str:
    lines = [line for line in (folder / "console.log").read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "nothing was said"


if __name__ == "__main__":
    command, mode, *rest = sys.argv[1:]
    sys.exit(environment(mode) if command == "environment" else table(mode, Path(rest[0]), rest[1:]))
