"""One process of a job: join the others, do the work, and leave without keeping anyone waiting."""

import logging
import os
import signal
import sys
import time
import traceback
from atexit import _run_exitfuncs
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, StoppedRun, UserError
from trainer.exit_status import clear_status, exit_now, leave_status
from trainer.explain import explain, is_no_room
from trainer.signals import end_with_parent
from trainer.watchdog import Watchdog


def run_rank(work: Callable[[torch.device, Watchdog], int], timeout_s: float = 1800) -> NoReturn:
    """Call ``work(device, watchdog)`` in the default process group and end the process with its exit code.

    ``UserError`` and ``StoppedRun``, which every rank meets alike, are said once a machine; anything else
    with its traceback by the rank that it happened on, which then ends at once and takes the others with it.
    ``timeout_s``: of a collective, in seconds, beyond which torch itself ends the process.
    """
    end_with_parent()
    clear_status()
    try:
        device, watchdog = _join(timeout_s), Watchdog()
    except Exception as error:
        _show_failure(error, f"rank {os.environ.get('RANK', '0')}", "starting")
        exit_now(EXIT_FAILED, restart=True)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0" and dist.get_rank() == 0:
        print(f"restart {restarts} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}", file=sys.stderr, flush=True)
    try:
        watchdog.listen()
        code = work(device, watchdog)
    except UserError as error:
        _say_once(error.message())
        _end_now(watchdog, EXIT_BAD_INPUT, restart=False)
    except StoppedRun as error:
        _say_once(f"error: {error}")
        _end_now(watchdog, EXIT_FAILED, restart=False)
    except BaseException as error:
        if _is_lost_peer(error):  # no cause, so neither a traceback nor a status
            print(f"[rank {dist.get_rank()}] ends: another rank has failed", file=sys.stderr, flush=True)
            ended = watchdog.ended() or {"code": EXIT_FAILED, "restart": True}
            exit_now(ended["code"], ended["restart"], status=False)
        if is_no_room(error):  # it names the file; a traceback adds nothing
            print(f"error: {error}: {explain(error)}", file=sys.stderr, flush=True)
        else:
            _show_failure(error, watchdog.place, watchdog.doing)
        _end_now(watchdog, EXIT_FAILED, restart=True)
    watchdog.leave()
    leave_status(code)
    dist.destroy_process_group()
    _run_exitfuncs()  # loader workers are ended here
    exit_now(code, restart=False, status=False)


def _is_lost_peer(error: BaseException | None) -> bool:
    """Is it, or what it was raised from, gloo's or NCCL's word for a rank that has gone?"""
    signs = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    if error is None or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)):
        return error is not None
    return _is_lost_peer(error.__cause__ or error.__context__)  # a pipeline stage wraps it


def _join(timeout_s: float) -> torch.device:
    """Start the default process group from torchrun's environment; alone without it. NCCL on GPUs, else gloo."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    else:
        device = torch.device("cpu")
        options = {"backend": "gloo"}
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # not under torchrun
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options, timeout=timedelta(seconds=timeout_s))
    # DTensor warns on each rank, once a pattern, that gathering a tensor sharded over two axes takes two
    # collectives. It does, and only when a whole tensor is wanted for a check.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return device


def on_main_rank(decide: Callable[..., Any], *arguments: Any) -> Any:
    """Rank 0's ``decide(*arguments)`` on every rank; its ``UserError`` is raised on every rank."""
    answer: list = [None]
    if dist.get_rank() == 0:
        try:
            answer = [(True, decide(*arguments))]
        except UserError as error:
            answer = [(False, error.problems)]
    dist.broadcast_object_list(answer, src=0)
    agreed, value = answer[0]
    if not agreed:
        raise UserError(*value)
    return value


def _say_once(message: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The machine's first rank says the same, if it met it too, and torchrun then ends this one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    print(message, file=sys.stderr, flush=True)


def _show_failure(error: BaseException, place: str, doing: str) -> None:
    """What it means, where that is known, above its traceback. ``place``: "rank 1", or as in ``Mesh.place``."""
    if meaning := explain(error, doing):
        print(f"[{place}] error: {meaning}", file=sys.stderr)
    prefix = f"[rank {os.environ.get('RANK', '0')}]"
    text = "".join(traceback.format_exception(error))
    print("".join(f"{prefix} {line}\n" for line in text.splitlines()), file=sys.stderr, flush=True)


def _end_now(watchdog: Watchdog, code: int, restart: bool) -> NoReturn:
    """End without destroying the process group, which would wait for ranks that may never come."""
    watchdog.end_all(code, restart)
    exit_now(code, restart)
