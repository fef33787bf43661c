"""How a rank ends, and how its launcher learns with which code."""

import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from trainer.errors import STATUS_FILE_VARIABLE


def clear_status() -> None:
    """Forget the codes of an earlier start of this group. Called before the ranks meet."""
    if os.environ.get("LOCAL_RANK") == "0" and STATUS_FILE_VARIABLE in os.environ:
        Path(os.environ[STATUS_FILE_VARIABLE]).write_text("")


def leave_status(code: int) -> None:
    """Torchrun, when a signal stops it, does not tell the codes of its workers: each leaves its own."""
    if STATUS_FILE_VARIABLE in os.environ:
        with Path(os.environ[STATUS_FILE_VARIABLE]).open("a") as file:
            file.write(f"{code}\n")


def read_status(text: str) -> int | None:
    """The code of the group: that of the first rank that did not end well."""
    codes = [int(line) for line in text.split()]
    return next((code for code in codes if code != 0), codes[0] if codes else None)


def torchruns_code(code: int, restart: bool) -> int:
    """What torchrun is told. It starts the group again on any code but 0: where that would end the same way it gets 0,
    and the launcher reads the true code from the status file."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return 0 if restarts and not restart and STATUS_FILE_VARIABLE in os.environ else code


def exit_now(code: int, restart: bool, status: bool = True) -> NoReturn:
    """End the process, whatever its other threads do.

    Not by Python's own way out: one of gloo's threads that lets go of a tensor meanwhile would abort it
    (pytorch issues 38228 and 190489).
    """
    if status:
        leave_status(code)
    with contextlib.suppress(OSError):  # who reads may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(torchruns_code(code, restart))
