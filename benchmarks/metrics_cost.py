"""What the default metrics cost, and what collecting Python's garbage at chosen steps saves; a table for docs/observability.md.

    python benchmarks/metrics_cost.py [--steps 60]

The debug model, as shipped, on one process and on two pipeline ranks, every step logged to metrics.jsonl, TensorBoard,
console and rank logs. About 4 minutes on 2 cores. Time is counted inside the run, around what the loop calls for them:
two runs side by side differ by more than what is looked for.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.torchrun import run_ranks  # noqa: E402

_FIRST = 5  # steps that do not count


class Spent:
    """Seconds inside some functions, the outermost counted, one number a step."""

    def __init__(self):
        self.by_step, self._inside = [0.0], False

    def around(self, function):
        def timed(*arguments, **keys):
            if self._inside:
                return function(*arguments, **keys)
            self._inside, start = True, time.perf_counter()
            try:
                return function(*arguments, **keys)
            finally:
                self._inside = False
                self.by_step[-1] += time.perf_counter() - start

        return timed


def rank_main(folder: Path, arguments: list[str]) -> None:
    """One rank of a run, with clocks around what it calls to look at itself."""
    from trainer import loop, metrics
    from trainer.__main__ import main as command
    from trainer.garbage import Garbage
    from trainer.pipeline_record import PipelineRecord

    looking, collecting, steps = Spent(), Spent(), []
    loop.record_of = looking.around(loop.record_of)
    for owner, name in ((metrics.Reporter, "write"), (PipelineRecord, "begin"), (PipelineRecord, "end")):
        setattr(owner, name, looking.around(getattr(owner, name)))
    began = [0.0]

    def on_collection(phase: str, _) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            collecting.by_step[-1] += time.perf_counter() - began[0]

    gc.callbacks.append(on_collection)
    original, last = Garbage.after, [time.perf_counter()]

    def after(self, step: int) -> None:
        original(self, step)
        steps.append(time.perf_counter() - last[0])
        last[0] = time.perf_counter()
        seen = {"steps": steps, "looking": looking.by_step, "collecting": collecting.by_step}
        (folder / f"seen-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))
        for spent in (looking, collecting):
            spent.by_step.append(0.0)

    Garbage.after = after
    sys.argv = ["trainer", "train", *arguments]
    sys.exit(command())


def measure(nproc: int, n_steps: int, *arguments: str) -> list[dict]:
    """By rank: seconds of each step, and of each step's looking and collecting."""
    with tempfile.TemporaryDirectory(prefix="meshloom-cost-") as scratch:
        keys = [f"--training.steps={n_steps}", f"--job.output_dir={scratch}/run", "--checkpoint.interval=0", *arguments]
        sys.stdout.flush()
        code = run_ranks(nproc, [str(Path(__file__).resolve()), "--rank-of", scratch, *keys])
        assert code == 0, f"the run ended with {code}"
        return [json.loads((Path(scratch) / f"seen-{rank}.json").read_text()) for rank in range(nproc)]


def main(n_steps: int) -> None:
    rows = []
    for name, nproc, flags in (("one process", 1, []), ("pp 2", 2, ["--parallel.pp=2"])):
        kept = measure(nproc, n_steps, *flags)[0]
        free = measure(nproc, n_steps, "--job.gc_interval=0", *flags)[0]
        step_s = statistics.median(kept["steps"][_FIRST:])
        looking = statistics.mean(kept["looking"][_FIRST:n_steps])
        collected = sum(kept["collecting"][_FIRST:n_steps]) / (n_steps - _FIRST)
        freely = free["collecting"][_FIRST:n_steps]
        rows.append(
            f"| {name} | {step_s * 1e3:.0f} ms | {looking * 1e3:.2f} ms | {looking / step_s:.2%} | {statistics.mean(freely) * 1e3:.2f} ms, "
            f"at the most {max(freely) * 1e3:.1f} | {collected * 1e3:.2f} ms |"
        )
    print(
        "\n| debug model | step | default metrics | share | garbage, as Python likes | every 50 steps |\n|---|---|---|---|---|---|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        rank_main(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
