"""Seconds of one operation on one device: a roofline whose efficiency falls with small shapes. Loads no torch."""

from parallelize.layout import Layout
from parallelize.planner.hardware import Cluster
from parallelize.planner.operations import Attention, Collective, Elementwise, Matmul, Operation
from parallelize.planner.topology import members_per_node, nodes_spanned

# FlashAttention-2 (arXiv 2307.08691, figures 4 to 6) reaches about 0.9 of its speed at head size 128 with 64.
HALF_HEAD_DIM = 16


def seconds(operation: Operation, cluster: Cluster, layout: Layout) -> float:
    """Seconds of ``operation`` alone on one device of ``cluster``, in a run of ``layout``, from its launch on.

    To be shown with ``cluster.calibration.label``.
    """
    busy = busy_seconds(operation, cluster, layout)
    return busy if isinstance(operation, Collective) else max(busy, cluster.calibration.launch_s)


def busy_seconds(operation: Operation, cluster: Cluster, layout: Layout) -> float:
    """Seconds that ``operation`` keeps the device busy, launched long before."""
    if isinstance(operation, Collective):
        return _collective(operation, cluster, layout)
    if isinstance(operation, Matmul):
        busy = max(_matmul(operation, cluster), _memory(operation.bytes, cluster))
    elif isinstance(operation, Attention):
        busy = _attention(operation, cluster)
    elif isinstance(operation, Elementwise):
        busy = _memory(operation.bytes, cluster)
    else:
        raise TypeError(f"not an operation: {operation!r}")
    return busy


def _memory(n_bytes: float, cluster: Cluster) -> float:
    return n_bytes / (cluster.gpu.memory_bytes_per_s * cluster.calibration.memory_efficiency)


def _matmul(operation: Matmul, cluster: Cluster) -> float:
    """Each dimension costs its share of idle tiles and pipeline filling: x / (x + half)."""
    half = cluster.calibration.matmul_half_size
    efficiency = cluster.calibration.matmul_efficiency
    for size in (operation.m, operation.k, operation.n):
        efficiency *= size / (size + half)
    return operation.flops / (cluster.gpu.peak_flops * efficiency)


def _attention(operation: Attention, cluster: Cluster) -> float:
    calibration = cluster.calibration
    efficiency = calibration.attention_efficiency
    efficiency *= operation.seq_len / (operation.seq_len + calibration.attention_half_seq)
    efficiency *= operation.head_dim / (operation.head_dim + HALF_HEAD_DIM)
    if operation.backward:
        efficiency *= calibration.attention_backward
    return operation.flops / (cluster.gpu.peak_flops * efficiency)


def _collective(operation: Collective, cluster: Cluster, layout: Layout) -> float:
    """The ring algorithm: every rank passes on (n - 1) / n of the tensor, twice in an all_reduce.

    Of a group that crosses nodes, each member on a node leads one ring out through its own share of the network:
    rings cross at ``members`` x its bandwidth, up to the node link's. (NCCL's ring channels.)
    """
    degree = getattr(layout, operation.axis)
    if degree == 1:
        return 0.0
    node, network, calibration = cluster.node_link, cluster.network_link, cluster.calibration
    n_nodes = nodes_spanned(layout, operation.axis, cluster.gpus_per_node)
    members = members_per_node(layout, operation.axis, cluster.gpus_per_node)
    node_speed = node.bytes_per_s * calibration.node_link_efficiency
    network_speed = network.bytes_per_s * calibration.network_link_efficiency
    if operation.kind == "send":
        across = n_nodes > 1
        return operation.bytes / (network_speed if across else node_speed) + (network if across else node).latency_s
    speed = node_speed if n_nodes == 1 else min(node_speed, members * network_speed)
    latency = (members - 1) * node.latency_s + (n_nodes - 1) * network.latency_s
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[operation.kind]
    return rounds * (operation.bytes * (degree - 1) / degree / speed + latency) + calibration.launch_s
