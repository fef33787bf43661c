"""What ``doctor`` looks at. Each check yields findings; none changes anything or needs another process."""

import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tomli

from trainer.config import Config
from trainer.config_rules import layout_needs, resolve_config
from trainer.data.sources import Place, cache_folder
from trainer.errors import UserError
from trainer.hardware import GIB, check_memory, machine_memory_bytes, state_bytes
from trainer.launch import check_files, count_gpus, gpu_bytes

ROOT = Path(__file__).resolve().parents[1]
_LITTLE_DISK = 5 * GIB
_LITTLE_SHM = GIB
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """state: "ok", "note" (worth knowing) or "problem" (a run would fail). advice: what to do."""

    check: str
    state: str
    text: str
    advice: str = ""

    def line(self) -> str:
        lines = [f"{self.state.upper() if self.state == 'ok' else self.state:<8} {self.check:<14} {self.text}"]
        return "\n".join([*lines, *([f"{'':<23} -> {self.advice}"] if self.advice else [])])


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str, advice: str) -> Finding:
    return Finding(check, "note", text, advice)


def problem(check: str, text: str, advice: str) -> Finding:
    return Finding(check, "problem", text, advice)


def checks_of_packages() -> Iterator[Finding]:
    """Python, torch and the other packages, against pyproject.toml and constraints.txt."""
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    if not (ROOT / "pyproject.toml").is_file():
        yield note("packages", "no pyproject.toml beside the code: versions are not compared", "run from a checkout")
        return
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wrong = _unmet(project["dependencies"])
    if wrong:
        yield problem(
            "packages", "; ".join(wrong), "pip install -e . -c constraints.txt (./run_train.sh does it in .venv)"
        )
    else:
        yield ok("packages", f"all {len(project['dependencies'])} that pyproject.toml asks for are there")
    if other := _not_as_tested():
        yield note(
            "versions",
            f"not those that the tests run with: {', '.join(other)}",
            "pip install -e . -c constraints.txt, if something is odd",
        )
    extras = {name: _unmet(needed) for name, needed in project["optional-dependencies"].items() if name != "test"}
    there, missing = [name for name in extras if not extras[name]], [name for name in extras if extras[name]]
    text = f"there: {', '.join(there) or 'none'}; not there: {', '.join(missing) or 'none'}"
    yield (
        note("extras", text, f"pip install -e '.[{','.join(missing)}]', if they are wanted")
        if missing
        else ok("extras", text)
    )


def checks_of_machine(config: Config) -> Iterator[Finding]:
    """``config``: of which the folders are looked at."""
    yield from _check_torch()
    yield from _check_cores()
    yield from _check_memory()
    yield from _check_disks(config)
    yield from _check_shared_memory(config)
    yield from _check_network()


def checks_of_config(config: Config, nproc: int) -> Iterator[Finding]:
    """Whether this config can run here. Files, tokenizer, layout and memory, as a start would find them."""
    try:
        check_files(config)
    except UserError as error:
        for text in error.problems:
            yield problem("data", text, "put it there, or set the key")
    needed, n_machines = layout_needs(config.parallel), 1
    if count_gpus() and needed > nproc:
        n_machines = -(-needed // nproc)
        yield note(
            "layout",
            f"needs {needed} GPUs, here are {nproc}",
            f"start it on {n_machines} machines like this one: docs/slurm.md",
        )
    try:
        if auto := config.parallel.layout == "auto":
            from trainer.auto_layout import without_layout  # it loads torch, which may be what is broken

        resolved = resolve_config(without_layout(config), 1) if auto else resolve_config(config, nproc * n_machines)
        least_bytes = gpu_bytes() if count_gpus() else None
        if not auto:
            check_memory(resolved.architecture.n_params, config.precision, resolved.layout, nproc, least_bytes)
    except UserError as error:
        for text in error.problems:
            yield problem(
                "layout",
                text,
                "python -m trainer plan finds a layout; --nproc says how many",
            )
        return
    yield ok(
        "layout", f"{'chosen at the start' if auto else resolved.layout}; {resolved.architecture.n_params:,} parameters"
    )
    if config.checkpoint.enabled:
        yield from _check_checkpoint_room(config, resolved.architecture.n_params)


def _check_checkpoint_room(config: Config, n_params: int) -> Iterator[Finding]:
    one = state_bytes(n_params, config.precision) * 3 // 4  # parameters and two moments, no gradients
    kept = config.checkpoint.keep_latest or 1  # 0: all, however many
    needed, free = (kept + 1) * one, shutil.disk_usage(_existing(config.job.output_dir)).free
    text = f"{kept} and one being written: {_size(needed)}; {_size(free)} are free"
    if needed > free:
        yield problem("checkpoints", text, "lower checkpoint.keep_latest, or set job.output_dir on a larger disk")
    else:
        yield ok("checkpoints", text)


def _requirement(text: str) -> str:
    return re.sub(r"\[.*?\]", "", text.split(";")[0]).strip()


def _unmet(requirements: list[str]) -> list[str]:
    spec = importlib.util.spec_from_file_location("check_env", ROOT / "check_env.py")
    check_env = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_env)
    return [text for requirement in requirements if (text := check_env.problem(_requirement(requirement)))]


