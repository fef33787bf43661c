"""Kill anything at any moment, on any layout: the run goes on exactly. Writes docs/reliability.md.

    python benchmarks/fault_campaign.py [N] [--seed S] [--parallel P] [--resume DIR] [--only TRIAL]

Draws faults, N of them and 200 by default, in trials of one to three: each starts a run as a user would, strikes it,
starts it again, mostly at another layout, and so on until it has finished. Takes about 15 seconds a fault on 2 cores.
Exits 1 if a trial fails. An interrupted campaign goes on with --resume and the directory that it named; --only repeats
one trial and keeps its directory.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fault_kinds import END_WITHIN_S, KINDS, NEED_CHECKPOINTS, NEED_MACHINES, Disk, Moment, Scene, kinds_here
from benchmarks.fault_launch import MARKER, ROOT, Launch, processes_with, send
from tests.dist.draws import SCHEDULES
from trainer.config import Checkpoint
from trainer.config_load import load_config, split_overrides
from trainer.config_rules import resolve_config
from trainer.errors import UserError

OUT = ROOT / "docs" / "reliability.md"
N_STEPS, INTERVAL = 12, 2
LOSS_TOLERANCE = 1e-5
MODEL = [
    "--model.dim=64", "--model.n_layers=4", "--model.n_heads=4", "--model.n_kv_heads=4", "--model.ffn_dim=128",
    "--training.seq_len=32", "--training.global_batch_size=8", f"--training.steps={N_STEPS}",
    "--lr_schedule.warmup_steps=2", f"--checkpoint.interval={INTERVAL}", "--metrics.tensorboard=false",
]  # fmt: skip
PAGE = """# Killed at any moment, at any layout

Made by `python benchmarks/fault_campaign.py {n} --seed {seed}` on torch {torch}, CPU: {n_faults} faults in {n_trials} runs. Each run
of {steps} steps, with a checkpoint every {interval}, is started as a user starts it, at a layout drawn from 1, 2 and 4 processes over
tp, pp, dp_shard and dp_replicate with any schedule{asynchronous}; struck at a drawn moment, {n_inside}
times while a checkpoint was being written; started again, mostly at another layout; and so on until it has finished.
{notes}
| fault | struck | inside a save | layout changed after | failed |
|---|---|---|---|---|
{table}

