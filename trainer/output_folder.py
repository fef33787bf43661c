"""The output folder: one writer at a time, and the same folder for every rank."""

import fcntl
import secrets
from pathlib import Path
from typing import IO

import torch.distributed as dist

from trainer.errors import UserError
from trainer.rank import on_main_rank


def open_output_folder(folder: Path) -> IO[str]:
    """Make the folder, lock it for this run, and check that every rank sees it. Called by all ranks together.

    Returns a file that holds the lock while it is open. Raises ``UserError`` if another run holds it, or if
    the machines do not share the folder: each would write a part of a checkpoint that none could read.
    """
    lock = None

    def lock_it() -> str:
        nonlocal lock
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f'job.output_dir = "{folder}": another run is writing there now') from None
        except OSError:  # a file system without locks
            pass
        token = secrets.token_hex()
        lock.write(token)
        lock.flush()
        return token

    token = on_main_rank(lock_it)
    sees = (folder / ".lock").is_file() and (folder / ".lock").read_text() == token
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sees)
    if not all(everyone):
        blind = [rank for rank, seen in enumerate(everyone) if not seen]
        raise UserError(
            f'job.output_dir = "{folder}" is not the same folder on every machine (rank {blind[0]} does not see what '
            "rank 0 writes): give a path on a file system that they share"
        )
    return lock or (folder / ".lock").open()
