"""Two threads beside the work of a rank, so that no rank waits for ever for one that will not come.

One listens: when a rank ends with an error, or a process on this machine is gone, it ends this rank too (NCCL, unlike
gloo, would wait). The other looks at the clock: a step or a save that takes longer than the config allows ends the job,
with the stacks of all ranks, and the ones that did not arrive named.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.errors import EXIT_FAILED
from trainer.exit_status import exit_now
from trainer.rank_report import last_collective, report_of, what_main_thread_does, write_stacks

_POLL_S = 0.5
_GRACE_S = 5  # for the main thread to say what it knows, once another rank has ended
_REPORTS_S = 8  # for the other ranks to say where they are
_STORE_S = 15  # for the store to take our own word; beyond that it is out of reach


class Watchdog:
    """Watches this rank once ``listen`` and ``watch`` are called; until then it does nothing."""

    def __init__(self):
        self.place = "rank 0"
        self.folder: Path | None = None
        self._limits: Mapping[str, float] = {}
        self._now: tuple[str, str | None, float, float] = ("starting", None, 0.0, 0.0)  # doing, key, limit, since
        self._store: dist.Store | None = None
        self._lost = False
        self._prefix = ""
        self._siblings: dict[int, int] = {}  # rank -> pid, of this machine
        self._hangs = threading.Event()
        self._over = threading.Event()
        self._mutex = threading.Lock()
        self._threads: list[threading.Thread] = []

    # What the main thread calls.

    def listen(self) -> None:
        """Begin to listen to the other ranks. Called by all ranks together."""
        self.place = f"rank {dist.get_rank()}"
        here = (socket.gethostname(), os.getpid(), secrets.token_hex(4))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, here)
        self._prefix = f"meshloom/{everyone[0][2]}/"  # of this start alone: the store outlives a restart
        self._siblings = {
            rank: pid for rank, (host, pid, _) in enumerate(everyone) if host == here[0] and rank != dist.get_rank()
        }
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if len(everyone) > 1 and address and port:
            # A connection of its own: the main thread may be waiting on the other one.
            self._store = dist.TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=_STORE_S))
            self._start(self._listen, "listener")

    def watch(self, limits: Mapping[str, float], folder: Path, place: str) -> None:
        """Begin to look at the clock. ``limits``: config key -> seconds, 0 for none; ``folder``: for stacks;
        ``place``: as in ``Mesh.place``."""
        self._limits, self.folder, self.place = limits, folder, place
        if any(limits.values()):
            self._start(self._look_at_the_clock, "watchdog")

    def begin(self, doing: str, key: str, factor: float = 1) -> None:
        """Something begins, such as a step, that has ``factor`` times the limit of ``key`` from now."""
        self._now = (doing, key, factor * self._limits.get(key, 0.0), time.monotonic())

    def pause(self, doing: str) -> None:
        """Something begins that may take as long as it takes."""
        self._now = (doing, None, 0.0, time.monotonic())

    @property
    def doing(self) -> str:
        """What the main thread is in, such as "step 5"."""
        return self._now[0]

    def leave(self) -> None:
        """This rank ends well."""
        self._over.set()
        for thread in self._threads:  # one that is in torch's C++ when Python ends would abort the process
            thread.join(timeout=_STORE_S + _GRACE_S)
        self._tell(f"left/{dist.get_rank()}", "")

    def end_all(self, code: int, restart: bool) -> None:
        """This rank ends with an error that it has said: the others are to end too. ``restart``: and may start again."""
        self._over.set()
        self._tell("end", json.dumps({"code": code, "restart": restart}))

    def ended(self) -> dict | None:
        """What a rank has left for the others by ``end_all``."""
        return self._read("end")

    # The two threads.

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _ask(self, question: Callable[[dist.Store], Any], default: Any = None) -> Any:
        """``question(store)``, one at a time; ``default`` if there is no store, or it does not answer."""
        if self._store is None or self._lost or not self._mutex.acquire(timeout=_GRACE_S):
            return default
        try:
            return question(self._store)
        except RuntimeError:  # who keeps it is gone
            self._lost = True
            return default
        finally:
            self._mutex.release()

    def _has(self, store: dist.Store, key: str) -> bool:
        return store.check([self._prefix + key])

    def _known(self, key: str) -> bool:
        return self._ask(lambda store: self._has(store, key), default=False)

    def _read(self, key: str) -> dict | None:
        text = self._ask(lambda store: store.get(self._prefix + key) if self._has(store, key) else None)
        return None if text is None else json.loads(text)

    def _tell(self, key: str, text: str) -> None:
        self._ask(lambda store: store.set(self._prefix + key, text))

    def _listen(self) -> None:
        while not self._over.wait(_POLL_S):
            if ended := self.ended():
                if not self._over.wait(_GRACE_S):
                    exit_now(ended["code"], ended["restart"])
                return
            if self._lost:
                # Where torchrun keeps the store, it is gone and has asked this rank to stop (rank.py). Else rank 0 is.
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not self._over.wait(_GRACE_S):
                    exit_now(EXIT_FAILED, restart=True)
                return
            if self._hangs.is_set() or self._known("hang"):
                return self._report_hang()
            for rank, pid in self._siblings.items():
                if not _is_alive(pid) and not self._known(f"left/{rank}") and not self.ended():
                    self._tell("end", json.dumps({"code": EXIT_FAILED, "restart": True}))

    def _look_at_the_clock(self) -> None:
        while not self._over.wait(_POLL_S):
            doing, key, limit_s, since = self._now
            if not limit_s or time.monotonic() - since < limit_s:
                continue
            self._hangs.set()
            write_stacks(self.folder, dist.get_rank())
            if self._store is not None and self._over.wait(_STORE_S):
                return
            # Alone, or nobody answers: then there is no one to compare with.
            lost = " The job's store does not answer: is the first machine, or the link to it, down?" * bool(
                self._store
            )
            print(
                f"error: {self.place} is in {doing} for more than {limit_s:g} s ({key}): "
                f"{what_main_thread_does()}.{lost} Stacks: {self.folder}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            exit_now(EXIT_FAILED, restart=True)

    def _report_hang(self) -> None:
        """Leave word of where this rank is; the first to come waits for the others and says it for all."""
        write_stacks(self.folder, dist.get_rank())
        mine = {"place": self.place, "doing": self._now[0], "at": what_main_thread_does(), "last": last_collective()}
        self._tell(f"report/{dist.get_rank()}", json.dumps(mine))
        n_before = self._ask(lambda store: store.add(self._prefix + "hang", 1) - 1)
        if n_before is None:
            return  # the thread at the clock says so
        if n_before == 0:
            _, key, limit_s, _ = self._now
            print(report_of(self._all_reports(), f"{limit_s:g} s ({key})", self.folder), file=sys.stderr, flush=True)
            self._tell("reported", "")
        deadline = time.monotonic() + _REPORTS_S + 4
        while not self._known("reported") and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._over.set()
        exit_now(EXIT_FAILED, restart=True)

    def _all_reports(self) -> list[dict | None]:
        """By rank; None for a rank that does not answer."""
        deadline = time.monotonic() + _REPORTS_S
        keys = [f"report/{rank}" for rank in range(dist.get_world_size())]
        while time.monotonic() < deadline and not all(self._known(key) for key in keys):
            time.sleep(_POLL_S)
        return [self._read(key) for key in keys]


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()  # no /proc here: nothing can be said
    except OSError:
        return True
    return state not in "ZX"  # a zombie waits for torchrun to notice
