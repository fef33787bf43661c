"""Reading published step times from CSV files, as ``Run``s. The columns are those of their sources (``planner_accuracy``)."""

import csv
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.foreign_trainers import Run

# LLaMA (arXiv 2302.13971), table 2, and its released shapes: hidden, layers, heads, ffn.
LLAMA = {"7B": (4096, 32, 32, 11008), "13B": (5120, 40, 40, 13824), "30B": (6656, 60, 52, 17920), "65B": (8192, 80, 64, 22016)}  # fmt: skip
LLAMA_VOCAB = 128_000  # these runs' own; it gives back their table's MFU
LLAMA_BATCH = {2048: 2048, 8192: 512}  # sequence length -> sequences a step; likewise
GPT_VOCAB = 51_200  # GPT-2's, padded as Megatron-LM pads it


@dataclass(frozen=True)
class Row:
    """A run, the family whose constants it helps to fit, and the group among which a planner chooses.

    disturbed: why its time is not believed, if so.
    """

    run: Run
    family: str  # llama, gpt (several nodes, recomputed) or gpt, one node
    group: tuple
    disturbed: str = ""


def read_folder(folder: Path) -> list[Row]:
    """Every row of every CSV file with known columns. Raises ``ValueError`` where there is none."""
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = list(csv.DictReader(file))
        columns = set(table[0]) if table else set()
        if "activation_checkpointing_type" in columns:
            rows += [_llama(cells) for cells in table]
        elif "iteration time (ms)" in columns:
            rows += [_gpt(cells) for cells in table]
        else:
            print(f"{path.name}: skipped, unknown columns")
    if not rows:
        raise ValueError(f"{folder}: no .csv file of published runs here; give their folder with --published DIR")
    return _mark_disturbed(rows)


def _llama(cells: dict) -> Row:
    found = re.search(r"llama_(\d+B)", cells["file"])
    if not found or found[1] not in LLAMA:
        raise ValueError(
            f"file = {cells['file']!r}: not a model known here; add its shape to LLAMA: {', '.join(LLAMA)}"
        )
    name = found[1]
    hidden, n_layers, n_heads, ffn = LLAMA[name]
    seq_len = 8192 if "8k_seq" in cells["file"] else 2048
    n_gpus, kernel, time = int(cells["World Size"]), cells["kernel"], cells["Average Step Time"]
    tp, pp = int(cells["model_parallel_size"]), int(cells["pipe_parallel_size"])
    run = Run(
        model=f"llama {name}", style="llama", hidden=hidden, n_layers=n_layers, n_heads=n_heads, ffn=ffn,
        vocab=LLAMA_VOCAB, seq_len=seq_len, global_batch=LLAMA_BATCH[seq_len],
        micro_batch=int(cells["micro_batch_size"]), tp=tp, pp=pp, dp=n_gpus // (tp * pp),
        kernel={"flash_attention2": "flash2", "flash_attentionv1.0.8": "flash1"}.get(kernel.split(" + ")[0], kernel),
        fused_norm="RMS kernel" in kernel,
        recompute="layer" if cells["activation_checkpointing_type"] == "every_layer" else "none",
        sequence_parallel=cells["sequence_parallel"] == "True",
        measured_s=None if "OOM" in time else float(time),
    )  # fmt: skip
    return Row(run, "llama", (run.model, n_gpus, seq_len, kernel))


def _gpt(cells: dict) -> Row:
    n_gpus, hidden, n_layers = (int(cells[column]) for column in ("# GPUs", "hidden size", "# layers"))
    run = Run(
        model=f"gpt {hidden} x {n_layers}", style="gpt", hidden=hidden, n_layers=n_layers,
        n_heads=int(cells["attention heads"]), ffn=4 * hidden, vocab=GPT_VOCAB,
        seq_len=int(cells["sequence length"]), global_batch=int(cells["global batch"]),
        micro_batch=int(cells["micro batch"]), tp=int(cells["tensor parallelism"]),
        pp=int(cells["pipeline parallelism"]), dp=int(cells["data parallelism"]),
        recompute="layer" if n_gpus > 8 else "none",  # without it the larger would not fit, and their times say so
        measured_s=float(cells["iteration time (ms)"]) / 1000,
    )  # fmt: skip
    return Row(run, "gpt" if n_gpus > 8 else "gpt, one node", (run.model, n_gpus, run.global_batch))


def _mark_disturbed(rows: list[Row]) -> list[Row]:
    """A time that is 1.25 x its neighbour's, of the same layout with the next micro-batch size, bubbles apart.

    Judged by the measurements alone. No kernel is that sensitive to it.
    """

    def busy_s(run: Run) -> float:
        return run.measured_s * run.n_microbatches / (run.n_microbatches + run.pp - 1)

    alike = defaultdict(list)
    for index, row in enumerate(rows):
        if row.run.measured_s and row.family != "gpt, one node":
            alike[replace(row.run, micro_batch=1, measured_s=None), row.group].append(index)
    marked = list(rows)
    for indexes in alike.values():
        indexes.sort(key=lambda index: rows[index].run.micro_batch)
        for one, other in [*zip(indexes, indexes[1:]), *zip(indexes[1:], indexes)]:
            if busy_s(rows[one].run) > 1.25 * busy_s(rows[other].run):
                marked[one] = replace(rows[one], disturbed="far slower than the next micro-batch size")
    return marked
