"""A rank of a real job with a planted fault, run under torchrun by the tests.

FAULT in the environment: "RANK STEP KIND", where KIND is "raise", "kill" (SIGKILL), "sleep" (for ever, in place of the
next batch), "stop" (SIGSTOP), "user" (an error of the user's), "save" (for ever, in the save of that step) or "dies" (SIGKILL,
there), "memory" (asks for a petabyte). It strikes once: in the first start of the group.
"""

import os
import signal
import sys
import time

import torch

from trainer import loop
from trainer.__main__ import main
from trainer.checkpoint_writer import CheckpointWriter
from trainer.errors import UserError

rank, step, kind = os.environ.get("FAULT", "1 3 raise").split()


def strike() -> None:
    if kind == "raise":
        raise RuntimeError("planted fault")
    if kind == "user":
        raise UserError("planted: a file that only this rank misses")
    if kind == "memory":
        torch.empty(10**15)
    if kind == "sleep":
        time.sleep(10_000)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


strikes = os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
if strikes and kind in ("save", "dies"):
    original_write = CheckpointWriter._write

    def write(self, saved, *arguments):
        if saved == int(step) and kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if saved == int(step):
            time.sleep(10_000)
        original_write(self, saved, *arguments)

    CheckpointWriter._write = write
elif strikes:
    calls = {"n": 0}
    original = loop.next_batch

    def next_batch(run):
        calls["n"] += 1
        if calls["n"] == int(step):
            strike()
        return original(run)

    loop.next_batch = next_batch

sys.exit(main())