Held after every fault: launcher and ranks have ended within {end_within} s, the slowest {slowest:.0f} s after; the next start goes on from
the newest checkpoint that is complete and undamaged, with no more lost than the steps since; SIGTERM ends with exit
code 75 and a checkpoint of the step it stopped at. Held at the end: exit code 0; every step once and in order in
`metrics.jsonl`; each loss within {tolerance} of one process that was never interrupted, the largest relative difference being
{difference:.1e}; the last checkpoint complete, its checksums right, and nothing half-written left.
"""


@dataclass(frozen=True)
class Layout:
    n_processes: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    kind: str
    layout: Layout
    moment: Moment


@dataclass(frozen=True)
class Plan:
    """A trial: faults one after the other, then a last launch to the end."""

    name: str
    faults: tuple[Fault, ...]
    last_layout: Layout
    async_save: bool


def draw_layout(rng: random.Random) -> Layout:
    """Always one that the config rules accept."""
    n_processes = rng.choice([1, 2, 2, 4])
    degrees = rng.choice({1: [()], 2: [(2,)], 4: [(4,), (2, 2)]}[n_processes])
    axes = dict(zip(rng.sample(["tp", "pp", "dp_shard", "dp_replicate"], len(degrees)), degrees))
    while True:
        micro_batch_size = rng.choice([1, 2, 4, 8])
        n_microbatches = 8 * axes.get("tp", 1) * axes.get("pp", 1) // (n_processes * micro_batch_size)
        if "tp" in axes and n_microbatches * axes["tp"] > 4:
            continue  # minutes, where more ranks than cores exchange a message for every matmul
        flags = {axis: axes.get(axis, 1) for axis in ("tp", "pp", "dp_shard", "dp_replicate")}
        if "pp" in axes:
            flags["schedule"] = rng.choice(SCHEDULES)
        layout = Layout(
            n_processes,
            (
                *(f"--parallel.{key}={value}" for key, value in flags.items()),
                f"--training.micro_batch_size={micro_batch_size}",
            ),
        )
        try:
            resolve_config(load_config("debug.toml", split_overrides([*MODEL, *layout.flags])[1]), n_processes)
        except UserError:
            continue
        return layout


def draw_moment(rng: random.Random, kind: str) -> Moment:
    if rng.random() < 0.5:
        return Moment(rng.uniform(0, 0.8), inside_save=True, delay_s=rng.choice([0.0, rng.uniform(0, 0.2)]))
    if (
        rng.random() < 0.3 and kind not in NEED_CHECKPOINTS
    ):  # the start, of some 10 s: processes, rendezvous, building, loading
        return Moment(0.0, inside_save=False, delay_s=rng.uniform(0, 10))
    return Moment(rng.random(), inside_save=False, delay_s=rng.uniform(0, 0.5))


def draw_plan(seed: int, trial: int, kinds: list[str]) -> Plan:
    rng = random.Random(f"{seed} {trial}")
    layouts = [draw_layout(rng)]
    faults = []
    for index in range(rng.randint(1, 3)):
        kind = rng.choice(kinds) if index else kinds[trial % len(kinds)]  # by turns, so that none is rare
        while kind in NEED_MACHINES and layouts[-1].n_processes < 2:
            layouts[-1] = draw_layout(rng)
        faults.append(Fault(kind, layouts[-1], draw_moment(rng, kind)))
        layouts.append(draw_layout(rng) if rng.random() < 0.7 else layouts[-1])
    async_save = rng.random() < 0.5
    return Plan(f"{seed} {trial}", tuple(faults), layouts[-1], async_save)


def arguments_of(layout: Layout, run: Path, async_save: bool) -> list[str]:
    asynchronous = [f"--checkpoint.async_save={str(async_save).lower()}"] if has_async_save() else []
    return [*MODEL, *layout.flags, *asynchronous, f"--job.output_dir={run}"]


def has_async_save() -> bool:
    return "async_save" in Checkpoint.model_fields


def losses_of_one_process(scratch: Path) -> list[float]:
    """The reference: never interrupted."""
    run = scratch / "reference"
    if not (run / "checkpoints" / f"step-{N_STEPS:08d}").exists():
        shutil.rmtree(run, ignore_errors=True)
        launch = Launch(arguments_of(Layout(1, ()), run, False), 1, scratch / "reference-launch")
        try:
            assert launch.process.wait() == 0, launch.err.read_text()
        finally:
            launch.close()
    return [record["loss"] for record in records(run)]


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def run_trial(plan: Plan, folder: Path, reference: list[float]) -> dict:
    """Run a plan in a new ``folder``, which is kept if something fails. Returns what was seen, ready for JSON."""
    clear(folder)
    folder.mkdir(parents=True)
    disk = Disk(folder / "disk") if any(fault.kind == "full disk" for fault in plan.faults) else None
    # A checkpoint that is written beside the training may be a whole interval behind when the next is due.
    scene = Scene(folder / "disk" / "run", folder, N_STEPS, INTERVAL * (2 if plan.async_save else 1), disk)
    seen = {"plan": asdict(plan), "faults": [], "difference": None, "folder": str(folder)}
    start = time.monotonic()
    try:
        for index in range(len(plan.faults)):
            suffer(scene, plan, index, seen["faults"])
            if scene.code == 0:
                break
        if scene.code != 0:
            finish(scene, plan)
        seen["difference"] = check_end(scene, reference)
    except Exception:  # a bug of the campaign, or a file that a check could not even read
        scene.problems.append(traceback.format_exc())
    finally:
        if scene.launch is not None:
            scene.launch.close()
        if disk is not None:
            if scene.problems:
                shutil.copytree(disk.folder, folder / "disk-copy", dirs_exist_ok=True)
            disk.close()
    seen |= {"problems": scene.problems, "seconds": time.monotonic() - start}
    if seen["faults"] and scene.problems and not any(fault["failed"] for fault in seen["faults"]):
        seen["faults"][-1]["failed"] = True  # found at the end: charged to the last one
    if not scene.problems:
        shutil.rmtree(folder)
    return seen


def suffer(scene: Scene, plan: Plan, index: int, faults: list[dict]) -> None:
    """One launch and the fault that strikes it; adds to ``faults`` if it came before the run had finished."""
    fault = plan.faults[index]
    layouts = [fault.layout for fault in plan.faults] + [plan.last_layout]
    n_problems = len(scene.problems)
    arguments = arguments_of(fault.layout, scene.run, plan.async_save)
    scene.prepare(arguments, fault.layout.n_processes, fault.moment, random.Random(f"{plan.name} {index}"))
    KINDS[fault.kind](scene)
    if scene.struck:
        faults.append({
            "kind": fault.kind, "inside_save": scene.inside_save, "ended_s": scene.ended_s, "exit": scene.code,
            "layout_changed": layouts[index + 1] != fault.layout, "failed": len(scene.problems) > n_problems,
        })  # fmt: skip
    elif scene.code is None:
        scene.demand(scene.wait_for_end() == 0, f"exit code {scene.code} without a fault")


def finish(scene: Scene, plan: Plan) -> None:
    arguments = arguments_of(plan.last_layout, scene.run, plan.async_save)
    scene.prepare(arguments, plan.last_layout.n_processes, None, random.Random())
    scene.start()
    scene.demand(scene.wait_for_end() == 0, f"exit code {scene.code} of the last launch")


def check_end(scene: Scene, reference: list[float]) -> float:
    """What must hold of a run that has finished. Returns the largest relative difference of a loss."""
    seen = records(scene.run)
    steps = [record["step"] for record in seen]
    scene.demand(steps == list(range(1, N_STEPS + 1)), f"steps {steps} in metrics.jsonl")
    difference = max(abs(record["loss"] / reference[record["step"] - 1] - 1) for record in seen)
    scene.demand(difference <= LOSS_TOLERANCE, f"a loss differs by {difference:.1e}")
    scene.demand(scene.newest() == N_STEPS, f"no good checkpoint of step {N_STEPS}, the newest is {scene.newest()}")
    half = [f.name for f in scene.root.iterdir() if f.name.endswith(".partial") or not any(f.glob("trainer_state*"))]
    scene.demand(not half, f"incomplete checkpoints left: {half}")
    return difference


def clear(folder: Path) -> None:
    """Remove what an earlier try of this trial has left, if that was killed itself."""
    for pid in processes_with(f"{MARKER}={folder}/"):
        send(pid, signal.SIGKILL)
    if (folder / "disk").is_mount():
        subprocess.run(["umount", folder / "disk"], check=True)
    shutil.rmtree(folder, ignore_errors=True)


class Campaign:
    """Trials one after the other, some at a time, until enough faults have struck; each result is on disk at once."""

    def __init__(self, n: int, scratch: Path, plan_of: Callable[[int], Plan | None]):
        self.n, self.scratch, self.plan_of = n, scratch, plan_of
        self.results_file = scratch / "results.jsonl"
        lines = self.results_file.read_text().splitlines() if self.results_file.exists() else []
        self.results = {result["trial"]: result for result in map(json.loads, lines)}
        self.lock, self.next_trial, self.stopping = threading.Lock(), 0, False
        self.start, self.n_before = time.monotonic(), self.n_faults()

    def n_faults(self) -> int:
        return sum(len(result["faults"]) for result in self.results.values())

    def run(self, parallel: int) -> list[dict]:
        reference = losses_of_one_process(self.scratch)
        with ThreadPoolExecutor(parallel) as pool:
            workers = [pool.submit(self._work, reference) for _ in range(parallel)]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:  # interrupted: the trials under way end with their processes, and are not recorded
                self.stopping = True
                Launch.end_all()
                raise
        return [self.results[trial] for trial in sorted(self.results)]

    def _work(self, reference: list[float]) -> None:
        while not self.stopping and (trial := self._next()) is not None:
            result = {"trial": trial} | run_trial(self.plan_of(trial), self.scratch / f"trial-{trial:04d}", reference)
            with self.lock:
                if not self.stopping:
                    self._record(result)

    def _next(self) -> int | None:
        with self.lock:
            while self.next_trial in self.results:
                self.next_trial += 1
            if self.n_faults() >= self.n or self.plan_of(self.next_trial) is None:
                return None
            self.next_trial += 1
            return self.next_trial - 1

    def _record(self, result: dict) -> None:
        self.results[result["trial"]] = result
        with self.results_file.open("a") as file:
            file.write(json.dumps(result) + "\n")
        n, seconds = self.n_faults(), time.monotonic() - self.start
        each = seconds / max(1, n - self.n_before)
        kinds = ", ".join(f"{f['kind']}{' inside a save' * f['inside_save']}" for f in result["faults"])
        print(
            f"{n}/{self.n}  {seconds:.0f} s, {each:.1f} s a fault, {max(0, self.n - n) * each / 60:.0f} min left  "
            f"trial {result['trial']}, {result['seconds']:.0f} s: {kinds or 'finished before its fault'}", flush=True,
        )  # fmt: skip
        if result["problems"]:
            show_failure(result)


def show_failure(result: dict) -> None:
    plan = result["plan"]
    print(f"FAILED trial {result['trial']} ({plan['name']}), kept in {result['folder']}; repeat it with --only")
    print("\n".join(f"  {json.dumps(fault)}" for fault in plan["faults"]))
    print(f"  then {json.dumps(plan['last_layout'])}, async_save {plan['async_save'] and has_async_save()}")
    print("\n".join(f"  {problem}" for problem in result["problems"]), flush=True)


def campaign(
    n: int, seed: int, scratch: Path, *, parallel: int = 1, plan_of: Callable[[int], Plan | None] | None = None
) -> list[dict]:
    """Run trials in ``scratch`` until ``n`` faults have struck; the results, one a trial, "problems" among them.

    plan_of: a trial's plan by its number, None for no more; by default drawn from ``seed``. A campaign whose results
    are in ``scratch`` goes on.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    kinds = kinds_here()
    whole = Campaign(n, scratch.resolve(), plan_of or (lambda trial: draw_plan(seed, trial, kinds)))
    for trial, result in whole.results.items():
        if result["plan"]["name"] != whole.plan_of(trial).name:
            raise ValueError(f"{scratch} holds the campaign of another seed")
    return whole.run(parallel)


