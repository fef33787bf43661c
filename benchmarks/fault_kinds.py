"""The processes of a run, the faults that strike them, and what must hold after each: for fault_campaign.py.

A new kind of fault is a function of a ``Scene`` and an entry in ``KINDS``.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_launch import Launch, LaunchOnTwo, send
from tests.dist.hosts import Hosts, why_not
from trainer.checkpoint_folder import STATE_FILE, complete_checkpoints, step_of
from trainer.errors import EXIT_STOPPED
from trainer.manifest import differences

END_WITHIN_S = 60  # from the fault to the end of the launcher and of every process that it started
FINISH_WITHIN_S = 900  # a run that nothing disturbs
_POLL_S = 0.002  # a save of the tiny model takes 50 ms and more
_ROOMY = 64 << 20


class Disk:
    """A small file system in memory, to be filled up and enlarged again. Needs root."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOMY}", "tmpfs", folder], check=True)

    def leave(self, n_bytes: int) -> None:
        """Room for so many bytes more."""
        while True:
            seen = os.statvfs(self.folder)
            if self._resize((seen.f_blocks - seen.f_bfree) * seen.f_frsize + n_bytes):
                return
            n_bytes += 1 << 18  # a save has taken the room meanwhile

    def enlarge(self) -> None:
        assert self._resize(_ROOMY)

    def _resize(self, n_bytes: int) -> bool:
        options = ["-o", f"remount,size={n_bytes}"]
        return subprocess.run(["mount", *options, self.folder], stderr=subprocess.DEVNULL).returncode == 0

    def close(self) -> None:
        subprocess.run(["umount", self.folder], check=True)


@dataclass(frozen=True)
class Moment:
    """When a fault strikes.

    share:       of the steps that the launch has before it, those that it does first.
    inside_save: only while a checkpoint is being written; else only between.
    delay_s:     once in that phase, so long after.
    """

    share: float
    inside_save: bool
    delay_s: float


class Scene:
    """One run, its present launch, and what has been seen of it: what a fault acts on."""

    def __init__(self, run: Path, logs: Path, n_steps: int, lost_at_most: int, disk: Disk | None = None):
        """lost_at_most: steps between the last one reported and the newest complete checkpoint, after any fault."""
        self.run, self.logs, self.n_steps, self.lost_at_most, self.disk = run, logs, n_steps, lost_at_most, disk
        self.launch: Launch | None = None
        self.n_launches = 0
        self.damaged: list[tuple[Path, bytes]] = []  # files, as we have left them
        self.problems: list[str] = []

    def prepare(self, arguments: list[str], n_processes: int, moment: Moment | None, rng: random.Random) -> None:
        """The next launch: its command line, and the fault that awaits it."""
        self.arguments, self.n_processes, self.moment, self.rng = arguments, n_processes, moment, rng
        self.struck, self.inside_save, self.code, self.ended_s = None, False, None, 0.0

    def start(self, launch: type[Launch] = Launch, **options) -> None:
        self.expected = self.good()[-1].name if self.good() else "start"
        self.launch = launch(self.arguments, self.n_processes, self.logs / f"launch-{self.n_launches}", **options)
        self.n_launches += 1

    def demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.problems.append(f"launch {self.n_launches - 1}: {otherwise}")

    @property
    def root(self) -> Path:
        return self.run / "checkpoints"

    def good(self) -> list[Path]:
        """The complete checkpoints without those that we have damaged, oldest first."""
        ours = {path.parent for path, content in self.damaged if path.is_file() and path.read_bytes() == content}
        return [folder for folder in complete_checkpoints(self.root) if folder not in ours]

    def newest(self) -> int:
        good = self.good()
        return step_of(good[-1]) if good else 0

    def saving(self) -> bool:
        return any(self.root.glob("*.partial"))

    def moment_comes(self, ready: Callable = lambda: True) -> bool:
        """Wait for the moment, once ``ready()``. False if the run has ended before."""
        first, delay_s = self.newest(), self.moment.delay_s
        target = first + int(self.moment.share * (self.n_steps - first))
        while self.launch.running():
            due = target == first or (self.launch.logged() or 0) >= target
            if due and ready() and self._in_phase():
                self._sleep(delay_s)
                delay_s = 0.0  # if the phase has passed meanwhile: the next one at once
                if self.launch.running() and ready() and self._in_phase():
                    self.newest_before, self.inside_save = self.newest(), self.saving()
                    self.struck = time.monotonic()
                    return True
            time.sleep(_POLL_S)
        return False

    def _in_phase(self) -> bool:
        return self.saving() == self.moment.inside_save

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.launch.running() and time.monotonic() < until:
            time.sleep(min(_POLL_S, seconds))

    def wait_for_end(self) -> int | None:
        """Wait until every process has ended, and check what is left. Returns the exit code, None for a hang."""
        started = self.struck or time.monotonic()
        deadline = started + (END_WITHIN_S if self.struck else FINISH_WITHIN_S)
        while self.launch.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        deadline = min(deadline, time.monotonic() + END_WITHIN_S)
        while self.launch.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.ended_s, self.code = time.monotonic() - started, self.launch.process.poll()
        left = self.launch.processes()
        self.demand(not left, f"{len(left)} processes left {self.ended_s:.0f} s after: {commands_of(left)}")
        self.launch.close()
        self._check_what_is_left()
        return self.code

    def _check_what_is_left(self) -> None:
        seen = self.launch.resumed()
        self.demand(seen in (None, self.expected), f"went on from {seen} instead of {self.expected}")
        newest, logged = self.newest(), self.launch.logged() or 0
        if self.struck:
            self.inside_save |= self.saving()
            self.demand(newest >= self.newest_before, f"step {self.newest_before} was complete, now {newest}")
        self.demand(logged - newest <= self.lost_at_most, f"at step {logged} with nothing newer than {newest}")
        for folder in self.good():
            files = json.loads((folder / STATE_FILE).read_text())["files"]
            found = differences(folder, files, sorted(files))
            self.demand(not found, f"a complete checkpoint is damaged: {found}")

    def damage(self, change: Callable[[bytes], bytes]) -> None:
        path = self.rng.choice(sorted(self.good()[-1].iterdir()))
        content = change(path.read_bytes())
        path.write_bytes(content)
        self.damaged.append((path, content))


