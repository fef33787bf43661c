"""The processes of a launch, on one machine or on two imitated ones: for fault_campaign.py."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.dist.hosts import Hosts

ROOT = Path(__file__).resolve().parent.parent
MARKER = "MESHLOOM_FAULT_CAMPAIGN"  # in the environment of every process of a launch, by which it is found


class Launch:
    """``python -m trainer.launch`` and every process that it starts, in a session of their own."""

    alive: set["Launch"] = set()
    no_more = False

    def __init__(self, arguments: list[str], n_processes: int, logs: Path):
        """logs: prefix of the paths of the two files that take stdout and stderr."""
        if Launch.no_more:
            raise RuntimeError("the campaign has been interrupted")
        self.n_processes = n_processes
        self.marker = f"{MARKER}={logs}"
        self.out, self.err = Path(f"{logs}.out"), Path(f"{logs}.err")
        temporary = logs.parent / "tmp"  # what torchrun leaves behind after a kill goes away with the trial
        temporary.mkdir(exist_ok=True)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary),
            MARKER: str(logs),
        }  # fmt: skip
        with self.out.open("w") as out, self.err.open("w") as err:
            command = [sys.executable, "-m", "trainer.launch", *arguments]
            self.process = self._spawn(command, environment, cwd=logs.parent, stdout=out, stderr=err)
        Launch.alive.add(self)

    def _spawn(self, command: list[str], environment: dict[str, str], **options) -> subprocess.Popen:
        return subprocess.Popen(command, env=environment, start_new_session=True, **options)

    def running(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[int]:
        """Every process of this launch that still runs, whatever session or parent it has by now."""
        return processes_with(self.marker)

    def ranks(self) -> list[int]:
        """The training processes. One alone is the launcher itself, once it trains."""
        pid = self.process.pid
        if self.n_processes == 1:
            return [pid] if self.logged() and self.running() else []
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return []
        return [int(child) for child in children if any(e.startswith("RANK=") for e in _environment_of(child))]

    def logged(self) -> int | None:
        """The last step that this launch has reported."""
        steps = re.findall(r"^step +(\d+)/", self.out.read_text(), re.MULTILINE)
        return int(steps[-1]) if steps else None

    def resumed(self) -> str | None:
        """The checkpoint that it went on from, "start" for none, None if it did not get so far."""
        text = self.out.read_text()
        if named := re.search(r"^resuming +(.+)$", text, re.MULTILINE) or re.search("^(.+) is already at step", text):
            return Path(named[1]).name
        return None if self.logged() is None else "start"

    def kill_all(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for _ in range(3):  # ranks have sessions of their own, and no environment to be found by during an exec
            for pid in self.processes():
                send(pid, signal.SIGKILL)
            time.sleep(0.02)

    @classmethod
    def end_all(cls) -> None:
        """Of whatever thread, for good."""
        cls.no_more = True
        for launch in list(cls.alive):
            launch.kill_all()

    def close(self) -> None:
        self.kill_all()
        self.process.wait()
        Launch.alive.discard(self)


class LaunchOnTwo(Launch):
    """The same on two machines, half of the processes on each; ``process`` is the launcher of the first."""

    def __init__(self, arguments: list[str], n_processes: int, logs: Path, hosts: Hosts):
        self.hosts = hosts
        across = [f"--nproc={n_processes // 2}", "--parallel.tp_across_nodes=true"]
        super().__init__([*arguments, *across], n_processes, logs)

    def _spawn(self, command: list[str], environment: dict[str, str], **options) -> subprocess.Popen:
        environment |= {"NNODES": "2", "MASTER_ADDR": self.hosts.addresses[0], "MASTER_PORT": "29500"}
        second = options | {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.second = self.hosts.popen(1, command, environment | {"NODE_RANK": "1"}, **second)
        return self.hosts.popen(0, command, environment | {"NODE_RANK": "0"}, **options)

    def running(self) -> bool:
        return self.process.poll() is None or self.second.poll() is None

    def close(self) -> None:
        super().close()
        self.second.wait()
        self.hosts.__exit__()


def processes_with(marker: str) -> list[int]:
    """Processes in whose environment a variable starts so."""
    pids = (path.name for path in Path("/proc").iterdir() if path.name.isdigit())
    return [int(pid) for pid in pids if any(entry.startswith(marker) for entry in _environment_of(pid))]


def _environment_of(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # ended, or another user's
        return []


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
