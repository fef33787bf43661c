"""Run many drawn layouts against one process and write docs/parity.md.

    python benchmarks/parity.py [N]

Takes about 5 seconds a draw on 2 cores. Exits 1 if one differs.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from tests.dist.draws import describe, draw
from tests.dist.parity import as_tensors, observe_rank, same_on_one_process
from tests.dist.pool import Pool
from tests.tiny import reference, tiny_config
from trainer.verify import TOLERANCES, compare, one_process

OUT = Path(__file__).resolve().parent.parent / "docs" / "parity.md"
BFLOAT16_EVERY = 5
PAGE = """# Drawn layouts against one process

Made by `python benchmarks/parity.py {n}` on torch {torch}, CPU: {n} layouts drawn at random (`tests/dist/draws.py`).

## fp32

In all of them the initial weights equal one process bit for bit. The reference is plain torch, one forward of the
whole batch, with none of our code but the model and its initial values. "loss": the largest relative difference over
2 steps; "gradient": the worst entry of any parameter's gradient on any rank, as a share of that gradient's largest
entry. A draw that differs by more than 1e-5 in loss or 1e-4 in a gradient is marked. Worst of all: loss {loss:.1e},
gradient {gradient:.1e}; {failures}.

## bfloat16

{n_bfloat16} of the draws again with `precision.compute = "bfloat16"`, over 3 steps, with the checks of
`python -m trainer verify`. Left, the worst difference of a layout from one process, both in bfloat16; beside it, how
far one process in bfloat16 is from itself in fp32: what the precision costs anyway. {bfloat16_failures}.

| check | layouts from one process | bfloat16 from fp32 | allowed |
|---|---|---|---|
{bfloat16}

Weights: the norm of the difference as a share of the norm of what training changed. Adam's first steps turn
gradients that are zero but for rounding into whole steps of either sign, hence the large figures.

## The draws

{table}
"""


class Draws:
    """Runs draws on pools of ranks."""

    def __init__(self):
        self.pools = {world_size: Pool(world_size) for world_size in (1, 2, 4, 8)}

    def observe(self, config, world_size: int, n_steps: int, mask: str):
        return self.pools[world_size].run(observe_rank, config, world_size, n_steps, mask, timeout_s=300)

    def worst_differences(self, seed: int) -> tuple[float, float]:
        """(loss, gradient) in fp32."""
        world_size, mask, overrides = draw(seed)
        config = tiny_config(**overrides)
        expected = reference(same_on_one_process(config), 2, mask)
        loss = gradient = 0.0
        for rank in self.observe(config, world_size, 2, mask):
            loss = max(loss, *(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(rank.losses, expected.losses)))
            for name, got in rank.gradients.items():
                want = expected.gradients[name].numpy()
                gradient = max(gradient, float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-12)))
            assert all(np.array_equal(got, expected.initial[name].numpy()) for name, got in rank.initial.items())
        return loss, gradient

    def bfloat16_checks(self, seed: int):
        """``verify``'s checks: the layout against one process in bfloat16, and that against fp32."""
        world_size, mask, overrides = draw(seed)
        config = tiny_config(**overrides, precision__compute="bfloat16")
        alone = as_tensors(self.observe(one_process(config), 1, 3, mask)[0])
        exact = as_tensors(self.observe(one_process(tiny_config(**overrides)), 1, 3, mask)[0])
        seen = [as_tensors(rank) for rank in self.observe(config, world_size, 3, mask)]
        return (compare(alone, seen, TOLERANCES["bfloat16"]), compare(exact, [alone], TOLERANCES["bfloat16"]))


def main(n: int) -> int:
    draws, rows, bfloat16, start = Draws(), [], [], time.monotonic()
    for seed in range(n):
        loss, gradient = draws.worst_differences(seed)
        good = loss <= 1e-5 and gradient <= 1e-4
        rows.append((describe(*draw(seed)), loss, gradient, good))
        if seed % BFLOAT16_EVERY == 0:
            bfloat16.append(draws.bfloat16_checks(seed))
        print(f"{seed + 1}/{n}  {time.monotonic() - start:.0f} s  {rows[-1]}", flush=True)
    for pool in draws.pools.values():
        pool.close()
    failures = sum(not good for *_, good in rows)
    bfloat16_failures = sum(not all(check.passed for check in layout) for layout, _ in bfloat16)
    page = PAGE.format(
        n=n, torch=torch.__version__.split("+")[0], loss=max(row[1] for row in rows),
        gradient=max(row[2] for row in rows), failures=f"{failures or 'none'} marked", table=table_of(rows),
        n_bfloat16=len(bfloat16), bfloat16=bfloat16_table(bfloat16),
        bfloat16_failures=f"{bfloat16_failures or 'None'} differed by more than is allowed",
    )  # fmt: skip
    OUT.write_text(page)
    return int(failures + bfloat16_failures > 0)


def table_of(rows) -> str:
    columns = list(rows[0][0])
    lines = [f"| | {' | '.join(columns)} | loss | gradient |", "|" + "---|" * (len(columns) + 3)]
    for seed, (row, loss, gradient, good) in enumerate(rows):
        mark = "" if good else " **differs**"
        lines.append(f"| {seed} | {' | '.join(row.values())} | {loss:.0e} | {gradient:.0e}{mark} |")
    return "\n".join(lines)


def bfloat16_table(pairs) -> str:
    lines = []
    for index, first in enumerate(pairs[0][0]):
        layout, precision = (max(pair[side][index].difference for pair in pairs) for side in (0, 1))
        lines.append(f"| {first.name} | {layout:.1e} | {precision:.1e} | {first.tolerance:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400))
