"""Joining the job's processes, and leaving them without a hang."""

import os

import torch
import torch.distributed as dist


def join() -> torch.device:
    """Start the default process group from torchrun's environment; alone without it. Returns this rank's device.

    NCCL where there are GPUs, else gloo.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    else:
        device = torch.device("cpu")
        options = {"backend": "gloo"}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    return device


def leave() -> None:
    """Leave after an orderly end. Not for errors: other ranks may be waiting in a collective, and would be for long."""
    dist.destroy_process_group()
