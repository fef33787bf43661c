"""A pool of gloo ranks that lives as long as the test session.

Starting an interpreter with torch takes seconds; a worker forked from a server that has imported
everything takes milliseconds. One pool per world size keeps its process group, and meshes are cached in the
workers: DTensor's own caches hold on to the first mesh's group names, so a group must not be replaced.
After a failure or a time-out the pool is killed, and the next call forks a new one.
"""

import functools
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

_PRELOAD = ["tests.dist.preload"]


@functools.cache
def mesh_of(layout):
    """The mesh of a layout in this worker. Called by all ranks together."""
    from parallelize.mesh import Mesh

    return Mesh(layout, "cpu")


def _serve(rank: int, world_size: int, store: str, pipe) -> None:
    """A worker: calls what it is sent, in the process group it keeps."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        torch._dynamo.reset()  # else the many shapes of many tests reach the limit on recompilations
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """``world_size`` gloo ranks."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        store = os.path.join(tempfile.mkdtemp(prefix="meshloom-test-"), "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, theirs))
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, function, *arguments, timeout_s: float = 120) -> list:
        """Call a module-level function on every rank; its results by rank. Raises with the first traceback."""
        if not self.workers:
            self._start()
        for _, pipe in self.workers:
            pipe.send((function.__module__, function.__qualname__, arguments))
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers)}
        results, failures, deadline = {}, [], time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=0.5):
                rank = waiting.pop(pipe)
                try:
                    worked, results[rank] = pipe.recv()
                except EOFError:
                    worked, results[rank] = False, "the process died"
                if not worked:
                    failures.append(f"rank {rank}: {results[rank]}")
                    deadline = min(deadline, time.monotonic() + 3)  # the others may wait for this one
        if failures or waiting:
            self.close()
            raise AssertionError("\n".join(failures) or f"ranks {sorted(waiting.values())} did not answer in {timeout_s} s")
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers = []
