"""The output folder: one writer at a time, and the same folder for every rank. And folders made in one go."""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch.distributed as dist

from trainer.errors import UserError
from trainer.rank import on_main_rank

_LOCK_PATIENCE_S = 8  # loader workers of a killed run notice within 5 s, and hold its lock until then


def open_output_folder(folder: Path) -> IO[str]:
    """Make the folder, lock it for this run, and check that every rank sees it. Called by all ranks together.

    Returns a file that holds the lock while it is open. Raises ``UserError`` if another run holds it, or if
    the machines do not share the folder: each would write a part of a checkpoint that none could read.
    """
    lock: IO[str] | None = None

    def lock_it() -> str:
        nonlocal lock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / ".lock").open("a+", encoding="utf-8")  # not "w": the token in it may be another run's
            _lock(lock, folder)
            token = secrets.token_hex()
            lock.truncate(0)
            lock.write(token)
            lock.flush()
            os.fsync(lock.fileno())  # a network file system shows other machines nothing before
        except OSError as error:
            raise UserError(f"job.output_dir = {str(folder)!r} cannot be written: {error}") from None
        return token

    token = on_main_rank(lock_it)
    sees = (folder / ".lock").is_file() and (folder / ".lock").read_text(encoding="utf-8") == token
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sees)
    if not all(everyone):
        raise UserError(
            f"job.output_dir = {str(folder)!r} is not the same folder on every machine (rank {everyone.index(False)} does "
            "not see what rank 0 writes): give a path on a file system that they share"
        )
    return lock or (folder / ".lock").open(encoding="utf-8")


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing. Raises ``UserError``."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from None


def _lock(lock: IO[str], folder: Path) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(f"job.output_dir = {str(folder)!r}: another run is writing there now") from None
            time.sleep(0.5)
        except OSError:  # a file system without locks
            return None


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which appears under its name once it is complete, and not at all after an error.

    Raises ``UserError`` if there is something under that name, or it cannot be written.
    """
    shown, out = out, out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{shown} exists: name a new directory, or remove it")
    partial = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        partial.chmod(0o755)  # mkdtemp's is for this user alone
        yield partial
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except OSError as error:
        raise UserError(f"{shown} cannot be written: {error}") from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
