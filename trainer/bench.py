"""The ``bench`` command: every combination of some config keys, each a real run in a fresh process.

``OUT/bench.json`` is written after every run and holds all that is known: started again, a bench goes on from it.
"""

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.bench_matrix import Bench, Cell, cells_of, read_bench
from trainer.bench_report import Row, draw, machine, print_rows, row_of, run_text, write_tensorboard
from trainer.config_load import Override
from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_STOPPED, UserError
from trainer.output_folder import write_whole
from trainer.run_folder import metrics_lines, records_in
from trainer.signals import StopRequest

_ROOT = Path(__file__).resolve().parent.parent
_PATIENCE_S = 2.5  # after which a run that was asked to stop is asked again, which ends it at once
_SINCE_FIRST = ("compiled_graphs", "compile_time_s")


def main(options: argparse.Namespace, overrides: list[Override]) -> int:
    """0: every cell that can run has run; 1: one failed; 2: none can run; 75: stopped, go on with the same command."""
    stop = StopRequest()
    if os.environ.get("NNODES", "1") != "1":
        raise UserError(f"environment variable NNODES={os.environ['NNODES']}: a bench runs on one machine")
    stream = sys.stderr if options.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=stream, flush=True)

    bench, out = read_bench(options, overrides), Path(options.out)
    with contextlib.redirect_stdout(sys.stderr), _locked(out):  # what a check prints is for people
        cells = cells_of(bench, out)
        results = Results(out / "bench.json", cells)
        _run_all(bench, cells, results, out, stop, say)
    rows = [row_of(cell, results.runs[cell.key]) for cell in cells]
    if options.json:
        print(json.dumps(results.as_dict(), indent=1))
    else:
        print_rows(rows)
    _draw(rows, out, say)
    say(f"written: {out / 'bench.json'}; tensorboard --logdir {out}/hparams, then http://localhost:6006/#hparams")
    if stop.requested:
        say("stopped; the same command goes on")
        return EXIT_STOPPED
    if all(cell.config is None for cell in cells):
        return EXIT_BAD_INPUT
    return EXIT_FAILED if any(row.state == "failed" for row in rows) else 0


class Results:
    """Runs by cell. Those of an earlier start are kept where their cell is the same, whether it is in this matrix or not."""

    def __init__(self, path: Path, cells: list[Cell]):
        self._path, self._cells = path, cells
        stored = _stored_cells(path)
        done = {key: [run for run in cell["runs"] if run["state"] == "done"] for key, cell in stored.items()}
        self.runs: dict[str, list[dict]] = {cell.key: done.get(cell.key, []) for cell in cells}
        self._others = [cell for key, cell in stored.items() if key not in self.runs]
        self.save()

    def done(self, cell: Cell) -> list[dict]:
        return [run for run in self.runs[cell.key] if run["state"] == "done"]

    def add(self, cell: Cell, run: dict) -> None:
        self.runs[cell.key].append(run)
        self.save()

    def save(self) -> None:
        write_whole(self._path, json.dumps(self.as_dict() | {"other_cells": self._others}, indent=1) + "\n")

    def as_dict(self) -> dict:
        cells = [self._cell_dict(cell) for cell in self._cells]
        return {"machine": machine(), "cells": cells}

    def _cell_dict(self, cell: Cell) -> dict:
        row = row_of(cell, self.runs[cell.key])
        command = None if cell.command is None else shlex.join(["./run_train.sh", *cell.command])
        return {
            "key": cell.key, "name": cell.name, "varied": cell.varied, "state": row.state, "why": row.why,
            "layout": row.layout, "nproc": cell.nproc, "command": command, **row.numbers, "runs": self.runs[cell.key],
        }  # fmt: skip


