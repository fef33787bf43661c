"""Asked to stop: by Ctrl-C, by a scheduler, by torchrun."""

import os
import signal

from trainer.errors import EXIT_FAILED


class StopRequest:
    """Remembers that this process was asked to stop; the loop acts on it once all ranks agree.

    The same signal a second time ends the process at once. (Two different ones are normal: the terminal
    sends SIGINT to every process, and torchrun then SIGTERM to its workers.)
    """

    def __init__(self):
        self.requested = False
        self._seen: set[int] = set()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number, frame):
        if number in self._seen:
            os._exit(EXIT_FAILED)
        self._seen.add(number)
        self.requested = True
