"""A rank of a real job with a planted fault, run under torchrun by the tests.

FAULT in the environment: "RANK STEP KIND", where KIND is "raise", "kill" (SIGKILL), "sleep" (for ever, in the model's
forward), "stop" (SIGSTOP) or "user" (an error of the user's). It strikes once: in the first start of the group.
"""

import os
import signal
import sys
import time

from trainer import loop
from trainer.__main__ import main
from trainer.errors import UserError

rank, step, kind = os.environ.get("FAULT", "1 3 raise").split()


def strike() -> None:
    if kind == "raise":
        raise RuntimeError("planted fault")
    if kind == "user":
        raise UserError("planted: a file that only this rank misses")
    if kind == "sleep":
        time.sleep(10_000)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    calls = {"n": 0}
    original = loop.next_batch

    def next_batch(run):
        calls["n"] += 1
        if calls["n"] == int(step):
            strike()
        return original(run)

    loop.next_batch = next_batch

sys.exit(main())
