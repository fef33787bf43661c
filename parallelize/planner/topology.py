"""Which links a mesh axis crosses: ranks are numbered with ``tp`` innermost and fill node after node. Loads no torch."""

import functools
import math

from parallelize.layout import AXES, Layout


def groups(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """The ranks of every group along ``axis``, in ring order."""
    inside = math.prod(layout.degrees[AXES.index(axis) + 1 :])  # ranks between two neighbours of the axis
    degree = getattr(layout, axis)
    return [
        tuple(outer + inner + inside * member for member in range(degree))
        for outer in range(0, layout.world_size, inside * degree)
        for inner in range(inside)
    ]


def _nodes(group: tuple[int, ...], gpus_per_node: int) -> int:
    return len({rank // gpus_per_node for rank in group})


@functools.lru_cache(maxsize=4096)
def nodes_spanned(layout: Layout, axis: str, gpus_per_node: int) -> int:
    """Nodes that the most scattered group of the axis touches."""
    return max(_nodes(group, gpus_per_node) for group in groups(layout, axis))


def members_per_node(layout: Layout, axis: str, gpus_per_node: int) -> int:
    """Ranks of one group that share a node, in the most scattered group (rounded down where it is uneven)."""
    return getattr(layout, axis) // nodes_spanned(layout, axis, gpus_per_node)


def crosses_nodes(layout: Layout, axis: str, gpus_per_node: int) -> bool:
    """Whether any group of the axis talks over the network."""
    return nodes_spanned(layout, axis, gpus_per_node) > 1


def node_map(layout: Layout, gpus_per_node: int) -> str:
    """A table for people: of each axis, how many groups cross nodes, and the first group that does."""
    n_nodes = -(-layout.world_size // gpus_per_node)
    lines = [f"{layout.world_size} GPUs on {n_nodes} nodes of {gpus_per_node}: {layout}"]
    for axis in AXES:
        if getattr(layout, axis) == 1:
            continue
        all_groups = groups(layout, axis)
        crossing = [group for group in all_groups if _nodes(group, gpus_per_node) > 1]
        if crossing:
            first = ", ".join(map(str, crossing[0][:4])) + (", ..." if len(crossing[0]) > 4 else "")
            place = (
                f"{len(crossing)} of {len(all_groups)} groups cross nodes, "
                f"{members_per_node(layout, axis, gpus_per_node)} of {len(crossing[0])} ranks a node (ranks {first})"
            )
        else:
            place = f"all {len(all_groups)} groups inside a node"
        lines.append(f"  {axis:<12} {getattr(layout, axis):>4}  {place}")
    return "\n".join(lines)
