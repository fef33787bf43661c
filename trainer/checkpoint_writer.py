"""Making a state on disk a checkpoint: complete or not there, at once or in the background, and never in silence."""

import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint_files import Writer
from trainer.checkpoint_folder import (
    best_checkpoint,
    complete_checkpoints,
    remove_checkpoint,
    remove_left_overs,
    step_of,
    write_state,
)
from trainer.config import Checkpoint
from trainer.errors import StoppedRun, UserError
from trainer.manifest import part_of_manifest
from trainer.rank_report import SAVING_THREAD

_PATIENCE = timedelta(hours=3)  # of a rank whose own part is written, for the slowest disk


class SaveFailed(StoppedRun):
    """A checkpoint could not be written, on one rank or more: known to all."""


@functools.cache
def _group() -> dist.ProcessGroup:
    """The checkpoints' own process group: on the CPU, and never between the collectives of a step."""
    return dist.new_group(backend="gloo", timeout=_PATIENCE)


class CheckpointWriter:
    """Writes one checkpoint after another below ``root``. Every method is called by all ranks together."""

    def __init__(self, root: Path, settings: Checkpoint):
        self.root = root
        self.settings = settings
        self.failure: Exception | None = None  # of the newest save
        self._thread: threading.Thread | None = None
        _group()

    def write(self, step: int, tensors: dict, state: dict) -> None:
        """Write a checkpoint, after the one before. Nobody may change ``tensors`` before it is done."""
        self.wait()
        self.check()
        if not self.settings.async_save:
            self._try(step, tensors, state)
            self.check()
            return
        self._thread = threading.Thread(target=self._try, args=(step, tensors, state), name=SAVING_THREAD, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise ``SaveFailed`` if the newest save is over and has failed, unless the config says to go on.

        Raises whatever else went wrong in it as it is: another rank is gone, and nobody can go on.
        """
        going_on = isinstance(self.failure, SaveFailed) and self.settings.on_failure == "warn"
        if self.failure is not None and not going_on:
            raise self.failure

    def finish(self) -> None:
        """Wait for the last save. Raises ``SaveFailed`` whatever the config says: nothing comes after it."""
        self.wait()
        if self.failure is not None:
            raise self.failure

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def last_word(self) -> str:
        """What there is to go on from, once no save is under way."""
        self.wait()
        kept = complete_checkpoints(self.root)
        found = f"The newest checkpoint is {kept[-1]}" if kept else "There is no checkpoint"
        return found if self.failure is None else f"{found}; {self.failure}"

    def _try(self, step: int, tensors: dict, state: dict) -> None:
        try:
            self._write(step, tensors, state)
            self.failure = None
        except SaveFailed as failure:
            self.failure = failure
            if dist.get_rank() == 0 and self.settings.on_failure == "warn":
                print(f"warning: {failure}", file=sys.stderr, flush=True)
        except Exception as error:
            self.failure = error

    def _write(self, step: int, tensors: dict, state: dict) -> None:
        final = self.root / f"step-{step:08d}"
        partial = self.root / f"step-{step:08d}.partial"
        try:
            self._on_rank_0(self._start, partial)
            dcp.save(tensors, storage_writer=Writer(partial), process_group=_group())
            parts = self._on_all_ranks(part_of_manifest, partial)
            files = {name: entry for part in parts for name, entry in part.items()}
            self._on_rank_0(self._complete, partial, final, state | {"files": files})
        except CheckpointException as error:
            if dist.get_rank() == 0:  # what a full disk needs most
                shutil.rmtree(partial, ignore_errors=True)
            raise SaveFailed(_reason(final, error)) from None
        if dist.get_rank() == 0:
            self._retire(step)

    def _start(self, partial: Path) -> None:
        self.root.mkdir(exist_ok=True)  # not its parent: a run whose folder is gone must say so
        remove_left_overs(self.root)
        partial.mkdir()

    def _complete(self, partial: Path, final: Path, state: dict) -> None:
        write_state(partial, **state)
        sync_folder(partial)
        remove_checkpoint(final)  # only ever one that was not complete, or damaged
        os.rename(partial, final)
        sync_folder(self.root)

    def _retire(self, step: int) -> None:
        """Remove what ``keep_latest``, ``keep_every`` and ``keep_best`` do not keep, now that there is a newer one."""
        latest, every = self.settings.keep_latest, self.settings.keep_every
        if not latest:
            return
        # Those after this step were damaged, or of a run that began again from here: no reason to drop good ones.
        past = [folder for folder in complete_checkpoints(self.root) if step_of(folder) <= step]
        try:
            best = best_checkpoint(past) if self.settings.keep_best and len(past) > latest else None
        except UserError as error:  # it may be the best
            print(f"warning: no checkpoint is removed: {error.message()}", file=sys.stderr, flush=True)
            return
        for old in past[:-latest]:
            if (every and step_of(old) % every == 0) or (best and old == best[0]):
                continue
            try:
                remove_checkpoint(old)
            except OSError as error:
                print(f"warning: the old checkpoint {old} could not be removed: {error}", file=sys.stderr, flush=True)

    @staticmethod
    def _on_all_ranks(work: Callable, *arguments) -> list:
        """``work(*arguments)`` by rank; an error on one rank is raised on all, as DCP does it in its own phases."""
        try:
            mine = (work(*arguments), None)
        except Exception as error:
            mine = (None, str(error))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=_group())
        failures = {rank: (RuntimeError(text), None) for rank, (_, text) in enumerate(everyone) if text is not None}
        if failures:
            raise CheckpointException("save", failures)
        return [result for result, _ in everyone]

    @classmethod
    def _on_rank_0(cls, work: Callable, *arguments) -> None:
        cls._on_all_ranks(work if dist.get_rank() == 0 else lambda *_: None, *arguments)


def _reason(folder: Path, error: CheckpointException) -> str:
    lines = {}
    for rank, (cause, _) in sorted(error.failures.items()):
        text = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
        lines.setdefault(text, []).append(rank)
    causes = "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in lines.items())
    try:
        free = f"; {shutil.disk_usage(folder.parent).free / 2**20:,.0f} MiB are free there"
    except OSError:
        free = ""
    return f"checkpoint {folder} could not be written: {causes}{free}. Earlier checkpoints are as they were"


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a rename is not, before that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