def _stored_cells(path: Path) -> dict[str, dict]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {cell["key"]: cell for cell in [*stored["cells"], *stored["other_cells"]] if cell["runs"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a bench's: {error!r}: name another --out, or remove it") from None


def _run_all(bench: Bench, cells: list[Cell], results: Results, out: Path, stop: StopRequest, say) -> None:
    for cell in cells:
        for problem in cell.problems:
            say(f"cannot run: {_varied_text(cell)}: {problem}")
    runnable = [cell for cell in cells if cell.config is not None]
    n_runs, n_kept = len(runnable) * bench.repeat, sum(min(bench.repeat, len(results.done(cell))) for cell in runnable)
    say(
        f"{len(runnable)} of {len(cells)} cells can run, {bench.warmup_steps} + {bench.steps} steps each, {bench.repeat} time(s); {n_kept} of {n_runs} runs are done"
    )
    n_done, failed = n_kept, set()
    for round_ in range(bench.repeat):
        # In turn forwards and backwards: what drifts meanwhile, such as a processor's heat, is shared by all.
        for cell in runnable[:: -1 if round_ % 2 else 1]:
            if stop.requested:
                return
            if len(results.done(cell)) > round_ or cell.key in failed:
                continue
            run = _run(bench, cell, out, stop)
            if run is None:
                return
            n_done += 1
            results.add(cell, run)
            if run["state"] == "failed":
                failed.add(cell.key)
            say(f"[{n_done}/{n_runs}] {_varied_text(cell)}: {run_text(run)}")


def _varied_text(cell: Cell) -> str:
    return ", ".join(f"{axis} {text}" for axis, text in cell.varied.items())


def _run(bench: Bench, cell: Cell, out: Path, stop: StopRequest) -> dict | None:
    """Train once, in a fresh process. None if the bench was asked to stop meanwhile."""
    folder = out / "cells" / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "trainer.launch", *cell.command, f"--job.output_dir={folder}"]
    start = time.perf_counter()
    with (folder / "console.log").open("w", encoding="utf-8") as console:
        process = subprocess.Popen(
            command, stdout=console, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))},
        )  # fmt: skip
        code = _wait(process, stop)
    if stop.requested:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    wall_s = time.perf_counter() - start
    if code:
        return {"state": "failed", "why": _why(folder / "console.log", code), "wall_s": wall_s}
    return {"state": "done", "wall_s": wall_s, **measured(folder, bench.warmup_steps)}


def _die_with_parent() -> None:
    """Else a bench that is killed leaves a run behind, which the next one would share the machine with."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2)


def _wait(process: subprocess.Popen, stop: StopRequest) -> int:
    """The run's exit code. Asked to stop, the run is: twice, since nothing of it is wanted."""
    asked_s = None
    while process.poll() is None:
        now = time.monotonic()
        if stop.requested and (asked_s is None or now - asked_s > _PATIENCE_S):
            process.send_signal(signal.SIGTERM)
            asked_s = now
        time.sleep(0.05)
    return process.returncode


def _why(console: Path, code: int) -> str:
    """A run's last words."""
    lines = [
        line.strip() for line in console.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
    ]
    said = [line for line in lines if line.startswith("error: ") or "out of memory" in line.lower()]
    said = said or [line for line in lines if "Error" in line]
    return f"exit code {code}: {(said or lines or ['nothing was said'])[0 if said else -1]} (all of it: {console})"


def measured(folder: Path, warmup_steps: int) -> dict:
    """What counts of a run's records: those whose steps all come after the warm-up."""
    records, _ = records_in(metrics_lines(folder))
    starts = [0, *(record["step"] for record in records)]
    counted = [record for start, record in zip(starts, records) if start >= warmup_steps]
    if not counted:
        raise UserError(
            f"{folder}: no record lies behind the warm-up: use fewer --warmup-steps, more --steps, or a smaller metrics.log_interval"
        )
    first, last = records[0], records[-1]
    result = {key: [record[key] for record in counted] for key in ("step_time_s", "tokens_per_s", "data_time_s", "mfu")}
    # The first step of a compiled run compiles; what is compiled later is a recompilation.
    graphs = {f"first_{key}": first.get(key, 0) for key in _SINCE_FIRST} | {
        key: last.get(key, 0) for key in _SINCE_FIRST
    }
    return result | graphs | {
        "first_step_time_s": first.get("first_step_time_s"), "memory_peak_bytes": last["memory_peak_bytes"], "loss": last["loss"],
    }  # fmt: skip


def _draw(rows: list[Row], out: Path, say) -> None:
    """The rows of TensorBoard and the picture; both are made anew."""
    done = [row for row in rows if row.state == "done"]
    write_tensorboard(done, out / "hparams")
    if done:
        try:
            draw(done, out / "bench.png")
        except UserError as error:
            say(f"no picture: {error}")


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise UserError(f"--out {out}: another bench is running there") from None
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error}") from None
