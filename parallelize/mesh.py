"""The one ``DeviceMesh``, built from a validated layout."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelize.layout import AXES, Layout


class Mesh:
    """A ``DeviceMesh`` over a ``Layout``, and this rank's place in it.

    Only axes of degree above 1 exist in ``device_mesh``, plus ``dp_shard``, which FSDP2 always needs: an
    axis that is not used creates no communicator.
    """

    def __init__(self, layout: Layout, device_type: str):
        assert dist.get_world_size() == layout.world_size, "the config check compares these before"
        axes = [axis for axis in AXES if getattr(layout, axis) > 1 or axis == "dp_shard"]
        self.layout = layout
        self.device_type = device_type
        self.device_mesh = init_device_mesh(
            device_type, tuple(getattr(layout, axis) for axis in axes), mesh_dim_names=tuple(axes)
        )

    def axis(self, name: str) -> DeviceMesh | None:
        """The one-dimensional mesh of an axis; None where its degree is 1 (but never for ``dp_shard``)."""
        return self.device_mesh[name] if name in self.device_mesh.mesh_dim_names else None

    def index(self, name: str) -> int:
        """This rank's coordinate on an axis."""
        mesh = self.axis(name)
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def place(self) -> str:
        """This rank's coordinates, for messages: "rank 5 (pp 1, tp 1)"."""
        axes = ", ".join(f"{axis} {self.index(axis)}" for axis in AXES if getattr(self.layout, axis) > 1)
        return f"rank {dist.get_rank()}" + (f" ({axes})" if axes else "")

    @property
    def dp_index(self) -> int:
        """Which share of the global batch this rank reads, 0 ... dp - 1."""
        return self.index("dp_replicate") * self.layout.dp_shard + self.index("dp_shard")

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for ``fully_shard``: (dp_shard) for FSDP, (dp_replicate, dp_shard) for HSDP."""
        if self.layout.dp_replicate > 1:
            return self.device_mesh["dp_replicate", "dp_shard"]
        return self.device_mesh["dp_shard"]


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum over every rank of the job, in place; the result has the same bits everywhere."""
    dist.all_reduce(values)
    return values
