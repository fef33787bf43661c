"""The training loop: fetch, step, report, save, until the last step or a request to stop."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from parallelize.layout import Layout
from trainer.checkpoint import Checkpointer
from trainer.data.rows import model_inputs
from trainer.garbage import Garbage
from trainer.hardware import memory_bytes
from trainer.instruments import Instruments
from trainer.lr_schedule import LrSchedule
from trainer.metrics import Reporter, Stopwatch
from trainer.nonfinite import NonFiniteError, NonFiniteGuard
from trainer.optimizer import set_lr
from trainer.rank_log import LOG
from trainer.rank_stats import RankStats, compile_stats, gather_stats, summary_of
from trainer.signals import StopRequest
from trainer.step import Batch, StepResult, TrainStep
from trainer.watchdog import Watchdog

_MOST_EXP = 700  # exp of more is beyond a float
_FIRST_STEP = 5  # times as long may the first step take: it compiles, allocates, meets the others


@dataclass(frozen=True)
class RunFacts:
    """Constants of a run that its reports need."""

    tokens_per_step: int
    flops_per_token: int
    layout: Layout
    peak_flops: float | None  # of one device; None: unknown


@dataclass(frozen=True)
class Validation:
    """Fixed sets of batches, read again each time."""

    interval: int
    # By name, "" if the run has only one; of this data rank, on its device:
    sets: dict[str, Callable[[], Iterator[Batch]]]


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
    tokens_by_source: Callable[[int], dict[str, int]]  # up to and with a step; {} of only one source
    device: torch.device
    done_steps: int  # 0, or the step of the checkpoint that was loaded
    last_step: int
    log_interval: int
    saves: bool  # checkpoints at all
    save_interval: int  # 0: only the last step
    nonfinite: NonFiniteGuard
    instruments: Instruments
    garbage: Garbage
    validation: Validation | None
    unread: deque = field(default_factory=deque)  # (step, result) whose verdict is still on the device

    def due(self, step: int) -> "Due":
        is_last = step == self.last_step
        validate = self.validation is not None and (is_last or step % self.validation.interval == 0)
        return Due(
            validate=validate,
            report=is_last
            or validate
            or step % self.log_interval == 0
            or self.instruments.profiler.looks_for_stragglers(step),
            save=self.saves and (is_last or (self.save_interval > 0 and step % self.save_interval == 0)),
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
        batch = watch.time_data(lambda: next_batch(run))
        lr = run.lr.at(step)
        set_lr(run.step.optimizer, lr)
        run.checkpointer.writer.check()
        due = run.due(step)
        with run.instruments.watching(step, due.report, watch):
            result = run.step(*batch, stop_requested=run.stop.requested)
        watch.n_steps += 1

        run.unread.append((step, result))
        # A GPU runs behind: by the time this step is queued the one before is done or nearly so, and reading
        # its verdict leaves no gap. A log or a checkpoint wants the newest; a CPU has nothing to wait for.
        reads_all = due.report or due.save or is_first or run.device.type == "cpu"
        stops = read_verdicts(run, n_left_unread=0 if reads_all else 1)
        if is_first:
            watch.end_first_step(due.report)
        validated = {}
        if due.report:
            record = record_of(run, step, result, lr, watch)
            if due.validate:
                validated = validate(run, step)
            run.reporter.write(record | validated)
            watch.restart()
        if stops and run.unread:
            read_verdicts(run, n_left_unread=0)
        if due.save or (stops and run.saves):
            run.watchdog.begin(f"the checkpoint of step {step}", "checkpoint.timeout_s")
            watch.time_checkpoint(run.checkpointer.save, step, validated.get("validation_loss"), run.nonfinite.state())
            LOG.info("checkpoint of step %d", step)
        run.garbage.after(step)
        if stops:
            return step == run.last_step
    return True


def validate(run: Run, step: int) -> dict:
    """The loss over the validation batches, and what it took, as a part of the step's record."""
    start = time.perf_counter()
    losses, n_tokens = {}, {}
    for name, batches in run.validation.sets.items():
        run.watchdog.begin(f"the validation of step {step}", "job.step_timeout_s", factor=_FIRST_STEP)
        losses[name], n_tokens[name] = run.step.evaluate(batches())
    loss = sum(losses[name] * n_tokens[name] for name in losses) / max(1, sum(n_tokens.values()))
    return {
        "validation_loss": loss,
        "validation_perplexity": math.exp(loss) if loss < _MOST_EXP else math.inf,
        "validation_time_s": time.perf_counter() - start,
        **({} if "" in losses else {"validation_loss_by_set": losses}),
    }


def next_batch(run: Run) -> Batch:
    """The step's share of this data rank, on its device."""
    return tuple(tensor.to(run.device, non_blocking=True) for tensor in model_inputs(next(run.batches)))


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
    times = watch.times()
    step_time_s = times["step_time_s"]
    tokens_per_s = facts.tokens_per_step / step_time_s
    flops_per_device = tokens_per_s * facts.flops_per_token / facts.layout.world_size
    pipeline = run.instruments.pipeline
    mine = RankStats(
        watch.data_s / watch.n_steps,
        result.squared_norm_share.item(),
        *memory_bytes(run.device.type),
        *(pipeline.busy_s, pipeline.begin_s, pipeline.end_s),
        **compile_stats(),
    )
    LOG.info("step %d: %.4f s, of it data %.4f s", step, step_time_s, mine.data_time_s)
    record = {
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens_seen": step * facts.tokens_per_step,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / facts.layout.world_size,
        **times,
        "tflops_per_device": flops_per_device / 1e12,
        "mfu": None if facts.peak_flops is None else flops_per_device / facts.peak_flops,
        "skipped_steps": run.nonfinite.n_skipped,
    }
    if by_source := run.tokens_by_source(step):
        record["tokens_by_source"] = by_source
    if run.instruments.stragglers is not None:
        record["stragglers"] = run.instruments.stragglers
    return record | summary_of(gather_stats(mine, run.device), facts.layout)
