"""What the time model says of single published runs on A100 and H100, and the ratios that need no efficiency.

    python benchmarks/planner_peers.py [--published DIR]

With DIR, the folder of ``published_runs.md``, each prediction is shown over the published figure of its row.
The runs' layouts are written here; their figures are others' and are not.
"""

import argparse
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.foreign_trainers import (  # noqa: E402
    Kernels,
    Run,
    embedding_operations,
    head_operations,
    layer_operations,
    step_seconds,
)  # fmt: skip
from parallelize.planner.hardware import Cluster, cluster_of  # noqa: E402
from parallelize.planner.op_time import seconds  # noqa: E402
from parallelize.planner.operations import Collective, Elementwise  # noqa: E402
from parallelize.planner.replay import StageTime, action_orders, replay  # noqa: E402
from parallelize.schedules import schedule_of  # noqa: E402

KERNELS = Kernels(flash1=0.512, torch_norm=1.76, zero=0.275)


def llama(hidden, n_layers, n_heads, ffn, n_kv_heads=8, vocab=128_256, **more) -> Run:
    shape = dict(hidden=hidden, n_layers=n_layers, n_heads=n_heads, ffn=ffn, n_kv_heads=n_kv_heads, vocab=vocab)
    return Run(**{**shape, **dict(model="", style="llama", seq_len=8192, tp=1, pp=1, kernel="flash2"), **more})


def gpt(hidden, n_layers, n_heads, **more) -> Run:
    shape = dict(hidden=hidden, n_layers=n_layers, n_heads=n_heads, ffn=4 * hidden, vocab=51_200, seq_len=2048)
    return Run(**{**shape, **dict(model="", style="gpt", recompute="layer"), **more})


def fsdp_seconds(run: Run, cluster: Cluster, kernels: Kernels) -> float:
    """A step of FSDP2, or of DeepSpeed's ZeRO-3 of 2021 (unfused attention): every layer's parameters gathered
    for its forward and again for its backward, its gradients reduced (in fp32) after it.

    Of a layer's compute and communication the longer counts, and with ZeRO-3 also a part of the shorter:
    ``fsdp_exposed``, which was fitted to row 13.
    """
    exposed = cluster.calibration.fsdp_exposed if run.kernel == "fused" else 0.0
    calibration, layout = cluster.calibration, run.layout

    def total(operations) -> float:
        return sum(seconds(operation, cluster, layout) for operation in operations)

    (forward, backward), head = layer_operations(run, kernels), head_operations(run, kernels)
    parameters = run.layer_parameters // run.tp
    gather = seconds(Collective("all_gather", "dp_shard", 2 * parameters), cluster, layout) / kernels.zero
    reduce = seconds(Collective("reduce_scatter", "dp_shard", 4 * parameters), cluster, layout) / kernels.zero
    again = {"layer": 1.0, "half": 0.5}.get(run.recompute, 0.0) * total(forward)
    layer = 0.0
    for pair in ((total(forward), gather), (total(backward) + again, gather + reduce)):
        layer += max(pair) + exposed * min(pair)
    ends = sum(total(part) for part in (*head, *embedding_operations(run)))
    everything = run.n_layers * run.layer_parameters + 2 * run.vocab * run.hidden
    update = total([Elementwise(int(44 * everything / run.layout.world_size))])
    one = run.n_layers * layer + ends + calibration.microbatch_s
    return run.n_microbatches * one + update + calibration.step_s


