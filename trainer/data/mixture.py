"""Which source sample number k comes from, and which of its samples it is: exact shares, at any k alike. Loads no torch."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trainer.config import Data

MOST_SAMPLES = 10_000  # in a pattern


def pattern_of(weights: Sequence[float]) -> tuple[int, ...]:
    """The shortest run of sources in exactly these shares, each spread as evenly as can be.

    Smooth weighted round-robin (as in nginx): every source gains its weight, the richest is taken and pays the total. So
    any run of samples, and not the whole pattern alone, is close to the shares. Raises ``ValueError``, with weights that
    would work, if the pattern would be longer than 10,000.
    """
    shares = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(share.denominator for share in shares))
    counts = [int(share * scale) for share in shares]
    divisor = math.gcd(*counts)
    counts = [count // divisor for count in counts]
    total = sum(counts)
    if total > MOST_SAMPLES:
        rounded = [max(round(1000 * count / total), 1 if count else 0) for count in counts]
        raise ValueError(
            f"shares in whole samples would take a pattern of {total:,} (at most {MOST_SAMPLES:,}); use {rounded}"
        )
    credit, pattern = [0] * len(counts), []
    for _ in range(total):
        credit = [have + count for have, count in zip(credit, counts)]
        richest = max(range(len(counts)), key=credit.__getitem__)
        credit[richest] -= total
        pattern.append(richest)
    return tuple(pattern)


@dataclass(frozen=True)
class _Phase:
    first: int  # its first sample
    pattern: tuple[int, ...]
    counts: np.ndarray  # int64 [len(pattern) + 1, sources]: of each source in the first so many samples of the pattern
    before: np.ndarray  # int64 [sources]: of each source in all phases before

    def taken(self, n: int) -> np.ndarray:
        """Of each source in the first ``n`` samples of this phase and all before it."""
        whole, rest = divmod(n, len(self.pattern))
        return self.before + whole * self.counts[-1] + self.counts[rest]


class Mixture:
    """``phases``: (first sample, weight of each source), in order, from sample 0 on."""

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]):
        self.n_sources, self._phases = len(phases[0][1]), []
        self._firsts = [first for first, _ in phases]
        for first, weights in phases:
            pattern = pattern_of(weights)
            counts = np.zeros((len(pattern) + 1, self.n_sources), np.int64)
            np.cumsum(np.eye(self.n_sources, dtype=np.int64)[list(pattern)], axis=0, out=counts[1:])
            before = self.taken(first) if self._phases else np.zeros(self.n_sources, np.int64)
            self._phases.append(_Phase(first, pattern, counts, before))

    def shares(self) -> list[float]:
        """Of each source in the first samples, as long as their weights hold."""
        first = self._phases[0]
        return (first.counts[-1] / len(first.pattern)).tolist()

    def place(self, sample: int) -> tuple[int, int]:
        """(source, how many samples of it came before) of sample number ``sample``."""
        phase = self._phases[bisect.bisect_right(self._firsts, sample) - 1]
        source = phase.pattern[(sample - phase.first) % len(phase.pattern)]
        return source, int(phase.taken(sample - phase.first)[source])

    def taken(self, n_samples: int) -> np.ndarray:
        """How many of the first ``n_samples`` are of each source: int64 [sources]."""
        phase = self._phases[max(0, bisect.bisect_left(self._firsts, n_samples) - 1)]
        return phase.taken(n_samples - phase.first)


def mixture_of(data: Data, global_batch_size: int, n_rows: Mapping[str, int]) -> Mixture:
    """The shares of the sources, which have ``n_rows``, and where in the run they change."""
    if any(source.epochs for source in data.sources.values()):
        return Mixture([(0, _shares_of_epochs(data, n_rows))])
    return Mixture([
        ((step - 1) * global_batch_size, list(weights.values())) for step, weights in weights_by_step(data)
    ])  # fmt: skip


def _shares_of_epochs(data: Data, n_rows: Mapping[str, int]) -> list[int]:
    """To 1 in 10,000."""
    wanted = [source.epochs * n_rows[name] for name, source in data.sources.items()]
    scale = (MOST_SAMPLES - len(wanted)) / sum(wanted)
    return [max(1, round(scale * n)) for n in wanted]


def weights_by_step(data: Data) -> list[tuple[int, dict[str, float]]]:
    """(first step, weight or epochs of each source), in order, from step 1 on; a stage keeps what it does not name."""
    weights = {name: source.epochs or source.weight for name, source in data.sources.items()} or {"": 1.0}
    stages = [(1, weights)]
    for stage in data.curriculum:
        weights = weights | stage.weights
        stages.append((stage.step, weights))
    return stages[1:] if len(stages) > 1 and stages[1][0] == 1 else stages
