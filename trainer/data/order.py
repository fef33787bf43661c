"""Which row is sample number k: a pure function of (seed, k), at any k alike, without a list of the rows.

An epoch is a block shuffle. Rows are cut into blocks of neighbours, the blocks are put into a random order, and within
each window of 256 blocks all rows are mixed. So a window of samples comes from 256 places, each read as one stretch, and a
data set of up to one window is shuffled whole. Loads no torch.
"""

import functools
import hashlib
from dataclasses import dataclass

BLOCK_ROWS = 256
WINDOW_BLOCKS = 256

_ROUNDS = 6
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True)
class Bijection:
    """A pseudorandom permutation of 0 ... n - 1 that keeps nothing but its keys.

    A Feistel network permutes the next power of 4 above n; a value that leaves the range goes through again until it is
    back (cycle walking: below 4 rounds on average). Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """

    n: int
    keys: tuple[int, ...]

    @staticmethod
    def of(n: int, name: str) -> "Bijection":
        """The one that ``name`` stands for."""
        digest = hashlib.shake_256(name.encode()).digest(8 * _ROUNDS)
        return Bijection(n, tuple(int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(_ROUNDS)))

    def __call__(self, value: int) -> int:
        half = max(1, ((self.n - 1).bit_length() + 1) // 2)
        mask = (1 << half) - 1
        while True:
            left, right = value >> half, value & mask
            for key in self.keys:
                left, right = right, left ^ (_mix(right + key) & mask)
            value = left << half | right
            if value < self.n:
                return value


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, 2014): every bit of the result depends on every bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@dataclass(frozen=True)
class RowOrder:
    """The endless order of a source's rows: epoch after epoch, each in its own shuffle, or in file order.

    ``row(k)`` of sample number k (0 is the run's first) depends on the seed and k alone. ``name`` tells sources apart.
    """

    n_rows: int
    seed: int
    shuffle: bool
    name: str = ""

    def row(self, sample: int) -> int:
        epoch, place = divmod(sample, self.n_rows)
        if not self.shuffle:
            return place
        blocks, turn = self._of_epoch(epoch)
        window_rows = BLOCK_ROWS * WINDOW_BLOCKS
        window, place = divmod(place, window_rows)
        place = window * window_rows + self._of_window(epoch, window)(place)
        slot, place = divmod(place, BLOCK_ROWS)
        # What is left of the rows after whole blocks comes last; each epoch cuts the blocks elsewhere, so it is never the same.
        block = blocks(slot) if slot < blocks.n else slot
        return (block * BLOCK_ROWS + place + turn) % self.n_rows

    @functools.lru_cache(maxsize=4)  # noqa: B019 (a few small entries, as long as the run)
    def _of_epoch(self, epoch: int) -> tuple[Bijection, int]:
        blocks = Bijection.of(self.n_rows // BLOCK_ROWS, f"{self.seed}/{self.name}/{epoch}/blocks")
        return blocks, blocks.keys[0] % self.n_rows

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _of_window(self, epoch: int, window: int) -> Bijection:
        window_rows = BLOCK_ROWS * WINDOW_BLOCKS
        n_rows = min(window_rows, self.n_rows - window * window_rows)
        return Bijection.of(n_rows, f"{self.seed}/{self.name}/{epoch}/{window}")

    def epoch(self, number: int) -> list[int]:
        """All rows of one epoch, in order."""
        return [self.row(sample) for sample in range(number * self.n_rows, (number + 1) * self.n_rows)]
