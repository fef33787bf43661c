"""Asked to stop: by Ctrl-C, by a scheduler, by torchrun."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from trainer.errors import EXIT_FAILED, LAUNCHER_VARIABLE

# One request may arrive twice: from a terminal or a scheduler that signals every process, and from torchrun, which
# passes on its own.
_SAME_REQUEST_S = 2.0


_NOHUP = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a process to stop: Ctrl-C, a scheduler (Slurm warns with SIGUSR1), a terminal that is gone but for nohup."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    return asked if _NOHUP else (*asked, signal.SIGHUP)


def on_stop_signal(action) -> None:
    for number in stop_signals():
        signal.signal(number, action)


def ignore_stop_signals() -> None:
    """For a process at its end: Python's own way out would bring back what kills it."""
    on_stop_signal(signal.SIG_IGN)


def end_with_parent() -> None:
    """Under torchrun: be asked to stop when it dies, even by SIGKILL, rather than train on unattended.

    (Saving may fail then, since torchrun keeps the store through which ranks find each other.)
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.environ.get(LAUNCHER_VARIABLE, str(os.getppid())) != str(os.getppid()):
            os._exit(EXIT_FAILED)  # it died before


def end_at_second_signal() -> None:
    """In the launcher, whose signals torchrun handles and heeds once: the same one again ends it and its ranks at once."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written by the C handler, whatever Python is doing
    threading.Thread(target=_listen_for_second, args=(reader,), name="signals", daemon=True).start()


def _listen_for_second(reader: int) -> None:
    first: dict[int, float] = {}
    while True:
        for number in os.read(reader, 64):
            now = time.monotonic()
            is_request = number in stop_signals()
            if is_request and now - first.setdefault(number, now) > _SAME_REQUEST_S:
                children = Path(f"/proc/self/task/{os.getpid()}/children")  # of the main thread, which starts them
                for child in children.read_text().split() if children.exists() else ():
                    os.kill(int(child), signal.SIGKILL)
                os._exit(EXIT_FAILED)


class StopRequest:
    """Remembers that this process was asked to stop; the loop acts on it once all ranks agree.

    The same signal a second time ends the process at once, unless it comes right behind the first.
    """

    def __init__(self):
        self._first: dict[int, float] = {}  # signal -> when
        self.requested = False
        end_with_parent()
        # A rank that waits for others to start is in torch's C++, where no handler runs: let it end at once.
        on_stop_signal(signal.SIG_DFL if "TORCHELASTIC_RUN_ID" in os.environ else self._handle)

    def listen(self) -> None:
        """From now on the loop looks at ``requested``."""
        on_stop_signal(self._handle)

    def _handle(self, number, frame):
        self.requested = True
        now = time.monotonic()
        if now - self._first.setdefault(number, now) > _SAME_REQUEST_S:
            os._exit(EXIT_FAILED)
