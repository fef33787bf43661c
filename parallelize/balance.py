"""Splitting layers over pipeline stages so that the slowest stage is as fast as it can be. Loads no torch."""

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate


@lru_cache(maxsize=1024)
def balance_costs(costs: tuple[float, ...], n_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers per stage, consecutive and at least one each, with the smallest possible cost of the largest stage.

    costs: of each layer. first, last: what the first and the last stage have besides (embedding; norm, head and loss).
    Among the splits with that largest cost, one whose stages are otherwise about even.
    """
    sums = [0.0, *accumulate(costs)]
    n_layers = len(costs)
    if not 1 <= n_stages <= n_layers:
        raise ValueError(f"{n_layers} layers cannot make {n_stages} stages of at least one layer")

    def extra(stage: int) -> float:
        return first * (stage == 0) + last * (stage == n_stages - 1)

    def fill(level: float) -> list[int]:
        """Ends of stages as long as ``level`` lets them, but of a layer at least, and leaving one for each to come."""
        ends, start = [], 0
        for stage in range(n_stages):
            end = bisect_right(sums, level - extra(stage) + sums[start] + 1e-9 * level) - 1
            start = min(max(end, start + 1), n_layers - (n_stages - 1 - stage))
            ends.append(start)
        return ends

    # The lowest level that places all layers, one of these. A stage above it has one layer, and no split makes it smaller.
    levels = sorted(
        {
            sums[end] - sums[start] + more
            for start in range(n_layers)
            for end in range(start + 1, n_layers + 1)
            for more in {0.0, first * (start == 0), last * (end == n_layers), (first + last) * (n_stages == 1)}
        }
    )
    level = levels[bisect_left(levels, True, key=lambda level: fill(level)[-1] == n_layers)]
    bounds = [0, *fill(level)]

    def cost(stage: int) -> float:
        return sums[bounds[stage + 1]] - sums[bounds[stage]] + extra(stage)

    moved = True
    while moved:  # one layer over a border, as long as the two stages come closer to each other
        moved = False
        for border in range(1, n_stages):
            before, after = cost(border - 1), cost(border)
            step = 1 if after > before else -1
            layer = costs[bounds[border] if step > 0 else bounds[border] - 1]
            shrinking = border if step > 0 else border - 1
            if layer < abs(after - before) * (1 - 1e-9) and bounds[shrinking + 1] - bounds[shrinking] > 1:
                bounds[border] += step
                moved = True
    return tuple(end - start for start, end in zip(bounds, bounds[1:]))
