"""Which rows make up the global batch of a step, and the loader that fetches a rank's share of it."""

import hashlib
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.config import Config, Data
from trainer.data.documents import read_documents, source_of
from trainer.data.packing import rows_of
from trainer.data.rows import IGNORED, Rows, model_inputs, token_stream
from trainer.data.tokenizer import load_tokenizer_for
from trainer.signals import stop_signals


@dataclass(frozen=True)
class RowOrder:
    """The endless order of rows: epoch after epoch, each in its own shuffle.

    ``rows(k)`` of sample number k (0 is the run's first) depends on the seed and k alone.
    """

    n_rows: int
    seed: int
    shuffle: bool

    def epoch(self, number: int) -> torch.Tensor:
        """The rows of one epoch, int64 [n_rows]."""
        if not self.shuffle:
            return torch.arange(self.n_rows)
        digest = hashlib.sha256(f"{self.seed}/{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randperm(self.n_rows, generator=generator)

    def samples_from(self, sample: int) -> Iterator[int]:
        """Rows of samples ``sample``, ``sample + 1``, ... without end."""
        number, offset = divmod(sample, self.n_rows)
        while True:
            yield from self.epoch(number)[offset:].tolist()
            number, offset = number + 1, 0


class StepSampler:
    """One data rank's rows of each step: its contiguous share of the step's global batch.

    A step's batch depends on (seed, step) alone; ``dp_index`` of ``dp`` only says which share to read.
    """

    def __init__(self, order: RowOrder, global_batch_size: int, dp_index: int, dp: int, first_step: int):
        assert global_batch_size % dp == 0, "the config check compares these before"
        self.order = order
        self.global_batch_size = global_batch_size
        self.share = global_batch_size // dp
        self.dp_index = dp_index
        self.first_step = first_step

    def __iter__(self) -> Iterator[list[int]]:
        samples = self.order.samples_from((self.first_step - 1) * self.global_batch_size)
        while True:
            batch = [next(samples) for _ in range(self.global_batch_size)]
            yield batch[self.dp_index * self.share : (self.dp_index + 1) * self.share]


def load_rows(data: Data, seq_len: int, vocab_size: int, key: str = "data.path") -> Rows:
    """Read and tokenize the text of the ``[data]`` section. Raises ``UserError``, with ``key``, for what the user can mend."""
    tokenizer = load_tokenizer_for(data.tokenizer, vocab_size)
    stream, starts = token_stream(read_documents(data.source, data.path, key), tokenizer)
    return rows_of(data, stream, starts, seq_len, key)


def load_validation_rows(config: Config, vocab_size: int) -> dict[str, Rows]:
    """The rows of each validation set by name; "" is the training text, where the config names none."""
    section, seq_len = config.validation, config.training.seq_len
    if not section.sets:
        return {"": load_rows(config.data, seq_len, vocab_size)}
    return {
        name: load_rows(
            config.data.model_copy(update={"source": source_of(path), "path": path}),
            seq_len,
            vocab_size,
            key=f"validation.sets.{name}",
        )
        for name, path in section.sets.items()
    }


def make_loader(
    rows: Rows, data: Data, global_batch_size: int, dp_index: int, dp: int, first_step: int
) -> StatefulDataLoader:
    """Batches of this data rank from ``first_step`` (1-based) on: what a row has, int64 [sequences, S].

    The position is the step alone, so the loader's own state, which knows a rank and its workers, is not
    saved: a run may go on with any number of either.
    """
    order = RowOrder(len(rows), data.seed, data.shuffle)
    sampler = StepSampler(order, global_batch_size, dp_index, dp, first_step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
        return StatefulDataLoader(
            rows,
            batch_sampler=sampler,
            num_workers=data.workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own: the global one belongs to the training state
            worker_init_fn=_leave_signals_to_the_rank,
        )


def batches_in_order(rows: Rows, global_batch_size: int, dp_index: int, dp: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """This data rank's share of every row once, in file order, as a step takes it: int64 [sequences, S] each.

    Every rank gets as many batches, all of one shape: past the last row, labels that do not count.
    """
    share = global_batch_size // dp
    past_the_end = rows[0] | {"labels": torch.full_like(rows[0]["labels"], IGNORED)}
    for first in range(0, len(rows), global_batch_size):
        mine = range(first + dp_index * share, first + (dp_index + 1) * share)
        entries = [model_inputs(rows[row] if row < len(rows) else past_the_end) for row in mine]
        yield tuple(torch.stack(tensors) for tensors in zip(*entries))


def _leave_signals_to_the_rank(worker: int) -> None:
    """A signal to the whole process group must not kill a worker while its rank still finishes a step."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
