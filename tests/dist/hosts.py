"""Several machines on this one: each a network namespace with its own address and host name, joined by a switch.

What it imitates: addresses that are not 127.0.0.1, a name for each machine, a machine whose processes all die, a
cable that is pulled (nothing is sent any more and nobody is told). What it does not: own processors, own files.
"""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def why_not() -> str | None:
    """Why this machine cannot imitate several, or None if it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if missing := [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)} (iproute2, util-linux)"
    try:
        with Hosts(1) as hosts:
            probe = hosts.popen(0, ["true"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            error = probe.communicate(timeout=20)[1]
    except (OSError, subprocess.SubprocessError) as failure:
        error = str(getattr(failure, "stderr", "") or failure)
    return f"network namespaces are not to be had here: {error.strip()}" if error else None


class Hosts:
    """``n`` machines, ``addresses`` and ``names`` by index; as a context manager, everything ends with it.

    Nothing is added to the machine's own network: the switch is a bridge in a namespace of its own.
    """

    def __init__(self, n: int):
        self._tag = f"mesh{secrets.token_hex(3)}"
        self._switch = f"{self._tag}-switch"
        self.names = [f"{self._tag}-{index}" for index in range(n)]  # of the machine and of its namespace
        self.addresses = [f"10.77.0.{index + 1}" for index in range(n)]

    def __enter__(self) -> "Hosts":
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error) -> None:
        self._remove()

    def popen(self, index: int, command: list[str], env: Mapping[str, str] | None = None, **options) -> subprocess.Popen:
        """Start ``command`` on a machine: the process itself, the first of a group of its own.

        env: added to this process's own environment.
        """
        name = self.names[index]
        # Both exec what follows. torchrun asks for the machine's host name, gloo for the interface to use.
        inside = ["sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", **(env or {})}
        return subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts", *inside], env=environment, start_new_session=True, **options
        )

    def cut(self, index: int) -> None:
        """Pull the machine's cable: what is sent is lost, and no connection is closed."""
        self._ip("-n", self._switch, "link", "set", f"port{index}", "down")

    def mend(self, index: int) -> None:
        self._ip("-n", self._switch, "link", "set", f"port{index}", "up")

    def limit(self, index: int, rate: str) -> None:
        """Slow the machine's way out to a rate of tc, such as "80mbit"."""
        shaping = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        command = ["tc", "-n", self.names[index], "qdisc", "add", "dev", "eth0", "root", *shaping]
        subprocess.run(command, check=True, capture_output=True)

    def pids(self, index: int) -> list[int]:
        """The processes of a machine."""
        return _pids(self.names[index])

    def kill(self, index: int) -> None:
        """End every process of a machine, at once."""
        _kill_all(self.names[index])

    def _make(self) -> None:
        for namespace in (self._switch, *self.names):
            self._ip("netns", "add", namespace)
            self._ip("-n", namespace, "link", "set", "lo", "up")
        self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "bridge", "up")
        book = ["127.0.0.1 localhost", "::1 localhost"]
        for address, name in zip(self.addresses, self.names):
            book += [f"{address} {name}", f"::ffff:{address} {name}"]  # the second for reverse look-ups by torch's store
        for index, (address, name) in enumerate(zip(self.addresses, self.names)):
            ours = ("-n", name)
            self._ip(*ours, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{index}", "netns", self._switch)
            self._ip("-n", self._switch, "link", "set", f"port{index}", "master", "bridge", "up")
            self._ip(*ours, "addr", "add", f"{address}/24", "dev", "eth0")
            self._ip(*ours, "link", "set", "eth0", "up")
            etc = _etc(name)  # `ip netns exec` lays its files over those in /etc
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("\n".join(book) + "\n")

    def _remove(self) -> None:
        for namespace in (*self.names, self._switch):
            _kill_all(namespace)
            # Its links go with it.
            subprocess.run(["ip", "netns", "delete", namespace], stderr=subprocess.DEVNULL, check=False)
            shutil.rmtree(_etc(namespace), ignore_errors=True)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _etc(namespace: str) -> Path:
    return Path("/etc/netns") / namespace


def _pids(namespace: str) -> list[int]:
    result = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in result.stdout.split()]


def _kill_all(namespace: str, patience_s: float = 10) -> None:
    deadline = time.monotonic() + patience_s
    while (pids := _living(namespace)) and time.monotonic() < deadline:  # again: one may just have forked
        for pid in pids:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def _living(namespace: str) -> list[int]:
    return [pid for pid in _pids(namespace) if not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
