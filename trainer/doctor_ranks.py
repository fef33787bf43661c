"""What ``doctor`` measures: matmuls for a second on every rank, then an all-reduce between them.

``python -m trainer.doctor_ranks NPROC FILE`` starts NPROC ranks; FILE gets the numbers as JSON.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.preflight import all_reduce_s
from trainer.rank import run_rank
from trainer.summary import device_name
from trainer.torchrun import run_ranks

_SECONDS = 1.0
_SIZE = {"cuda": 8192, "cpu": 1024}  # of a square matmul
_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
_TIMEOUT_S = 45  # less than the command waits, so that what NCCL says is seen


def measure(device: torch.device, answer: Path) -> int:
    """Called by all ranks together; rank 0 writes ``answer``."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rate = _matmul_flops_per_s(device, dtype)
    rates: list = [None] * dist.get_world_size()
    dist.all_gather_object(rates, rate)
    n, buffer = dist.get_world_size(), torch.ones(_BYTES[device.type] // 4, device=device)
    seconds = min(all_reduce_s(buffer, dist.group.WORLD) for _ in range(5))
    if dist.get_rank() == 0:
        seen = {
            "device": device_name(device),
            "dtype": str(dtype).removeprefix("torch."),
            "backend": dist.get_backend(),
            "flops_per_s": rates,
            "all_reduce_gb_per_s": 2 * (n - 1) / n * buffer.nbytes / seconds / 1e9,  # bus bandwidth, as in nccl-tests
        }
        answer.write_text(json.dumps(seen), encoding="utf-8")
    return 0


def _matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    size = _SIZE[device.type]
    square = torch.randn(size, size, device=device).to(dtype)
    product = square @ square
    n, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < _SECONDS:
        torch.matmul(square, square, out=product)
        product[0, 0].item()  # waits for the device
        n += 1
    return n * 2 * size**3 / elapsed


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(lambda device, _: measure(device, Path(sys.argv[2])), timeout_s=_TIMEOUT_S)
    sys.exit(run_ranks(int(sys.argv[1]), ["-m", "trainer.doctor_ranks", "rank", sys.argv[2]]))
