"""From a command line to running processes: ``./run_train.sh`` calls this.

Everything that can be known to be wrong is found here, before a process starts, and said once.
"""

import argparse
import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # nothing is under way until main() listens: Ctrl-C ends this process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from trainer.config import Config
from trainer.config_load import key_help, load_config, split_overrides
from trainer.config_rules import layout_needs, resolve_config
from trainer.errors import EXIT_BAD_INPUT, UserError
from trainer.explain import say_explained
from trainer.signals import StopRequest, ignore_stop_signals
from trainer.torchrun import run_ranks


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    stop = StopRequest()  # before torch loads, so that Ctrl-C is never a traceback
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # likewise: else the profiler announces each start and stop
    parser = argparse.ArgumentParser(
        prog="./run_train.sh", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a model. Without arguments: the debug model on the bundled text.",
        epilog="Any configuration key can be set as --section.key=value:\n" + key_help(),
    )  # fmt: skip
    parser.add_argument(
        "--config", metavar="C", default="debug.toml", help="a TOML file, or a name from train_configs/"
    )
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=int,
        help="processes on this machine (default: its GPUs, else what the layout needs)",
    )
    parser.add_argument(
        "--max-restarts",
        metavar="R",
        type=int,
        default=0,
        help="start all ranks again, from the newest checkpoint, after a crash or a hang, at most so often (default 0)",
    )
    try:
        rest, overrides = split_overrides(arguments)
        options = parser.parse_args(rest)
        config = load_config(options.config, overrides)
        rendezvous, n_nodes = rendezvous_flags(options.max_restarts)
        nproc = check_start(config, options.nproc, n_nodes)
    except UserError as error:
        print(error.message(), file=sys.stderr)
        return EXIT_BAD_INPUT
    if nproc * n_nodes == 1 and not options.max_restarts:
        from trainer import train

        return train.main(config, stop)
    command = ["-m", "trainer", "train", "--config", options.config]
    try:
        return run_ranks(nproc, command + [override.shown for override in overrides], rendezvous, stop)
    except Exception as error:
        say_explained(error)
        raise


