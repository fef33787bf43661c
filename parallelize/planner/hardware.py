"""GPUs, links and clusters as numbers, with the source of each. Loads no torch."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tomli

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """peak_flops: dense bf16 matmul FLOP/s, no sparsity. memory_bytes_per_s: of its HBM."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """bytes_per_s: in one direction, of one GPU. latency_s: of one step of a collective."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Calibration:
    """What a device reaches of its data sheet, and what software adds: the constants of the time model.

    label: where they come from, printed next to every time.
    """

    label: str
    matmul_efficiency: float  # of peak_flops, by a matmul large in all of m, k, n
    matmul_half_size: float  # an m, k or n as small as this halves it
    attention_efficiency: float  # of peak_flops, by a fused attention forward with long sequences and large heads
    attention_half_seq: float  # a sequence as short as this, in tokens, halves it
    attention_backward: float  # efficiency of the backward, as a part of the forward's
    memory_efficiency: float  # of memory_bytes_per_s, by kernels bound by memory
    launch_s: float  # from one kernel to the next: no kernel takes less
    node_link_efficiency: float  # of the node link's bytes_per_s, by a ring of large messages
    network_link_efficiency: float  # of the network link's
    microbatch_s: float  # of a micro-batch on a stage, beyond its kernels: instructions, data, synchronization
    step_s: float  # of a step, beyond its micro-batches: data, logging
    fsdp_exposed: float  # of FSDP traffic that computation could hide, the part that costs time nevertheless


@dataclass(frozen=True)
class Cluster:
    """node_link: between GPUs of one node. network_link: between nodes, the share of one GPU."""

    gpu: Gpu
    n_nodes: int
    gpus_per_node: int
    node_link: Link
    network_link: Link
    calibration: Calibration


A100_CALIBRATION = Calibration(
    label="calibrated on published A100 runs",  # docs/planner_accuracy.md
    matmul_efficiency=0.822,
    matmul_half_size=174,
    attention_efficiency=0.733,
    attention_half_seq=420,
    attention_backward=0.849,
    memory_efficiency=0.870,
    launch_s=65e-6,
    node_link_efficiency=0.647,
    network_link_efficiency=0.486,
    microbatch_s=0.0037,
    step_s=0.012,
    fsdp_exposed=0.6,  # ZeRO-3 at 384 to 1,536 GPUs: benchmarks/planner_peers.py
)
# H100: the part of matmuls' peak fitted to published torchtitan runs; attention from FlashAttention-3 (arXiv 2407.08608),
# which measures flash-attention 2 at 35 to 40% there. The rest are the A100's.
H100_CALIBRATION = dataclasses.replace(
    A100_CALIBRATION,
    label="calibrated on published H100 runs",
    matmul_efficiency=0.57,
    attention_efficiency=0.42,
    fsdp_exposed=0.4,  # torchtitan's 8B on 8 and on 128 GPUs: 2.3% slower, with 0.14 s more of traffic in 2.5 s
)
_CARRIED_OVER = dataclasses.replace(H100_CALIBRATION, label="uncalibrated (H100 efficiencies)")

# A CPU core computes in fp32 whatever it is told; enough to tell layouts of the debug model apart.
_CPU_CALIBRATION = dataclasses.replace(A100_CALIBRATION, label="uncalibrated (a CPU)", launch_s=20e-6)

# A step of a ring: NCCL's own model has some 5 us over NVLink and 10 to 15 us over InfiniBand (tuning.cc).
_NODE_LATENCY_S, _NETWORK_LATENCY_S = 5e-6, 10e-6

# name -> GPU, NVLink bytes/s one way (half of the data sheet's bidirectional), network bytes/s of one GPU, calibration
_TABLE = {
    # NVIDIA A100 data sheet (2021): 312 TFLOP/s, NVLink3 600 GB/s; DGX A100: 8 x 200 Gb/s HDR InfiniBand.
    "a100": (Gpu("a100", 312e12, 80 * GIB, 2039e9), 300e9, 25e9, A100_CALIBRATION),
    "a100-40": (Gpu("a100-40", 312e12, 40 * GIB, 1555e9), 300e9, 25e9, A100_CALIBRATION),
    # NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s with sparsity, NVLink4 900 GB/s; DGX H100: 8 x 400 Gb/s NDR.
    "h100": (Gpu("h100", 989.5e12, 80 * GIB, 3350e9), 450e9, 50e9, H100_CALIBRATION),
    # NVIDIA H200 data sheet: 141 GB, 4.8 TB/s, else an H100.
    "h200": (Gpu("h200", 989.5e12, 141e9, 4800e9), 450e9, 50e9, _CARRIED_OVER),
    # NVIDIA HGX B200 (8 GPUs): 36 PFLOP/s with sparsity, 1.44 TB, 62 TB/s; NVLink5 1.8 TB/s; DGX B200: 8 x 400 Gb/s.
    "b200": (Gpu("b200", 2250e12, 180e9, 7750e9), 900e9, 50e9, _CARRIED_OVER),
    "cpu": (Gpu("cpu", 80e9, 4 * GIB, 10e9), 1e9, 0.1e9, _CPU_CALIBRATION),
}


