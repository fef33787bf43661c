"""The training loop: fetch, step, report, save, until the last step or a request to stop."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from trainer.checkpoint import Checkpointer
from trainer.hardware import memory_peak_bytes
from trainer.lr_schedule import LrSchedule
from trainer.metrics import Reporter, Stopwatch
from trainer.nonfinite import NonFiniteError, NonFiniteGuard
from trainer.optimizer import set_lr
from trainer.pipeline_record import PipelineRecord
from trainer.signals import StopRequest
from trainer.step import StepResult, TrainStep
from trainer.watchdog import Watchdog

_FIRST_STEP = 5  # times as long may the first step take: it compiles, allocates, meets the others


@dataclass(frozen=True)
class RunFacts:
    """Constants of a run that its reports need."""

    tokens_per_step: int
    flops_per_token: int
    world_size: int
    peak_flops: float | None  # of one device; None: unknown


@dataclass(frozen=True)
class Validation:
    """A fixed set of batches, read again each time."""

    interval: int
    batches: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]  # of this data rank, on its device


@dataclass
class Run:
    """Everything the loop touches, put together in ``train.py``."""

    step: TrainStep
    batches: Iterator[dict[str, torch.Tensor]]  # of this data rank, from step ``done_steps + 1`` on
    lr: LrSchedule
    checkpointer: Checkpointer
    reporter: Reporter
    stop: StopRequest
    watchdog: Watchdog
    facts: RunFacts
    device: torch.device
    done_steps: int  # 0, or the step of the checkpoint that was loaded
    last_step: int
    log_interval: int
    save_interval: int  # 0: only the last step
    nonfinite: NonFiniteGuard
    pipeline_record: PipelineRecord
    validation: Validation | None
    unread: deque = field(default_factory=deque)  # (step, result) whose verdict is still on the device

    def due(self, step: int) -> "Due":
        is_last = step == self.last_step
        validate = self.validation is not None and (is_last or step % self.validation.interval == 0)
        return Due(
            validate=validate,
            report=is_last or validate or step % self.log_interval == 0,
            save=is_last or (self.save_interval > 0 and step % self.save_interval == 0),
        )


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    validate: bool
    report: bool
    save: bool


def train(run: Run) -> bool:
    """Train to the last step. Returns False if it stopped early, after a checkpoint, because it was asked to.

    Returns once the last checkpoint is complete. Raises ``StoppedRun``: ``NonFiniteError``, ``SaveFailed``.
    """
    try:
        finished = train_steps(run)
    except NonFiniteError as error:
        run.watchdog.begin("the last checkpoint", "checkpoint.timeout_s")
        raise NonFiniteError(f"{error}. {run.checkpointer.writer.last_word()}") from None
    run.checkpointer.writer.finish()
    run.watchdog.pause("the end")
    return finished


def train_steps(run: Run) -> bool:
    """Returns False if it stopped early, with a checkpoint under way, because it was asked to."""
    watch = Stopwatch()
    for step in range(run.done_steps + 1, run.last_step + 1):
        is_first = step == run.done_steps + 1
        run.watchdog.begin(f"step {step}", "job.step_timeout_s", factor=_FIRST_STEP if is_first else 1)
        tokens, labels = watch.time_data(lambda: next_batch(run))
        lr = run.lr.at(step)
        set_lr(run.step.optimizer, lr)
        run.checkpointer.writer.check()
        run.pipeline_record.begin(step)
        result = run.step(tokens, labels, stop_requested=run.stop.requested)
        run.pipeline_record.end(step)
        watch.n_steps += 1

        due = run.due(step)
        run.unread.append((step, result))
        # A GPU runs behind: by the time this step is queued the one before is done or nearly so, and reading
        # its verdict leaves no gap. A log or a checkpoint wants the newest; a CPU has nothing to wait for.
        reads_all = due.report or due.save or run.device.type == "cpu"
        stops = read_verdicts(run, n_left_unread=0 if reads_all else 1)
        if due.report:
            record = record_of(run, step, result, lr, watch)
            if due.validate:
                record |= validate(run, step)
            run.reporter.write(record)
            watch.restart()
        if stops and run.unread:
            read_verdicts(run, n_left_unread=0)
        if due.save or stops:
            run.watchdog.begin(f"the checkpoint of step {step}", "checkpoint.timeout_s")
            watch.off_the_clock(run.checkpointer.save, step, run.nonfinite.n_skipped)
        if stops:
            return step == run.last_step
    return True


def validate(run: Run, step: int) -> dict:
    """The loss over the validation batches, and what it took, as a part of the step's record."""
    run.watchdog.begin(f"the validation of step {step}", "job.step_timeout_s", factor=_FIRST_STEP)
    start = time.perf_counter()
    loss, _ = run.step.evaluate(run.validation.batches())
    return {"validation_loss": loss, "validation_time_s": time.perf_counter() - start}


def next_batch(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's tokens and labels of this data rank on its device: int64 [sequences, S]."""
    batch = next(run.batches)
    return tuple(batch[key].to(run.device, non_blocking=True) for key in ("tokens", "labels"))


def read_verdicts(run: Run, n_left_unread: int) -> bool:
    """Learn whether steps were finite, and whether any rank was asked to stop.

    Every rank reads the same numbers of the same steps, so all act alike. Raises ``NonFiniteError``.
    """
    stops = False
    while len(run.unread) > n_left_unread:
        step, result = run.unread.popleft()
        skipped, stop = result.verdict.read()
        stops |= stop
        run.nonfinite.judge(step, skipped, result)
    return stops


def record_of(run: Run, step: int, result: StepResult, lr: float, watch: Stopwatch) -> dict:
    """One line of metrics.jsonl: rates over the steps since the last one."""
    facts = run.facts
    loss, grad_norm = result.loss.item(), result.grad_norm.item()  # first: they wait for the device
    step_time_s = watch.elapsed_s / watch.n_steps
    tokens_per_s = facts.tokens_per_step / step_time_s
    flops_per_device = tokens_per_s * facts.flops_per_token / facts.world_size
    return {
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens_seen": step * facts.tokens_per_step,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / facts.world_size,
        "step_time_s": step_time_s,
        "data_time_s": watch.data_s / watch.n_steps,
        "checkpoint_time_s": watch.paused_s,
        "tflops_per_device": flops_per_device / 1e12,
        "mfu": None if facts.peak_flops is None else flops_per_device / facts.peak_flops,
        "memory_peak_bytes": memory_peak_bytes(run.device.type),
        "skipped_steps": run.nonfinite.n_skipped,
    }
