"""One process of a job: join the others, do the work, and leave without keeping anyone waiting."""

import ctypes
import errno
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, STATUS_FILE_VARIABLE, StoppedRun, UserError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def run_rank(work: Callable[[torch.device], int]) -> int:
    """Call ``work(device)`` in the default process group and return its exit code.

    ``UserError`` and ``StoppedRun``, which every rank meets alike, are said once a machine; anything else
    with its traceback by the rank that it happened on, which then ends at once: torchrun ends the others.
    """
    _end_with_parent()
    device = _join()
    try:
        code = work(device)
    except UserError as error:
        _say_once(error.message())
        return _end_now(EXIT_BAD_INPUT)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            _show_failure(error)
            return _end_now(EXIT_FAILED)
        print(f"error: {error}", file=sys.stderr, flush=True)  # it names the file; a traceback adds nothing
        return _end_now(EXIT_FAILED)
    except StoppedRun as error:
        _say_once(f"error: {error}")
        return _end_now(EXIT_FAILED)
    except BaseException as error:
        lost_peer = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
        if isinstance(error, RuntimeError) and any(
            sign in str(error) for sign in lost_peer
        ):  # no cause, so neither a traceback nor a status
            print(f"[rank {dist.get_rank()}] ends: another rank has failed", file=sys.stderr, flush=True)
            return _end_now(EXIT_FAILED, leave_status=False)
        _show_failure(error)
        return _end_now(EXIT_FAILED)
    _leave_status(code)
    dist.destroy_process_group()
    return code


def _join() -> torch.device:
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
    dist.init_process_group(**options)
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


def _end_with_parent() -> None:
    """Under torchrun: be asked to stop when it dies, even by SIGKILL, rather than train on unattended.

    (Saving may fail then, since torchrun keeps the store through which ranks find each other.)
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _say_once(message: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The machine's first rank says the same, if it met it too, and torchrun then ends this one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    print(message, file=sys.stderr, flush=True)


def _show_failure(error: BaseException) -> None:
    rank = dist.get_rank()
    text = "".join(traceback.format_exception(error))
    print("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()), file=sys.stderr, flush=True)


def _leave_status(code: int) -> None:
    if os.environ.get("LOCAL_RANK") == "0" and STATUS_FILE_VARIABLE in os.environ:
        Path(os.environ[STATUS_FILE_VARIABLE]).write_text(str(code))


def _end_now(code: int, leave_status: bool = True) -> int:
    """End without destroying the process group, which would wait for ranks that may never come."""
    if dist.get_world_size() == 1:
        return code
    if leave_status:
        _leave_status(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