def cluster_of(gpu: str, n_nodes: int, gpus_per_node: int = 8) -> Cluster:
    """A cluster of a GPU of the table, or of what a TOML file says.

    The file names the table's GPU to start from, and overrides any number of it::

        base = "h100"
        [gpu]
        memory_bytes = 96e9
        [network_link]
        bytes_per_s = 12.5e9
        [calibration]
        label = "calibrated on our cluster"
        matmul_efficiency = 0.7

    Raises ``ValueError`` naming the file, the key, its value and what works.
    """
    if n_nodes < 1 or gpus_per_node < 1:
        raise ValueError(f"a cluster needs nodes and GPUs: got {n_nodes} nodes of {gpus_per_node} GPUs")
    if not gpu.endswith(".toml"):
        if gpu not in _TABLE:
            raise ValueError(f"unknown GPU {gpu!r}: use one of {', '.join(_TABLE)}, or the path of a .toml file")
        return _from_table(gpu, n_nodes, gpus_per_node)
    path = Path(gpu)
    try:
        tables = tomli.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomli.TOMLDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as TOML: {error}") from error
    base = tables.pop("base", None)
    if not isinstance(base, str) or base not in _TABLE:
        raise ValueError(f"{path}: base = {base!r}: use one of {', '.join(_TABLE)}")
    return _override(_from_table(base, n_nodes, gpus_per_node), tables, path)


def _from_table(name: str, n_nodes: int, gpus_per_node: int) -> Cluster:
    gpu, node_bytes_per_s, network_bytes_per_s, calibration = _TABLE[name]
    node_link, network_link = Link(node_bytes_per_s, _NODE_LATENCY_S), Link(network_bytes_per_s, _NETWORK_LATENCY_S)
    return Cluster(gpu, n_nodes, gpus_per_node, node_link, network_link, calibration)


def _override(cluster: Cluster, tables: dict, path: Path) -> Cluster:
    parts = {}
    for section, values in tables.items():
        sections = ("gpu", "node_link", "network_link", "calibration")
        if section not in sections or not isinstance(values, dict):
            raise ValueError(f"{path}: {section}: not a section; use base = ... and {', '.join(sections)}")
        part = getattr(cluster, section)
        for key, value in values.items():
            _check(part, section, key, value, path)
        parts[section] = dataclasses.replace(part, **values)
    if parts and "label" not in tables.get("calibration", {}):  # no longer what the table's label says
        label = (
            f"set by {path.name}" if "calibration" in parts else f"{cluster.calibration.label}, changed by {path.name}"
        )
        parts["calibration"] = dataclasses.replace(parts.get("calibration", cluster.calibration), label=label)
    return dataclasses.replace(cluster, **parts)


def _check(part, section: str, key: str, value, path: Path) -> None:
    names = [field.name for field in dataclasses.fields(part) if field.name != "name"]
    if key not in names:
        raise ValueError(f"{path}: {section}.{key} = {value!r}: no such key; use one of {', '.join(names)}")
    if isinstance(getattr(part, key), str):
        if not isinstance(value, str):
            raise ValueError(f"{path}: {section}.{key} = {value!r}: use a text")
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_part = key.endswith("efficiency") or key in ("attention_backward", "fsdp_exposed")
    is_rate = section != "calibration" and not key.endswith("latency_s")
    if is_rate:
        fits, wanted = is_number and 1 <= value < float("inf"), "a number, 1 or more"
    elif is_part and key != "fsdp_exposed":
        fits, wanted = is_number and 0.001 <= value <= 1, "a part of the data sheet's number, from 0.001 to 1"
    else:
        most = 1 if is_part else float("inf")
        fits, wanted = is_number and 0 <= value <= most and value < float("inf"), f"a number from 0{' to 1' * is_part}"
    if not fits:
        raise ValueError(f"{path}: {section}.{key} = {value!r}: use {wanted}")
