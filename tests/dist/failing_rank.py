"""A rank of a real job, except that rank 1 raises in the middle of step 3. Run under torchrun by test_command.py."""

import os
import sys

from trainer import loop
from trainer.__main__ import main

if os.environ["RANK"] == "1":
    calls = {"n": 0}
    original = loop.next_batch

    def next_batch(run):
        calls["n"] += 1
        if calls["n"] == 3:
            raise RuntimeError("planted fault")
        return original(run)

    loop.next_batch = next_batch

sys.exit(main())
