"""What isolating documents and packing them whole cost; the tables for docs/packing.md.

    python benchmarks/packing_cost.py [--steps 30]

The debug model, as shipped, in one process on documents of the bundled novel (its paragraphs). The kinds of rows take turns
at each step, on one thread, and the clock is that of the process: what else the machine does hardly counts.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from models.decoder import Decoder  # noqa: E402
from trainer.config import Data  # noqa: E402
from trainer.config_load import load_config  # noqa: E402
from trainer.config_rules import resolve_config  # noqa: E402
from trainer.data.documents import BUNDLED_TEXT, BadLines, Part, read_documents  # noqa: E402
from trainer.data.packing import pack, rows_of  # noqa: E402
from trainer.data.rows import IGNORED, Rows, model_inputs  # noqa: E402
from trainer.data.stream import MemoryTokens, TokenStream  # noqa: E402
from trainer.data.tokenizer import ByteTokenizer  # noqa: E402
from trainer.loss import summed_cross_entropy  # noqa: E402
from trainer.optimizer import build_optimizer  # noqa: E402

KINDS = {
    "plain": Data(),
    "isolated": Data(isolate_documents=True),
    "isolated, best fit": Data(isolate_documents=True, packing="best_fit"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    novel = "".join(text for text, _ in read_documents(Part(str(BUNDLED_TEXT), "text"), BadLines()))
    paragraphs = [ByteTokenizer().encode(text) for text in novel.split("\n\n") if text.strip()]
    tokens = np.concatenate([np.append(ids, ByteTokenizer.eos_id) for ids in paragraphs])
    starts = np.cumsum([0, *(len(ids) + 1 for ids in paragraphs)])[:-1]
    stream = TokenStream([MemoryTokens(tokens, starts)])
    print("| rows of | rows | tokens/s | labels/s | filled |\n|---|---|---|---|---|")
    for seq_len in (128, 1024):
        of_kind = {name: rows_of(data, stream, seq_len) for name, data in KINDS.items()}
        measure(of_kind, seq_len, options.steps)
    packing_speed()


def measure(of_kind: dict[str, Rows], seq_len: int, n_steps: int) -> None:
    """Median step of each kind of row: 2 sequences forward and backward, clip and update left out, 2,048 tokens a step."""
    config = load_config("debug")
    model = Decoder(resolve_config(config, 1).architecture, seq_len)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    n_rows = 2048 // seq_len
    times: dict[str, list[float]] = {name: [] for name in of_kind}
    n_labels = dict.fromkeys(of_kind, 0)
    for step in range(n_steps + 2):
        for name, rows in of_kind.items():
            start = time.process_time()
            entries = [model_inputs(rows[(step * n_rows + i) % len(rows)]) for i in range(n_rows)]
            tokens, labels, *positions = (torch.stack(tensors) for tensors in zip(*entries))
            n_valid = int((labels != IGNORED).sum())
            for batch in zip(*(tensor.split(2) for tensor in (tokens, labels, *positions))):
                logits = model(batch[0], *batch[2:]).flatten(0, 1)
                (summed_cross_entropy(logits, batch[1].flatten()) / n_valid).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                times[name].append(time.process_time() - start)
                n_labels[name] += n_valid
    for name, rows in of_kind.items():
        step_s = statistics.median(times[name])
        print(
            f"| {seq_len} tokens, {name} | {len(rows):,} | {2048 / step_s:,.0f} | {n_labels[name] / n_steps / step_s:,.0f} "
            f"| {rows.share_filled:.2%} |"
        )


def packing_speed() -> None:
    print("\n| documents | row | filled | index, bytes a piece | seconds |\n|---|---|---|---|---|")
    for n, seq_len in ((100_000, 2048), (1_000_000, 2048), (1_000_000, 8192)):
        lengths = np.random.default_rng(0).lognormal(6, 1.2, n).astype(np.int64) + 2
        starts = np.concatenate(([0], lengths.cumsum()))
        start = time.process_time()
        packing = pack(starts, seq_len)
        seconds = time.process_time() - start
        n_bytes = packing.first.nbytes + packing.n_inputs.nbytes + packing.row_starts.nbytes
        filled = packing.n_inputs.sum() / (len(packing.row_starts) - 1) / seq_len
        print(f"| {n:,} | {seq_len:,} | {filled:.3%} | {n_bytes / len(packing.first):.1f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