def _not_as_tested() -> list[str]:
    found = []
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, equals, tested = _requirement(line).partition("==")
        if equals and _applies(line):
            try:
                here = version(name).split("+")[0]
            except PackageNotFoundError:
                continue
            if here != tested:
                found.append(f"{name} {here} (tested: {tested})")
    return found


def _applies(line: str) -> bool:
    """Whether the part behind ";" of a constraint, if any, is true of this Python."""
    marker = re.search(r'python_version\s*(>=|<)\s*"3\.(\d+)"', line)
    return marker is None or (sys.version_info.minor >= int(marker[2])) == (marker[1] == ">=")


def _check_torch() -> Iterator[Finding]:
    if os.environ.get("TORCH_LOGS") == "":
        yield problem("environment", "TORCH_LOGS is set and empty: torch cannot be imported", "unset TORCH_LOGS")
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield problem("torch", f"cannot be imported: {error}", "install it again: pip install -c constraints.txt torch")
        return
    cuda, nccl = torch.version.cuda, ""
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ", NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    yield ok("torch", f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'built for CPU'}{nccl}")
    driver = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())[0] if _DRIVER.is_file() else None
    if torch.cuda.is_available():
        yield from _check_gpus(torch, driver)
    elif os.environ.get("CUDA_VISIBLE_DEVICES") is not None and driver:
        yield note(
            "gpus",
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides them",
            "unset it, to train on GPUs",
        )
    elif driver:
        advice = (
            "install the CUDA build of torch"
            if cuda is None
            else f"its CUDA {cuda} may be too new for the driver: see nvidia-smi"
        )
        yield problem("gpus", f"NVIDIA driver {driver} is there, but this torch sees no GPU", advice)
    else:
        yield ok("gpus", "none: training runs on the CPU, over gloo")


