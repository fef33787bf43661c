"""Ranks on this machine, as torchrun's workers, and what became of them."""

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_STOPPED, LAUNCHER_VARIABLE, STATUS_FILE_VARIABLE
from trainer.exit_status import read_status
from trainer.signals import StopRequest, end_at_second_signal, on_stop_signal, stop_signals

_THREADS_GIVEN = "OMP_NUM_THREADS" in os.environ


def run_ranks(
    nproc: int,
    command: list[str],
    rendezvous: Sequence[str] = ("--standalone",),
    stop: StopRequest | None = None,
    others_s: float = 30,
) -> int:
    """Run ``command`` as torchrun's workers. Returns rank 0's exit code if it left one, else a failing rank's.

    ``stop``: what this process has been asked so far. ``others_s``: how long to wait, once the ranks of this machine have ended well, for those of the other machines.
    """
    if not _THREADS_GIVEN:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // nproc))
    # Asked to stop, ranks finish their step and write a checkpoint: give them longer than torchrun's 30 s.
    # (Torch 2.11 does not read this and keeps to 30 s.)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    max_restarts = max([0, *(int(flag.partition("=")[2]) for flag in rendezvous if flag.startswith("--max-restarts="))])
    if max_restarts:
        # Else a second start finds the addresses of the first in torchrun's store, and cannot connect
        # (pytorch issue 135712, still so in 2.13).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    flags = [*rendezvous, f"--nproc-per-node={nproc}"]
    if "--signals-to-handle" in run.get_args_parser().format_help():  # not in every release we run on
        flags.append("--signals-to-handle=" + ",".join(number.name for number in stop_signals()))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # our ranks speak for themselves
    with tempfile.NamedTemporaryFile(prefix="meshloom-status-") as status:
        os.environ[STATUS_FILE_VARIABLE], os.environ[LAUNCHER_VARIABLE] = status.name, str(os.getpid())
        failures, stopped = {}, False
        end_at_second_signal()
        # Until torchrun has started the ranks, which may wait long for another machine, there is nothing to save.
        on_stop_signal(lambda *_: os._exit(EXIT_STOPPED))
        if stop is not None and stop.requested:
            return EXIT_STOPPED
        torchrun_ended = Event()
        waiting = (Path(status.name), nproc, others_s, torchrun_ended)
        watcher = Thread(target=_end_without_the_others, args=waiting, daemon=True)
        watcher.start()
        try:
            run.run(run.parse_args([*flags, *command]))
        except ChildFailedError as error:
            failures = error.failures
        except SignalException:
            stopped = True
        finally:
            torchrun_ended.set()
            watcher.join()  # while the file that it reads is there
        said = read_status(status.read().decode())
        _say_failures(failures, max_restarts, ended_by_torchrun=bool(said) or stopped)
        if said is not None and (said or not failures):
            return said
        if stopped:
            return EXIT_STOPPED  # before the ranks had begun: there was nothing to save
        return max([EXIT_FAILED, *(failure.exitcode for failure in failures.values())])


def _say_failures(failures: dict, max_restarts: int, ended_by_torchrun: bool) -> None:
    """Say what ranks could not say themselves. ``ended_by_torchrun``: which does so once one has said why."""
    for rank, failure in sorted(failures.items()):
        name = failure.signal_name() if failure.exitcode < 0 else ""
        if name and not (ended_by_torchrun and name == "SIGTERM"):
            hint = ": out of memory?" if name == "SIGKILL" else ""
            print(f"error: rank {rank} was ended by {name}{hint}", file=sys.stderr)
    if failures and max_restarts:
        print(f"error: gave up after {max_restarts} restart(s)", file=sys.stderr)


def _end_without_the_others(status: Path, nproc: int, patience_s: float, torchrun_ended: Event) -> None:
    """End this process once its ranks have ended well and torchrun still waits, for up to 300 s, for a machine that may be
    gone or cut off: by then every rank of the job is done."""
    left_s = patience_s
    while left_s > 0:
        if torchrun_ended.wait(0.5):
            return
        codes = status.read_text().split()
        ended_well = len(codes) == nproc and {*codes} <= {str(code) for code in (0, EXIT_BAD_INPUT, EXIT_STOPPED)}
        left_s = left_s - 0.5 if ended_well else patience_s
    status.unlink()
    sys.stdout.flush()
    os._exit(read_status(" ".join(codes)))
