"""Whether a run is going on, done, or how it ended, from what is in its folder. Loads no torch, writes nothing."""

import fcntl
from pathlib import Path

STATES = {
    "running": "a live process is writing the folder (it holds the folder's lock)",
    "finished": "the last step is logged",
    "stopped": "not finished, and nothing runs; the same command goes on from the newest checkpoint",
    "failed": "not finished, and nothing runs; its last word is of a step that was not finite, or of a hang",
    "no checkpoint": "not finished, and nothing runs; nothing is saved, so that the same command starts over",
    "unknown": "nothing runs, and config.toml does not say how many steps it was to do",
}


def saved_steps(folder: Path) -> list[int]:
    """The steps of the run's complete checkpoints, in order."""
    from trainer.checkpoint_folder import complete_checkpoints, step_of  # loads numpy

    try:
        return [step_of(checkpoint) for checkpoint in complete_checkpoints(folder / "checkpoints")]
    except OSError:  # not ours to read
        return []


def state_of(folder: Path, config: dict, step: int, steps: int | None, saved: list[int]) -> tuple[str, tuple[str, ...]]:
    """The run's state, and what there is to say of it."""
    running = _is_running(folder)
    if running:
        return "running", ()
    notes = ("its lock cannot be looked at: it may be running",) if running is None else ()
    if steps is not None and step >= steps:
        return "finished", notes
    if failure := _failure(folder, config, step):
        return "failed", (*notes, failure)
    if steps is None:
        return "unknown", notes
    return "stopped" if saved else "no checkpoint", notes


def _is_running(folder: Path) -> bool | None:
    """Whether a process holds the lock that ``output_folder`` takes. None where that cannot be known."""
    try:
        with (folder / ".lock").open("rb") as lock:
            # Shared, so that two readers are no writers; gone at the close. A run that starts just now tries again.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # not ours to read, or a file system without locks
        return None


def _failure(folder: Path, config: dict, step: int) -> str | None:
    """What a run that has ended said after its last logged step, if that was an error that leaves a file."""
    from trainer.checkpoint_folder import step_of

    logged_s = changed_s(folder / "metrics.jsonl")
    dumps = sorted(path for path in (folder / "nonfinite").glob("step-*.json") if step_of(path.with_suffix("")))
    bad_steps = {step_of(path.with_suffix("")) for path in dumps}
    limit = config.get("training.nonfinite_limit", 10) if config.get("training.nonfinite") == "skip" else 1
    if dumps and changed_s(dumps[-1]) >= logged_s and (newest := max(bad_steps)) > step and type(limit) is int:
        if bad_steps >= set(range(newest - limit + 1, newest + 1)):
            return f"loss or gradient not finite at step {newest}: see nonfinite/{dumps[-1].name}"
    if any(changed_s(path) >= logged_s for path in (folder / "logs").glob("stacks-rank-*.txt")):
        return "hung: stacks in logs/"
    return None


def changed_s(path: Path) -> float:
    """Seconds since 1970; 0 where that cannot be known."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
