"""Errors of torch are raised by torch itself here, and must be explained in our keys."""

import errno
import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from trainer.explain import explain, phase_of


def join_failing(**options) -> Exception:
    with pytest.raises(RuntimeError) as caught:
        dist.init_process_group("gloo", timeout=timedelta(seconds=1), **options)
    assert not dist.is_initialized()
    return caught.value


@pytest.fixture
def port():
    """One that is in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_in_use(port):
    error = join_failing(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    assert "the port is in use" in explain(error) and "MASTER_PORT" in explain(error)
    with socket.socket() as second, pytest.raises(OSError) as caught:
        second.bind(("127.0.0.1", port))
    assert "the port is in use" in explain(caught.value)


def test_nobody_there_and_not_everybody_there():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    error = join_failing(init_method=f"tcp://127.0.0.1:{free}", rank=1, world_size=2)
    assert "MASTER_ADDR" in explain(error)
    error = join_failing(init_method=f"tcp://127.0.0.1:{free}", rank=0, world_size=2)
    assert "NNODES" in explain(error)


def test_out_of_memory_in_backward_and_in_the_optimizer():
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return torch.empty(10**15)

    with pytest.raises(RuntimeError) as caught:
        Greedy.apply(torch.zeros(1, requires_grad=True)).sum().backward()
    text = explain(caught.value, "step 3")
    assert text.startswith("out of memory in backward of step 3") and "training.micro_batch_size" in text

    parameter = torch.nn.Parameter(torch.zeros(1).expand(10**15))  # 4 bytes, but its moments are not
    parameter.grad = torch.zeros(1).expand(10**15)
    with pytest.raises(RuntimeError) as caught:
        torch.optim.AdamW([parameter]).step()
    assert phase_of(caught.value) == "the optimizer's step"
    assert "precision.moments" in explain(caught.value)

    assert explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")).startswith(
        "out of memory. "
    )
    try:
        try:
            torch.empty(10**15)
        except RuntimeError as error:
            raise RuntimeError("in a pipeline stage") from error
    except RuntimeError as wrapped:
        assert explain(wrapped).startswith("out of memory")


def test_what_is_quoted_from_torch_and_the_system():
    """Not to be had here: messages as torch 2.13 and NCCL print them."""
    shm = "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
    bus = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."
    for text in (shm, bus):
        assert "data.workers" in explain(RuntimeError(text))
    assert "checkpoint.keep_latest" in explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x"))
    watchdog = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000)"
    assert "job.step_timeout_s" in explain(dist.DistBackendError(watchdog))
    assert "NCCL_DEBUG" in explain(
        dist.DistBackendError("NCCL error in: x.cpp:1, unhandled system error, ncclSystemError: socket")
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("planted fault"), BrokenPipeError(32, "Broken pipe"), ConnectionRefusedError(111, "Connection refused"), KeyError("shm")]
)  # fmt: skip
def test_what_is_not_known_is_left_alone(error):
    assert explain(error) is None