@dataclass(frozen=True)
class Peer:
    """unit: of the published figure: tps (tokens/s of a GPU), s, or tflops (model FLOPs, recomputation counted).
    figure: which of the numbers in the row's result.
    """

    row: int
    name: str
    gpu: str
    run: Run
    unit: str
    fsdp: bool = False
    figure: int = 0

    @property
    def label(self) -> str:
        return cluster_of(self.gpu, 1).calibration.label

    @property
    def predicted(self) -> float:
        run = self.run
        n_gpus = run.layout.world_size
        cluster = cluster_of(self.gpu, -(-n_gpus // 8))
        step_s = (fsdp_seconds if self.fsdp else step_seconds)(run, cluster, KERNELS)
        n_tokens = run.global_batch * run.seq_len
        if self.unit == "s":
            return step_s
        if self.unit == "tps":
            return n_tokens / step_s / n_gpus
        # arXiv 2104.04473, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h), a forward more for recomputation
        h, n_layers = run.hidden, run.n_layers
        ends = 1 + run.seq_len / (6 * h) + run.vocab / (16 * n_layers * h)
        return 96 * n_tokens * n_layers * h * h * ends / step_s / n_gpus / 1e12


L8B = dict(hidden=4096, n_layers=32, n_heads=32, ffn=14336)
L70B = dict(hidden=8192, n_layers=80, n_heads=64, ffn=28672)
G175B = dict(hidden=12288, n_layers=96, n_heads=96)


def peers() -> list[Peer]:
    found = [
        Peer(2, "8B FSDP2", "h100", llama(**L8B, micro_batch=2, global_batch=16, dp=8, recompute="half"), "tps", True),
        Peer(4, "8B FSDP2", "h100", llama(**L8B, micro_batch=2, global_batch=256, dp=128, recompute="half"), "tps", True, 1),
        Peer(5, "8B FSDP2 x tp", "h100",
             llama(**L8B, micro_batch=12, global_batch=96, dp=8, tp=8, recompute="half", sequence_parallel=True), "tps", True),
        Peer(6, "70B FSDP2 x tp", "h100",
             llama(**L70B, micro_batch=16, global_batch=512, dp=32, tp=8, recompute="layer", sequence_parallel=True), "tps", True),
        Peer(11, "22B, full", "a100", gpt(6144, 48, 64, micro_batch=4, global_batch=4, tp=8, pp=1, dp=1), "s"),
        Peer(11, "22B, selective", "a100",
             gpt(6144, 48, 64, micro_batch=4, global_batch=4, tp=8, pp=1, dp=1, recompute="attention", sequence_parallel=True), "s", figure=1),
        Peer(14, "1T", "a100", gpt(25600, 128, 160, micro_batch=1, global_batch=3072, tp=8, pp=64, dp=6), "tflops"),
        Peer(16, "MPT-7B FSDP", "h100", mpt(4096, 32, 32, micro_batch=6, global_batch=48, dp=8), "tps", True),
        Peer(16, "MPT-70B FSDP", "h100",
             mpt(8192, 80, 64, micro_batch=8, global_batch=1024, dp=128, recompute="layer"), "tps", True, 1),
        Peer(16, "MPT-70B FSDP", "h100",
             mpt(8192, 80, 64, micro_batch=8, global_batch=4096, dp=512, recompute="layer"), "tps", True, 2),
    ]  # fmt: skip
    for index, (dp, micro_batch) in enumerate(zip((4, 8, 16), (4, 2, 1))):
        n_gpus = 96 * dp
        run = gpt(**G175B, micro_batch=1, global_batch=1536, tp=8, pp=12, dp=dp)
        found.append(Peer(12, f"175B tp x pp, {n_gpus} GPUs", "a100", run, "tflops", figure=index))
        zero3 = replace(run, micro_batch=micro_batch, tp=1, pp=1, dp=n_gpus)
        found.append(Peer(13, f"175B ZeRO-3, {n_gpus} GPUs", "a100", zero3, "tflops", True, index))
    return found


def mpt(hidden, n_layers, n_heads, **more) -> Run:
    shape = dict(hidden=hidden, n_layers=n_layers, n_heads=n_heads, ffn=4 * hidden, vocab=50_368, seq_len=2048)
    return Run(**{**shape, **dict(model="", style="gpt", tp=1, pp=1, kernel="flash2"), **more})


def published_figures(folder: Path) -> dict[int, list[float]]:
    """Row number -> the numbers of its result: of its last cell but two, which starts with numbers."""
    figures = {}
    for line in (folder / "published_runs.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 8 and cells[0].isdigit():
            result = re.sub(r"\(.*?\)|bf16|float8", "", cells[5]).replace(",", "")
            figures[int(cells[0])] = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", result)]
    return figures


def interleaving_gain(pp: int, n_microbatches: int) -> float:
    """1F1B's time over Interleaved1F1B's with 2 stages a rank, sends free: from the replay of both."""
    whole, half = StageTime(1.0, 2.0, 0.0), StageTime(0.5, 1.0, 0.0)
    plain = replay(action_orders(schedule_of("1F1B"), pp, 1, n_microbatches), [whole] * pp)
    interleaved = replay(action_orders(schedule_of("Interleaved1F1B"), pp, 2, n_microbatches), [half] * 2 * pp)
    return plain.end_s / interleaved.end_s


def table(folder: Path | None) -> list[str]:
    figures = published_figures(folder) if folder else {}
    lines = ["| row | run | predicted | over the published figure | constants |", "|---|---|---|---|---|"]
    for peer in sorted(peers(), key=lambda peer: peer.row):
        predicted = peer.predicted
        # Seconds are inverted, so that above 1 is always too fast.
        over = ""
        if peer.row in figures:
            given = figures[peer.row][peer.figure]
            over = f"{given / predicted if peer.unit == 's' else predicted / given:.2f}"
        lines.append(f"| {peer.row} | {peer.name} | {predicted:.4g} {peer.unit} | {over} | {peer.label} |")
    return lines


def ratios() -> list[str]:
    by_name = {(peer.row, peer.name): peer.predicted for peer in peers()}
    saved = (1 / 8 - 1 / 128) * 16 * 8.03e9 / 2**30
    lines = [
        f"- Interleaved1F1B with 2 stages a rank over 1F1B at pp 8 and 8 micro-batches: {interleaving_gain(8, 8):.3f}.",
        f"- FSDP2 of an 8B model from 8 to 128 GPUs: {saved:.1f} GiB of state less.",
        f"- 22B, full over selective recomputation: {by_name[11, '22B, full'] / by_name[11, '22B, selective']:.2f}.",
    ]
    for n_gpus in (384, 768, 1536):
        gain = by_name[12, f"175B tp x pp, {n_gpus} GPUs"] / by_name[13, f"175B ZeRO-3, {n_gpus} GPUs"]
        lines.append(f"- 175B on {n_gpus} A100, tp x pp over ZeRO-3: {gain:.2f}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, metavar="DIR", help="folder of published_runs.md")
    print("\n".join([*table(parser.parse_args().published), "", *ratios()]))


if __name__ == "__main__":
    main()
