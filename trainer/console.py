"""What rank 0 says while a run goes on."""

import os
import sys
import time

from tqdm import tqdm


def say(text: str) -> None:
    """Print, unless whoever read it has gone, such as ``head``: the run is worth more than its console."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Console:
    """A line a record; in a terminal a progress bar below them."""

    def __init__(self, resume_step: int, last_step: int):
        self._first_step, self._last_step, self._start = resume_step + 1, last_step, time.perf_counter()
        self._bar = None
        if sys.stdout.isatty():
            self._bar = tqdm(total=last_step, initial=resume_step, unit="step", file=sys.stdout, dynamic_ncols=True)

    def write(self, record: dict) -> None:
        mean_s = (time.perf_counter() - self._start) / (record["step"] - self._first_step + 1)
        left_s = (self._last_step - record["step"]) * mean_s  # checkpoints included, unlike step_time_s
        mfu = "" if record["mfu"] is None else f"  mfu {record['mfu']:.1%}"
        line = (
            f"step {record['step']:>{len(str(self._last_step))}}/{self._last_step}  loss {_number(record['loss'], '.6f')}"
            f"  lr {record['lr']:.3e}  grad norm {_number(record['grad_norm'], '.4f')}"
            f"  {record['tokens_per_s']:,.0f} tokens/s{mfu}{_validation_text(record)}  left {_clock(left_s)}"
        )
        if self._bar is None:
            say(line)
        else:
            self._bar.write(line, file=sys.stdout)
            self._bar.update(record["step"] - self._bar.n)
        if found := record.get("stragglers"):
            least, median, most = found["compute_s"]
            say(
                f"stragglers  step {record['step']}: without communication {least:.3f} to {most:.3f} s a rank, median {median:.3f}; "
                f"slowest {found['slowest']} on {found['host']}"
            )

    def close(self, finished: bool) -> None:
        if self._bar is not None:
            self._bar.close()


def _validation_text(record: dict) -> str:
    if "validation_loss" not in record:
        return ""
    by_set = record.get("validation_loss_by_set", {})
    shown = f" ({', '.join(f'{name} {loss:.4f}' for name, loss in by_set.items())})" if len(by_set) > 1 else ""
    return f"  validation loss {_number(record['validation_loss'], '.6f')}{shown}"


def _number(value: float | None, form: str) -> str:
    return "nan" if value is None else f"{value:{form}}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