def commands_of(pids: list[int]) -> list[str]:
    names = []
    for pid in pids:
        try:
            names.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80].strip())
        except OSError:
            continue
    return names


def kill_one_rank(scene: Scene) -> None:
    scene.start()
    if scene.moment_comes(ready=scene.launch.ranks):
        send(scene.rng.choice(scene.launch.ranks() or [scene.launch.process.pid]), signal.SIGKILL)
        scene.demand(scene.wait_for_end() != 0 or scene.newest() == scene.n_steps, "exit code 0 after a kill")


def kill_all(scene: Scene) -> None:
    scene.start()
    if scene.moment_comes():
        scene.launch.kill_all()
        scene.wait_for_end()


def kill_launcher(scene: Scene) -> None:
    """The ranks see to their own end."""
    scene.start()
    if scene.moment_comes():
        send(scene.launch.process.pid, signal.SIGKILL)
        scene.wait_for_end()


def stop_launcher(scene: Scene) -> None:
    scene.start()
    if scene.moment_comes():
        _stop(scene, scene.launch.process.pid)


def stop_one_rank(scene: Scene) -> None:
    scene.start()
    if scene.moment_comes(ready=scene.launch.ranks):
        _stop(scene, scene.rng.choice(scene.launch.ranks() or [scene.launch.process.pid]))


def _stop(scene: Scene, pid: int) -> None:
    past_start = scene.launch.logged() is not None
    send(pid, signal.SIGTERM)
    code, logged = scene.wait_for_end(), scene.launch.logged()
    if past_start:  # before, Python may not have come to its handler yet
        stopped = code == EXIT_STOPPED or (code == 0 and logged == scene.n_steps)
        scene.demand(stopped, f"exit code {code} after SIGTERM at step {logged}")
    if past_start or code == EXIT_STOPPED:
        scene.demand(scene.newest() == (logged or 0), f"stopped at step {logged}, newest checkpoint {scene.newest()}")


def tear_file(scene: Scene) -> None:
    _kill_and_damage(scene, lambda content: content[: scene.rng.randrange(len(content))])


def flip_byte(scene: Scene) -> None:
    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[scene.rng.randrange(len(content))] ^= scene.rng.randrange(1, 256)
        return bytes(changed)

    _kill_and_damage(scene, change)


def _kill_and_damage(scene: Scene, change: Callable[[bytes], bytes]) -> None:
    scene.start()
    if scene.moment_comes(ready=lambda: len(scene.good()) > 1):  # without one to fall back on a run rightly refuses
        scene.launch.kill_all()
        scene.wait_for_end()
        scene.damage(change)


def fill_disk(scene: Scene) -> None:
    """Leave room for a part of a checkpoint. The next save, or the one in progress, fails."""
    scene.start()
    if scene.moment_comes(ready=lambda: scene.good() and scene.launch.logged()):
        n_bytes = sum(path.stat().st_size for path in scene.good()[-1].iterdir())
        scene.disk.leave(int(scene.rng.uniform(0, 0.9) * n_bytes))
        code = scene.wait_for_end()
        if code == 0 and scene.newest() == scene.n_steps:
            scene.struck = None  # there was nothing left to save
        scene.disk.enlarge()


def cut_link(scene: Scene) -> None:
    """On two machines: nothing is sent any more, and no connection is closed."""
    hosts = Hosts(2)
    hosts.__enter__()
    scene.arguments += ["--job.step_timeout_s=5", "--checkpoint.timeout_s=5"]
    scene.start(LaunchOnTwo, hosts=hosts)
    if scene.moment_comes(ready=scene.launch.logged):  # while they still meet, torch's own limits hold: minutes
        hosts.cut(1)
        scene.demand(scene.wait_for_end() not in (0, EXIT_STOPPED) or scene.newest() == scene.n_steps, "no error")


KINDS: dict[str, Callable[[Scene], None]] = {
    "SIGKILL of one rank": kill_one_rank,
    "SIGKILL of everything": kill_all,
    "SIGKILL of the launcher": kill_launcher,
    "SIGTERM to the launcher": stop_launcher,
    "SIGTERM to one rank": stop_one_rank,
    "torn file": tear_file,
    "flipped byte": flip_byte,
    "full disk": fill_disk,
    "cut link between two machines": cut_link,
}
NEED_ROOT = {"full disk", "cut link between two machines"}
NEED_MACHINES = {"cut link between two machines"}  # a process on each, at least
NEED_CHECKPOINTS = {"torn file", "flipped byte", "full disk"}  # so they cannot strike at the start


def kinds_here() -> list[str]:
    """The kinds that this user can cause."""
    here = [kind for kind in KINDS if os.geteuid() == 0 or kind not in NEED_ROOT]
    return [kind for kind in here if kind not in NEED_MACHINES or why_not() is None]
