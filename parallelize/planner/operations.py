"""What a device is asked to do, as numbers: the planner's view of a traced model. Loads no torch."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Matmul:
    """[m, k] x [k, n] on one device, elements of ``element_bytes``."""

    m: int
    k: int
    n: int
    element_bytes: int = 2

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    @property
    def bytes(self) -> int:
        return self.element_bytes * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class Attention:
    """A fused causal attention (no S x S matrix in memory), or its backward, on one device.

    n_heads, n_kv_heads: of this device.
    """

    batch: int
    n_heads: int
    n_kv_heads: int
    seq_len: int
    head_dim: int
    backward: bool = False

    @property
    def flops(self) -> int:
        """Half of S x S is masked away. The backward computes the scores again: 5 matmuls instead of 2."""
        one = self.batch * self.n_heads * self.seq_len * self.seq_len * self.head_dim
        return one * (5 if self.backward else 2)


@dataclass(frozen=True)
class Elementwise:
    """Anything bound by memory: ``bytes`` read and written."""

    bytes: int


@dataclass(frozen=True)
class Collective:
    """A collective over one mesh axis, or a "send" to its neighbour.

    bytes: of the whole tensor: what a rank has after an all_gather, before a reduce_scatter, in an all_reduce.
    """

    kind: str  # all_gather, reduce_scatter, all_reduce, send
    axis: str
    bytes: int


def scaled(operation: "Operation", batch: int) -> "Operation":
    """The same for ``batch`` times as many sequences."""
    if isinstance(operation, Matmul):
        return replace(operation, m=operation.m * batch)
    if isinstance(operation, Attention):
        return replace(operation, batch=operation.batch * batch)
    return replace(operation, bytes=operation.bytes * batch)


Operation = Matmul | Attention | Elementwise | Collective
