"""A weight that the first and the last pipeline stage both hold.

The two are separate parameters with the same initial value. Their gradients are summed once a step, so
that the same optimizer keeps them the same bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.grad_norm import local_tensor


@dataclass(frozen=True)
class TiedWeight:
    """One tied weight as seen from this rank.

    holders: this rank's parameters of it; both where the schedule puts first and last stage together.
    peer: the global rank that holds the other one at the same place of the other axes, else None.
    """

    holders: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    peer: int | None

    @classmethod
    def of(cls, holders: Sequence[nn.Parameter], axis: DeviceMesh, ends: tuple[int, int]) -> "TiedWeight":
        """Find the peer on the pipeline ``axis``. ``ends``: the ranks of the first and of the last stage."""
        group, (first, last) = axis.get_group(), ends
        if first == last:
            return cls(holders, group, peer=None)
        other_end = last if axis.get_local_rank() == first else first
        return cls(holders, group, dist.get_global_rank(group, other_end))

    def sum_gradients(self) -> None:
        """Give every holder the sum of both gradients. Holders are sharded alike, so local shards match."""
        gradients = [local_tensor(parameter.grad) for parameter in self.holders]
        if self.peer is not None:
            other = torch.empty_like(gradients[0])
            # a + b here and b + a there are the same bits; and no further communicator is needed.
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, gradients[0], self.peer, self.group),
                    dist.P2POp(dist.irecv, other, self.peer, self.group),
                ]
            ):
                work.wait()
            gradients[0].add_(other)
        elif len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
