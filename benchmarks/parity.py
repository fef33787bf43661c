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
from tests.dist.parity import observe_rank, same_on_one_process
from tests.dist.pool import Pool
from tests.tiny import reference, tiny_config

OUT = Path(__file__).resolve().parent.parent / "docs" / "parity.md"
INTRODUCTION = """# Drawn layouts against one process

Made by `python benchmarks/parity.py {n}` on torch {torch}, CPU, fp32: {n} layouts drawn at random, in all of which
the initial weights equal one process bit for bit. The reference is plain torch, one forward of the whole batch, with
none of our code but the model and its initial values. "loss": the largest relative difference over 2 steps;
"gradient": the worst entry of any parameter's gradient on any rank, as a share of that gradient's largest entry.
A draw that differs by more than 1e-5 in loss or 1e-4 in a gradient is marked. Worst of all: loss {loss:.1e}, gradient
{gradient:.1e}; {failures}.

"""


def worst_differences(pool: Pool, seed: int) -> tuple[float, float]:
    world_size, mask, overrides = draw(seed)
    config = tiny_config(**overrides)
    expected = reference(same_on_one_process(config), 2, mask)
    loss = gradient = 0.0
    for rank in pool.run(observe_rank, config, world_size, 2, mask, timeout_s=300):
        loss = max(loss, *(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(rank.losses, expected.losses)))
        for name, got in rank.gradients.items():
            want = expected.gradients[name].numpy()
            gradient = max(gradient, float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-12)))
        assert all(np.array_equal(got, expected.initial[name].numpy()) for name, got in rank.initial.items())
    return loss, gradient


def main(n: int) -> int:
    pools = {world_size: Pool(world_size) for world_size in (2, 4, 8)}
    rows, start = [], time.monotonic()
    for seed in range(n):
        world_size, mask, overrides = draw(seed)
        loss, gradient = worst_differences(pools[world_size], seed)
        good = loss <= 1e-5 and gradient <= 1e-4
        rows.append((describe(world_size, mask, overrides), loss, gradient, good))
        print(f"{seed + 1}/{n}  {time.monotonic() - start:.0f} s  {rows[-1]}", flush=True)
    for pool in pools.values():
        pool.close()
    columns = list(rows[0][0])
    table = [f"| | {' | '.join(columns)} | loss | gradient |", "|" + "---|" * (len(columns) + 3)]
    for seed, (row, loss, gradient, good) in enumerate(rows):
        mark = "" if good else " **differs**"
        table.append(f"| {seed} | {' | '.join(row.values())} | {loss:.0e} | {gradient:.0e}{mark} |")
    failures = sum(not good for *_, good in rows)
    worst = {"loss": max(row[1] for row in rows), "gradient": max(row[2] for row in rows)}
    introduction = INTRODUCTION.format(
        n=n, torch=torch.__version__.split("+")[0], failures=f"{failures or 'none'} marked", **worst
    )
    OUT.write_text(introduction + "\n".join(table) + "\n")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400))
