"""Where a rank is, for people who want to know why a job does not move."""

import faulthandler
import pickle
import sys
import sysconfig
import threading
import traceback
from pathlib import Path

import torch

SAVING_THREAD = "checkpoint"  # the name of the thread that writes one in the background


def what_main_thread_does() -> str:
    """One line: waiting for other ranks, or busy, and where."""
    stack = _stack_of(threading.main_thread())
    if not stack:
        return "its main thread has ended"
    saving = next((thread for thread in threading.enumerate() if thread.name == SAVING_THREAD), None)
    if saving is not None and any(entry.filename == threading.__file__ for entry in stack):
        stack = _stack_of(saving) or stack  # it waits for a save in the background
    # Code that torch.compile has written waits by the same call as parallelize/collectives.py does. With NCCL the host
    # goes on, and waits where it reads from the device.
    waits = any("torch/distributed/" in entry.filename for entry in stack[-3:])
    waits = waits or any(".wait_tensor" in (entry.line or "") for entry in stack)
    waits = waits or any(read in (stack[-1].line or "") for read in (".synchronize()", ".tolist()", ".item()"))
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
    ours = [entry for entry in stack if not entry.filename.startswith(libraries)] or stack
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}"
    return f"waits for other ranks, in {where}" if waits else f"busy in {where}"


def _stack_of(thread: threading.Thread) -> list[traceback.FrameSummary]:
    frame = sys._current_frames().get(thread.ident)
    return [] if frame is None else traceback.extract_stack(frame)


def last_collective() -> str | None:
    """The collective that was started last, from torch's flight recorder. None where there is no record of it."""
    try:
        entry = pickle.loads(_flight_record())["entries"][-1]
        return f"{entry['profiling_name']} number {entry['collective_seq_id']} of {entry['process_group'][1]}"
    except Exception:  # not in every release, and private: never a reason to fail
        return None


def _flight_record() -> bytes:
    c10d = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) if torch.cuda.is_available() else None
    return (dump or c10d._dump_fr_trace)()


def write_stacks(folder: Path, rank: int) -> None:
    """The stacks of all threads, and the flight record, which torch's ``torchfrtrace`` reads from all ranks at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"stacks-rank-{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(_flight_record())
    except Exception as error:  # a full disk must not hide the hang
        print(f"warning: the stacks of rank {rank} could not be written: {error}", file=sys.stderr, flush=True)


def report_of(reports: list[dict | None], limit: str, folder: Path) -> str:
    """The message for a job that does not move. ``reports``: by rank, None where a rank did not answer."""
    late = [rank for rank, report in enumerate(reports) if report is None or not report["at"].startswith("waits")]
    names = [f"rank {rank}" if reports[rank] is None else reports[rank]["place"] for rank in late]
    who = f"{', '.join(names[:8])} did not arrive" if late else "every rank waits: their collectives do not match"
    lines = [f"error: nothing has moved for more than {limit}: {who}"]
    # The late ones first, then a few of those that wait for them.
    waiting = [rank for rank in range(len(reports)) if rank not in late]
    for rank in [*late[:16], *waiting[:16]]:
        report = reports[rank]
        if report is None:
            lines.append(f"  rank {rank}: does not answer (stopped, its machine down, or the link to it cut)")
        else:
            last = f"; last collective {report['last']}" if report["last"] else ""
            lines.append(f"  {report['place']}, {report['doing']}: {report['at']}{last}")
    return "\n".join([*lines, f"Stacks of all ranks: {folder}"])