def write_page(results: list[dict], n: int, seed: int) -> None:
    faults = [fault for result in results for fault in result["faults"]]
    missing = [kind for kind in KINDS if kind not in kinds_here()]
    notes = f"\nSkipped, for want of root: {', '.join(missing)}.\n" if missing else ""
    if failed := [str(result["trial"]) for result in results if result["problems"]]:
        notes += f"\n**What is said below did not hold in trials {', '.join(failed)}** (`--only` repeats one).\n"
    share = sum(result["plan"]["async_save"] for result in results)
    asynchronous = f", {share} of them with `checkpoint.async_save`" if has_async_save() else ""
    OUT.write_text(PAGE.format(
        n=n, seed=seed, torch=version("torch").split("+")[0], n_faults=len(faults), n_trials=len(results), steps=N_STEPS,
        n_inside=sum(fault["inside_save"] for fault in faults), interval=INTERVAL, asynchronous=asynchronous, notes=notes, table=table_of(faults), end_within=END_WITHIN_S,
        slowest=max(fault["ended_s"] for fault in faults), tolerance=f"{LOSS_TOLERANCE:.0e}".replace("e-0", "e-"),
        difference=max(result["difference"] or 0.0 for result in results),
    ))  # fmt: skip


def table_of(faults: list[dict]) -> str:
    rows = {kind: [fault for fault in faults if fault["kind"] == kind] for kind in kinds_here()} | {"all": faults}
    lines = []
    for kind, seen in rows.items():
        counts = [sum(fault[key] for fault in seen) for key in ("inside_save", "layout_changed", "failed")]
        lines.append(f"| {kind} | {' | '.join(map(str, [len(seen), *counts]))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n", nargs="?", type=int, default=200, help="faults (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1, help="trials at a time (default 1)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the campaign in this directory")
    parser.add_argument("--only", type=int, metavar="TRIAL", help="repeat this trial of the seed alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no processes behind
    scratch = options.resume or Path(tempfile.mkdtemp(prefix="meshloom-faults-"))
    if options.only is not None:
        plan = draw_plan(options.seed, options.only, kinds_here())
        result = run_trial(plan, scratch / f"only-{options.only}", losses_of_one_process(scratch))
        print(json.dumps(result, indent=1))
        return int(bool(result["problems"]))
    print(f"{options.n} faults, seed {options.seed}, in {scratch}: about {options.n * 15 / 60:.0f} min", flush=True)
    try:
        results = campaign(options.n, options.seed, scratch, parallel=options.parallel)
    except KeyboardInterrupt:
        print(f"interrupted; to go on: --resume {scratch}")
        return 130
    write_page(results, options.n, options.seed)
    print(OUT.read_text())
    return int(any(result["problems"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
