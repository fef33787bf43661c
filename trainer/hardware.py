"""What this machine is, and what a run needs of it at the least."""

import os
import sys

from parallelize.layout import Layout
from trainer.config import Precision
from trainer.errors import UserError

# Dense bf16 peak, FLOP/s, from the vendors' data sheets (without sparsity). Matched as a substring of
# the device's name, the longer names first.
_PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "GH200": 989e12,
    "B200": 2250e12, "GB200": 2500e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12,
}  # fmt: skip
GIB = 1 << 30


def peak_flops(device_name: str, compute: str) -> float | None:
    """Peak FLOP/s of a device for dense bf16 matmuls; None where it is not known, or compute is not bf16."""
    if compute != "bfloat16":
        return None
    names = sorted(_PEAK_FLOPS, key=len, reverse=True)
    return next((_PEAK_FLOPS[name] for name in names if name in device_name), None)


def machine_memory_bytes() -> int:
    """Memory that this process may use: of the machine, or of its container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(limit_file) as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return total


def state_bytes(n_params: int, precision: Precision) -> int:
    """Parameters, gradients and AdamW's two moments of a whole model: none of them can be done without."""
    return n_params * 4 * (4 if precision.param == "float32" else 2)


def check_memory(n_params: int, precision: Precision, layout: Layout, n_local: int, gpu_bytes: int | None) -> None:
    """Raise ``UserError`` if the training state alone cannot fit. ``gpu_bytes``: of one GPU, None on CPU."""
    total = state_bytes(n_params, precision)
    per_rank = total / (layout.pp * layout.tp * layout.dp_shard)
    if gpu_bytes is None:
        needed, available = per_rank * n_local, machine_memory_bytes()
        place = "this machine has no GPU and"
    else:
        needed, available = per_rank, gpu_bytes
        place = "each GPU here has"
    if needed <= available:
        return
    what = "on this machine" if gpu_bytes is None else "per GPU"
    raise UserError(
        f"a model of {n_params / 1e9:.1f}B parameters needs {total / GIB:,.0f} GiB for parameters, gradients and "
        f"optimizer state, {needed / GIB:,.0f} GiB {what} with {layout}, but {place} {available / GIB:,.0f} GiB of "
        f"memory. Run it on {layout.world_size} GPU(s) as the config says, or try the same code here with "
        "./run_train.sh --config debug.toml"
    )


def memory_bytes(device_type: str) -> tuple[int, int, int]:
    """(allocated, reserved, the most allocated so far) of this process by torch's allocator; on a CPU resident, reserved 0."""
    if device_type == "cuda":
        import torch

        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc here
        resident = peak
    return resident, 0, max(resident, peak)  # the kernel updates the peak now and then
