"""The degrees of the five mesh axes, and the arithmetic on them. Loads no torch."""

import math
from dataclasses import dataclass

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """Degrees of the five mesh axes, outermost first.

    ``pp``            pipeline stages: consecutive layers live on different ranks. Little traffic, so it may
                      cross the slowest links.
    ``dp_replicate``  whole copies of the sharded model (HSDP): gradients are all-reduced between copies.
    ``dp_shard``      FSDP2: parameters, gradients and optimizer state are sharded; each rank has its own sequences.
    ``cp``            context parallel: one sequence is spread over ranks (always 1 for now).
    ``tp``            tensor parallel: every matmul is spread over ranks. The heaviest traffic, hence
                      innermost: neighbouring ranks share a node.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Ranks that each read their own sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage_ranks(self) -> int:
        """Ranks that together hold one pipeline stage."""
        return self.world_size // self.pp

    def __str__(self) -> str:
        shown = [f"{axis} {degree}" for axis, degree in zip(AXES, self.degrees) if degree > 1]
        return " x ".join(shown) or "one process"
