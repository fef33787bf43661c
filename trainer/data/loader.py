"""The global batch of each step, and the loader that fetches a rank's share of it."""

import signal
import warnings
from collections.abc import Iterator

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.config import Data
from trainer.data.rows import IGNORED, Rows, model_inputs
from trainer.data.samples import Samples
from trainer.data.stream import TokenStream
from trainer.signals import stop_signals


class StepSampler:
    """One data rank's sample numbers of each step: its contiguous share of the step's global batch.

    A step's batch depends on (seed, step) alone; ``dp_index`` of ``dp`` only says which share to read.
    """

    def __init__(self, global_batch_size: int, dp_index: int, dp: int, first_step: int):
        assert global_batch_size % dp == 0, "the config check compares these before"
        self.global_batch_size = global_batch_size
        self.share = global_batch_size // dp
        self.dp_index = dp_index
        self.first_step = first_step

    def __iter__(self) -> Iterator[list[int]]:
        first = (self.first_step - 1) * self.global_batch_size + self.dp_index * self.share
        while True:
            yield list(range(first, first + self.share))
            first += self.global_batch_size


def make_loader(
    samples: Samples, data: Data, global_batch_size: int, dp_index: int, dp: int, first_step: int
) -> StatefulDataLoader:
    """Batches of this data rank from ``first_step`` (1-based) on: what a row has, int64 [sequences, S].

    The position is the step alone, so the loader's own state, which knows a rank and its workers, is not
    saved: a run may go on with any number of either.
    """
    sampler = StepSampler(global_batch_size, dp_index, dp, first_step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
        return StatefulDataLoader(
            samples,
            batch_sampler=sampler,
            num_workers=data.workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own: the global one belongs to the training state
            worker_init_fn=_leave_signals_to_the_rank,
        )


def checked(batches: Iterator[dict], samples: Samples) -> Iterator[dict[str, torch.Tensor]]:
    """The same batches. Raises ``UserError`` for an id that the model has no row for: here, where a worker could only fail."""
    streams = [rows.stream for rows in samples.rows.values()]
    for batch in batches:
        _check(batch, streams)
        yield batch


def _check(entry: dict[str, torch.Tensor], streams: list[TokenStream]) -> None:
    """Every stream has the range of the one model."""
    if not all(map(streams[0].fits, (entry["tokens"], entry["labels"].clamp(min=0)))):
        for stream in streams:
            stream.check_all()


def batches_in_order(rows: Rows, global_batch_size: int, dp_index: int, dp: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """This data rank's share of every row once, in file order, as a step takes it: int64 [sequences, S] each.

    Every rank gets as many batches, all of one shape: past the last row, labels that do not count.
    """
    share = global_batch_size // dp
    past_the_end = rows[0] | {"labels": torch.full_like(rows[0]["labels"], IGNORED)}
    for first in range(0, len(rows), global_batch_size):
        mine = range(first + dp_index * share, first + (dp_index + 1) * share)
        entries = [rows[row] if row < len(rows) else past_the_end for row in mine]
        for entry in entries:
            _check(entry, [rows.stream])
        yield tuple(torch.stack(tensors) for tensors in zip(*map(model_inputs, entries)))


def _leave_signals_to_the_rank(worker: int) -> None:
    """A signal to the whole process group must not kill a worker while its rank still finishes a step."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
