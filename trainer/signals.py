"""Asked to stop: by Ctrl-C, by a scheduler, by torchrun."""

import os
import signal
import time

from trainer.errors import EXIT_FAILED

_SAME_REQUEST_S = 2.0  # one Ctrl-C may arrive twice: from the terminal and from torchrun


class StopRequest:
    """Remembers that this process was asked to stop; the loop acts on it once all ranks agree.

    A second Ctrl-C ends the process at once. A second SIGTERM does not: schedulers send it to every process,
    and torchrun passes on the one it got itself; whoever is out of patience sends SIGKILL.
    """

    def __init__(self):
        self._first_interrupt: float | None = None
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number, frame):
        self.requested = True
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_interrupt is not None and now - self._first_interrupt > _SAME_REQUEST_S:
                os._exit(EXIT_FAILED)
            self._first_interrupt = self._first_interrupt or now