def _check_gpus(torch, driver: str | None) -> Iterator[Finding]:
    n, names = torch.cuda.device_count(), []
    for index in range(n):
        free, total = torch.cuda.mem_get_info(index)
        names.append(f"{torch.cuda.get_device_name(index)} {total / GIB:.0f} GiB")
        if free < 0.9 * total:
            yield note(
                "gpu memory",
                f"GPU {index}: only {free / GIB:.1f} of {total / GIB:.1f} GiB are free",
                "another process is on it: see nvidia-smi",
            )
        if torch.cuda.get_device_capability(index) < (8, 0):
            yield note("gpus", f"GPU {index} has no bfloat16 units", 'set precision.compute = "float32"')
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    yield ok("gpus", f"{shown}; driver {driver or 'unknown'}")
    if not torch.distributed.is_nccl_available():
        yield problem("nccl", "this torch was built without NCCL", "install torch's own CUDA build")
    apart = [(a, b) for a in range(n) for b in range(n) if a != b and not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        advice = (
            "traffic goes through the host, many times slower: see nvidia-smi topo -m; in a virtual machine, its IOMMU"
        )
        yield note(
            "links",
            f"GPUs {apart[0][0]} and {apart[0][1]} do not reach each other's memory ({len(apart)} such pairs)",
            advice,
        )
    elif n > 1:
        yield ok("links", f"each of the {n} GPUs reaches every other's memory")


def _check_cores() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_gpus, asked = count_gpus(), os.environ.get("OMP_NUM_THREADS")
    text = f"{usable} of {os.cpu_count()} usable; OMP_NUM_THREADS {asked or 'not set: the launcher divides them among ranks'}"
    if asked is not None and not asked.isdigit():
        yield problem("cores", f"OMP_NUM_THREADS={asked} is not a number", "unset it")
    elif asked is not None and int(asked) > usable:
        yield note("cores", text, f"set OMP_NUM_THREADS to at most {usable}, or unset it")
    elif usable < 2 * n_gpus:
        yield note("cores", f"{text}; fewer than 2 a GPU", "ask the scheduler for more (Slurm: --cpus-per-task)")
    else:
        yield ok("cores", text)


def _check_memory() -> Iterator[Finding]:
    total, available = machine_memory_bytes(), machine_memory_bytes()
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (line := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        available = min(total, int(line[1]) * 1024)
    text = f"{_size(available)} of {_size(total)} are free"
    if available < 2 * GIB:
        yield note("memory", text, "end what else runs here: each rank takes about 0.5 GiB before its model")
    else:
        yield ok("memory", text)


def _check_disks(config: Config) -> Iterator[Finding]:
    cache = cache_folder(Place(None, cache_dir=config.data.cache_dir))
    for key, folder in (("job.output_dir", config.job.output_dir), ("data.cache_dir", cache)):
        there = _existing(folder)
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            yield problem(
                "disk", f"{key} = {folder}: cannot be written: {error.strerror}", f"set {key} to a folder of yours"
            )
            continue
        free = shutil.disk_usage(there).free
        text = f"{key} = {folder}: {_size(free)} free"
        yield (
            note("disk", text, f"set {key} on a larger disk, or make room") if free < _LITTLE_DISK else ok("disk", text)
        )


def _existing(folder: str | Path) -> Path:
    """The folder, or what is nearest above it."""
    path = Path(folder).resolve()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _check_shared_memory(config: Config) -> Iterator[Finding]:
    if not Path("/dev/shm").is_dir():
        return
    size = shutil.disk_usage("/dev/shm")
    text = f"/dev/shm: {_size(size.free)} of {_size(size.total)} free"
    advice = "docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory; or data.workers = 0"
    if size.free < _LITTLE_SHM and (config.data.workers or count_gpus() > 1):
        yield problem("shared memory", f"{text}: too little for loader workers and NCCL", advice)
    elif size.free < _LITTLE_SHM:
        yield note("shared memory", text, advice)
    else:
        yield ok("shared memory", text)


def _check_network() -> Iterator[Finding]:
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        exact = [name.lstrip("=") for name in wanted.split(",") if name and not name.startswith("^")]
        if exact and not any(there.startswith(name) for name in exact for there in interfaces):
            yield problem(
                "network",
                f"{variable}={wanted}, but the interfaces are {', '.join(interfaces)}",
                f"set {variable} to one of them, or unset it",
            )
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        yield note(
            "network",
            f"this machine's own name, {socket.gethostname()}, is not known to it",
            f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME={interfaces[-1]}",
        )
    yield from _check_ports()


def _check_ports() -> Iterator[Finding]:
    text = os.environ.get("MASTER_PORT") or "29500"
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        yield problem("ports", f"MASTER_PORT={text} is no port", "set it to one from 1024 to 65535")
        return
    used = {
        port: use
        for port, use in {int(text): "MASTER_PORT, where machines meet", 6006: "TensorBoard's"}.items()
        if _in_use(port)
    }
    for port, use in used.items():
        advice = (
            "set MASTER_PORT to another, for jobs of several machines"
            if port != 6006
            else "tensorboard --port takes another"
        )
        yield note("ports", f"{port} ({use}) is in use here", advice)
    if not used:
        yield ok("ports", f"{text} (MASTER_PORT) and 6006 (TensorBoard) are free")


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _size(n_bytes: float) -> str:
    return f"{n_bytes / GIB:,.1f} GiB" if n_bytes >= GIB / 10 else f"{n_bytes / 2**20:,.0f} MiB"
