"""The watchdog's threads, on pooled ranks; what they do to a job of real processes is in test_faults.py."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallelize.collectives import sum_forward
from trainer.rank_report import what_main_thread_does
from trainer.watchdog import Watchdog


def listen_and_leave(port: int, folder) -> tuple[set[str], set[str], dict | None]:
    """Names of the threads while it watches, and afterwards; and what the other rank has left for us."""
    rank = dist.get_rank()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    dist.barrier()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        watchdog = Watchdog()
        watchdog.listen()
        watchdog.watch({"job.step_timeout_s": 60.0}, folder, f"rank {rank}")
        watchdog.begin("step 1", "job.step_timeout_s")
        time.sleep(0.6)
        during = {thread.name for thread in threading.enumerate()}
        watchdog.leave()
        after = {thread.name for thread in threading.enumerate()}
        dist.barrier()
        if rank == 1:
            watchdog.end_all(code=2, restart=False)
        dist.barrier()
        seen = watchdog.ended()
        dist.barrier()
    finally:
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], server
    return during, after, seen


def test_no_thread_outlives_the_watch(ranks, tmp_path):
    """One in torch's C++ when Python ends aborts the process ("terminate called without an active exception")."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for during, after, seen in ranks(2, listen_and_leave, port, tmp_path):
        assert {"listener", "watchdog"} <= during and not {"listener", "watchdog"} & after
        assert seen == {"code": 2, "restart": False}


def sum_late(compiled: bool) -> str | None:
    """What the first rank is seen to do while the second does not come to their sum."""
    mesh = init_device_mesh("cpu", (2,))
    add = torch.compile(sum_forward, backend="aot_eager", fullgraph=True) if compiled else sum_forward
    add(torch.ones(2), mesh)
    if dist.get_rank() == 1:
        time.sleep(2)
        add(torch.ones(2), mesh)
        return None
    seen = []
    looking = threading.Timer(1, lambda: seen.append(what_main_thread_does()))
    looking.start()
    add(torch.ones(2), mesh)
    looking.join()
    return seen[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rank_in_a_collective_of_tensor_parallelism_waits(ranks, compiled):
    """Its innermost frames are not those of torch.distributed: nobody may take it for the one that is late."""
    first, _ = ranks(2, sum_late, compiled)
    assert first.startswith("waits for other ranks, in "), first
