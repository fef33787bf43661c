"""Train the debug model on the bundled novel at several layouts, and plot the loss curves over each other.

    python benchmarks/loss_curves.py [STEPS]      # 200: about 20 minutes on 2 cores

Writes docs/loss_curves.md and docs/loss_curves.png. Needs the extra "plot".
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

try:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("matplotlib is missing: pip install -e '.[plot]'")

LAYOUTS = {
    "one process": [],
    "tp 2": ["--parallel.tp=2"],
    "dp_shard 4, micro-batches of 1": ["--parallel.dp_shard=4", "--training.micro_batch_size=1"],
    "dp_replicate 2 x dp_shard 2, full recompute": [
        "--parallel.dp_replicate=2", "--parallel.dp_shard=2", "--activation_checkpoint.mode=full",
    ],
    "pp 2 x dp_shard 2, ZBVZeroBubble": [
        "--parallel.pp=2", "--parallel.dp_shard=2", "--parallel.schedule=ZBVZeroBubble", "--training.micro_batch_size=1",
    ],
    "pp 2 x dp_shard 2 x tp 2, Interleaved1F1B": [
        "--parallel.pp=2", "--parallel.dp_shard=2", "--parallel.tp=2", "--parallel.schedule=Interleaved1F1B",
    ],
}  # fmt: skip

PAGE = """# Loss curves of one run at {n} layouts

Made by `python benchmarks/loss_curves.py {steps}` on torch {torch}, CPU, fp32: the debug model (4.9M parameters) on
the bundled novel, {steps} steps of 8 sequences of 128 tokens, each layout a run of its own of `run_train.sh`.

![loss against step at {n} layouts; the difference from one process](loss_curves.png)

| layout | loss at step 1 | at step {steps} | largest relative difference from one process |
|---|---|---|---|
{rows}

Largest difference of any step at any layout: {worst:.1e}. Initial weights and batches are the same bits at every layout;
gradients differ by the rounding of fp32 sums that are taken in another order, about 1e-7, and training amplifies that
slowly. Two runs at one layout are bitwise equal.
"""


def losses_of(flags: list[str], steps: int, folder: Path) -> list[float]:
    """Run the front door once; the loss of every step."""
    command = [
        str(ROOT / "run_train.sh"), "--config", "debug.toml", f"--job.output_dir={folder}", f"--training.steps={steps}",
        "--training.global_batch_size=8", "--checkpoint.interval=0", "--metrics.tensorboard=false", *flags,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    return [record["loss"] for record in records]


def main(steps: int) -> None:
    curves = {}
    with tempfile.TemporaryDirectory(prefix="meshloom-curves-") as scratch:
        for number, (name, flags) in enumerate(LAYOUTS.items()):
            curves[name] = losses_of(flags, steps, Path(scratch) / str(number))
            print(f"{name}: {curves[name][0]:.6f} ... {curves[name][-1]:.6f}", flush=True)
    reference = curves["one process"]
    differences = {
        name: [abs(loss - want) / want for loss, want in zip(curve, reference)] for name, curve in curves.items()
    }
    plot(curves, differences)
    rows = [
        f"| {name} | {curve[0]:.6f} | {curve[-1]:.6f} | {max(differences[name]):.1e} |"
        for name, curve in curves.items()
    ]
    page = PAGE.format(
        n=len(curves), steps=steps, torch=torch.__version__.split("+")[0], rows="\n".join(rows),
        worst=max(map(max, differences.values())),
    )  # fmt: skip
    (ROOT / "docs" / "loss_curves.md").write_text(page)


def plot(curves: dict[str, list[float]], differences: dict[str, list[float]]) -> None:
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2), layout="constrained")
    for number, (name, curve) in enumerate(curves.items()):
        steps = range(1, len(curve) + 1)
        above.plot(steps, curve, label=name, linewidth=5 - 0.8 * number, color=f"C{number}")
        if number:
            below.semilogy(steps, [max(value, 1e-9) for value in differences[name]], linewidth=1, color=f"C{number}")
    above.set(ylabel="loss", title="One run, any layout")
    above.legend(fontsize="small")
    below.set(xlabel="step", ylabel="relative difference\nfrom one process")
    below.grid(alpha=0.3)
    figure.savefig(ROOT / "docs" / "loss_curves.png", dpi=110)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