def count_processes(config: Config, nproc: int | None, n_nodes: int) -> int:
    """Processes to start on this machine: as asked, else its GPUs, else what the layout needs."""
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 1 process is needed")
    n_gpus = count_gpus()
    if nproc is None:
        nproc = n_gpus or -(-layout_needs(config.parallel) // n_nodes)
    if n_gpus and nproc > n_gpus:
        raise UserError(f"--nproc {nproc}, but this machine has {n_gpus} GPU(s)")
    return nproc


def check_start(config: Config, nproc: int | None, n_nodes: int) -> int:
    """Everything about the config, this machine and the files that can be checked now. Returns nproc."""
    n_gpus, needed = count_gpus(), layout_needs(config.parallel)
    if nproc is None and n_gpus and n_nodes == 1 and config.parallel.layout == "manual":
        nproc = _most_gpus(config, n_gpus)
    nproc = count_processes(config, nproc, n_nodes)
    if config.parallel.layout == "auto":  # the ranks choose it, and whether it fits
        from trainer.auto_layout import without_layout

        resolve_config(without_layout(config), 1)
        return _check_surroundings(config, nproc, n_nodes)
    try:
        resolved = resolve_config(config, nproc * n_nodes)
    except UserError as error:
        if n_gpus and needed > nproc * n_nodes:
            machines = -(-needed // n_gpus)
            raise UserError(
                *error.problems,
                f"the config needs {needed} GPUs and this machine has {n_gpus}: start it on {machines} machine(s) like it "
                "with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set, or try ./run_train.sh --config debug.toml",
            ) from None
        raise
    from trainer.hardware import check_memory

    least_bytes = gpu_bytes() if n_gpus else None
    check_memory(resolved.architecture.n_params, config.precision, resolved.layout, nproc, least_bytes)
    return _check_surroundings(config, nproc, n_nodes)


def _check_surroundings(config: Config, nproc: int, n_nodes: int) -> int:
    check_files(config)
    if config.debug.profile_steps and max(config.debug.profile_ranks) >= nproc * n_nodes:
        ranks = list(config.debug.profile_ranks)
        raise UserError(f"debug.profile_ranks = {ranks}, but the ranks are 0 to {nproc * n_nodes - 1}")
    if config.metrics.wandb_project is not None:
        from trainer.wandb_report import check_installed

        check_installed()
    _check_writable(config.job.output_dir)  # last: it makes the folder
    return nproc


def _most_gpus(config: Config, n_gpus: int) -> int | None:
    """The most GPUs of this machine on which the config runs: 3 do not divide every batch. None if on no number."""
    for n in range(n_gpus, 0, -1):
        try:
            resolve_config(config, n)
        except UserError:
            continue
        if n < n_gpus:
            print(f"using {n} of {n_gpus} GPUs: the layout and batch do not fit more (--nproc says otherwise)")
        return n
    return None


def check_files(config: Config) -> None:
    """Raise ``UserError`` unless the config's data and tokenizer are there."""
    from trainer.data.sources import check_places
    from trainer.data.tokenizer import tokenizer_file

    problems = check_places(config)
    try:
        tokenizer_file(config.data.tokenizer)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*problems)


def _check_writable(output_dir: str) -> None:
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except (OSError, ValueError) as error:
        raise UserError(f"job.output_dir = {output_dir!r} cannot be written: {error}") from None


def count_gpus() -> int:
    """GPUs that torch will see, without loading torch where there is no driver (NVIDIA, WSL, AMD)."""
    if not any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_bytes() -> int:
    """Memory of the smallest GPU of this machine."""
    import torch

    return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def rendezvous_flags(max_restarts: int) -> tuple[list[str], int]:
    """torchrun's flags for finding the other machines, from the environment, and how many there are at most.

    NNODES is a number, or MIN:MAX: then the job goes on with fewer machines, and takes more when they come.
    """
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: must be 0 or more")
    restarts = [f"--max-restarts={max_restarts}"]
    text = os.environ.get("NNODES") or "1"
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", text):
        raise UserError(f"environment variable NNODES={text}: must be a whole number, at least 1, or MIN:MAX")
    least, most = int(text.split(":")[0]), int(text.split(":")[-1])
    if least > most:
        raise UserError(f"environment variable NNODES={text}: MIN is above MAX")
    if most == 1:
        return ["--standalone", *restarts], 1
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not os.environ.get(name)]
    if missing:
        raise UserError(f"NNODES={text}, but {' and '.join(missing)} is not set in the environment")
    node_rank = _environment_number("NODE_RANK", 0, most=most - 1)
    port = _environment_number("MASTER_PORT", 1, default=29500, most=65535)
    if node_rank == 0:
        _check_port(port)
    address = os.environ["MASTER_ADDR"]
    if least == most and not max_restarts:
        flags = [f"--nnodes={most}", f"--node-rank={node_rank}", f"--master-addr={address}", f"--master-port={port}"]
        return flags, most
    # Machines that come and go need torchrun's dynamic rendezvous, which machine 0 keeps.
    flags = [
        f"--nnodes={text}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address}:{port}",
        f"--rdzv-id=meshloom-{port}",
    ]
    return [*flags, f"--rdzv-conf=is_host={int(node_rank == 0)}", *restarts], most


def _check_port(port: int) -> None:
    """Raise ``UserError`` if the port where the machines are to meet, on this one, is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"MASTER_PORT={port} cannot be used on this machine ({error.strerror}): another job's? Set another, the same "
                "on every machine"
            ) from None


def _environment_number(name: str, least: int, default: int | None = None, most: int | None = None) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"environment variable {name}={text}: must be a whole number, {bounds}")
    return int(text)


if __name__ == "__main__":
    exit_code = main()
    ignore_stop_signals()  # all is done: what still comes must not change how it ended
    sys.exit(exit_code)
