"""What a layout, its schedule and its batch must satisfy: one table, for checking a config and for planning one.

A rule yields problems: what is wrong, with the keys, their values and values that would work. Its ``reason`` is
what the planner counts rejected layouts by.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.decoder_config import DecoderConfig
from parallelize.layout import Layout
from parallelize.schedules import Schedule, ScheduleFile, balance_uniform
from trainer.config import Config


@dataclass(frozen=True)
class Choice:
    """A config with its layout for a number of processes. architecture: None where the config's is wrong itself."""

    config: Config
    architecture: DecoderConfig | None
    layout: Layout
    schedule: Schedule

    @property
    def virtual_stages(self) -> int:
        return self.schedule.virtual_stages(self.layout.pp, self.config.parallel.virtual_stages)

    @property
    def n_stages(self) -> int:
        return self.layout.pp * self.virtual_stages if self.layout.pp > 1 else 1

    @property
    def sequences_at_once(self) -> int:
        """Sequences of one micro-batch on every data rank."""
        return self.config.training.micro_batch_size * self.layout.dp

    @property
    def n_microbatches(self) -> int:
        return self.config.training.global_batch_size // self.sequences_at_once

    @property
    def n_in_a_run(self) -> int:
        """Micro-batches in one run of the schedule."""
        return self.config.parallel.schedule_microbatches or self.n_microbatches

    @property
    def batch_divides(self) -> bool:
        return self.config.training.global_batch_size % self.sequences_at_once == 0

    @property
    def batch_text(self) -> str:
        training = self.config.training
        return (
            f"training.global_batch_size = {training.global_batch_size} / (micro_batch_size = "
            f"{training.micro_batch_size} x dp = {self.layout.dp}) makes {self.n_microbatches} micro-batch(es)"
        )


def reshards(config: Config, layout: Layout) -> bool:
    """Whether each micro-batch frees its parameters after the forward, gathers them again, and reduces its gradients.

    Else parameters stay gathered and gradients whole until the step's last micro-batch. With a pipeline the many
    gathers would cost more than they save, and with one data shard they save nothing.
    """
    asked = config.parallel.reshard_after_forward
    return asked == "always" or (asked == "auto" and layout.pp == 1 and layout.dp_shard > 1)


def layout_problems(choice: Choice) -> Iterator[tuple[str, str]]:
    """Every (reason, problem) of a choice."""
    for rule in RULES:
        if not rule.advice and (choice.architecture is not None or not rule.of_the_model):
            for problem in rule.problems(choice):
                yield rule.reason, problem


def layout_advice(choice: Choice) -> list[str]:
    """What runs, but could be better, of a choice without problems."""
    return [text for rule in RULES if rule.advice for text in rule.problems(choice)]


def _global_batch(choice: Choice) -> Iterator[str]:
    training, share = choice.config.training, choice.sequences_at_once
    if not choice.batch_divides:
        below = training.global_batch_size // share * share
        yield (
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of training.micro_batch_size "
            f"= {training.micro_batch_size} times dp = {choice.layout.dp} (dp_replicate x dp_shard): "
            f"use {f'{below} or ' if below else ''}{below + share}, or another micro_batch_size"
        )


def _schedule_microbatches(choice: Choice) -> Iterator[str]:
    if choice.layout.pp == 1 or not choice.batch_divides:
        return
    asked, n_microbatches = choice.n_in_a_run, choice.n_microbatches
    if n_microbatches % asked:
        divisors = ", ".join(str(n) for n in range(1, n_microbatches + 1) if n_microbatches % n == 0)
        yield (
            f"parallel.schedule_microbatches = {asked} must divide the micro-batches of a step, but {choice.batch_text}: "
            f"use {divisors}"
        )
        return
    if problem := choice.schedule.microbatch_problem(choice.layout.pp, choice.n_stages, asked):
        given = choice.config.parallel.schedule_microbatches
        made = f"parallel.schedule_microbatches = {asked}" if given else choice.batch_text
        yield f"{made}, but parallel.schedule = {choice.config.parallel.schedule} {problem}"


def _pipeline_keys(choice: Choice) -> Iterator[str]:
    parallel = choice.config.parallel
    if choice.layout.pp > 1:
        return
    for key, neutral in (("balance", "uniform"), ("virtual_stages", 1), ("schedule_microbatches", None)):
        value = getattr(parallel, key)
        if value not in (None, neutral, "flops", "measured"):
            shown = list(value) if isinstance(value, tuple) else value
            yield f"parallel.{key} = {shown} needs parallel.pp above 1 (it is 1)"
    if isinstance(choice.schedule, ScheduleFile):
        yield f"parallel.schedule = {parallel.schedule} needs parallel.pp = {choice.schedule.pp} (it is 1)"


def _virtual_stages(choice: Choice) -> Iterator[str]:
    if choice.layout.pp == 1:
        return
    if problem := choice.schedule.stages_problem(choice.layout.pp, choice.virtual_stages):
        schedule = choice.config.parallel.schedule
        yield f"parallel.schedule = {schedule} {problem} (parallel.virtual_stages = {choice.virtual_stages})"


def _layers(choice: Choice) -> Iterator[str]:
    n_layers, balance = choice.architecture.n_layers, choice.config.parallel.balance
    pp, virtual, n_stages = choice.layout.pp, choice.virtual_stages, choice.n_stages
    if pp == 1:
        return
    if n_stages > n_layers:
        yield (
            f"parallel.pp = {pp} with {virtual} stage(s) a rank makes {n_stages} stages, "
            f"but the model has n_layers = {n_layers}: use a parallel.pp or virtual_stages of fewer stages"
        )
    elif not isinstance(balance, str) and (len(balance) != n_stages or sum(balance) != n_layers):
        yield (
            f"parallel.balance = {list(balance)} must list {n_stages} stages (pp x virtual stages) that add up "
            f"to n_layers = {n_layers}, for example {list(balance_uniform(n_layers, n_stages))}"
        )


def _split_backward(choice: Choice) -> Iterator[str]:
    config, schedule = choice.config, choice.config.parallel.schedule
    if choice.layout.pp == 1 or not choice.schedule.splits_backward:
        return
    if config.compile.enabled:
        yield (
            f"compile.enabled = true with parallel.schedule = {schedule}: torch cannot split the backward of "
            "a compiled block; use 1F1B or Interleaved1F1B, or compile.enabled = false"
        )
    if config.activation_checkpoint.mode == "selective":
        yield (
            f'activation_checkpoint.mode = "selective" with parallel.schedule = {schedule}: the split backward '
            'would recompute twice, which torch refuses; use "full" or "none"'
        )
    if config.parallel.reshard_after_forward == "always":
        yield (
            f'parallel.reshard_after_forward = "always" with parallel.schedule = {schedule} gives wrong '
            'gradients in torch 2.13; use "auto" or "never"'
        )


def _heads(choice: Choice) -> Iterator[str]:
    tp = choice.layout.tp
    for name in ("n_heads", "n_kv_heads", "ffn_dim"):
        value = getattr(choice.architecture, name)
        if value % tp == 0:
            continue
        replicable = name == "n_kv_heads" and tp % value == 0
        if not (replicable and choice.config.parallel.replicate_kv_heads):
            yield (
                f"parallel.tp = {tp} does not divide {name} = {value} of the model: use {_powers_of_two_in(value)}"
                + (", or parallel.replicate_kv_heads = true" if replicable else "")
            )


def _sequence(choice: Choice) -> Iterator[str]:
    tp, seq_len = choice.layout.tp, choice.config.training.seq_len
    if choice.config.parallel.sequence_parallel and seq_len % tp:
        yield (
            f"training.seq_len = {seq_len} is not a multiple of parallel.tp = {tp}, as sequence parallel needs: "
            f"use {f'{seq_len // tp * tp} or ' if seq_len >= tp else ''}{(seq_len // tp + 1) * tp}, "
            "or parallel.sequence_parallel = false"
        )


def _vocabulary(choice: Choice) -> Iterator[str]:
    tp, dp_shard, vocab_size = choice.layout.tp, choice.layout.dp_shard, choice.architecture.vocab_size
    rows = -(-vocab_size // tp)  # of a rank; the last one gets what is left
    if rows * (tp - 1) >= vocab_size:
        yield (
            f"parallel.tp = {tp} leaves a rank without a row of vocab_size = {vocab_size} of the model: use {rows * tp} or more"
        )
    elif vocab_size % tp and dp_shard > 2:
        # torch 2.13 computes wrong offsets for some of these shards, which would end up in checkpoints.
        yield (
            f"vocab_size = {vocab_size} of the model is not a multiple of parallel.tp = {tp}, which torch cannot shard again "
            f"over dp_shard = {dp_shard}: use model.vocab_size = {(vocab_size // tp + 1) * tp}, or dp_shard of at most 2"
        )


def _short_pipeline(choice: Choice) -> Iterator[str]:
    pp, n = choice.layout.pp, choice.n_in_a_run
    if pp > 1 and n < 4 * pp:
        yield (
            f"{n} micro-batches for {pp} pipeline ranks leave much of the step idle: raise training.global_batch_size, or "
            "lower micro_batch_size, dp or pp"
        )


def recomputed_split_backward(choice: Choice) -> Iterator[str]:
    if choice.layout.pp > 1 and choice.schedule.splits_backward and choice.config.activation_checkpoint.mode == "full":
        yield (
            f'activation_checkpoint.mode = "full" with parallel.schedule = {choice.config.parallel.schedule}: torch computes '
            'each block again once for its input and once more for each of its weights; use "none", or 1F1B or Interleaved1F1B'
        )


def _many_buffers(choice: Choice) -> Iterator[str]:
    if choice.layout.pp > 1 and choice.n_in_a_run > 16 * choice.layout.pp:
        yield (
            f"torch holds a receive buffer for each of the {choice.n_in_a_run} micro-batches: "
            f"parallel.schedule_microbatches = {8 * choice.layout.pp} would do with fewer"
        )


def _odd_vocabulary(choice: Choice) -> Iterator[str]:
    rows = choice.architecture.vocab_size / choice.layout.tp
    if rows % 64:
        yield (
            f"vocab_size = {choice.architecture.vocab_size} over tp = {choice.layout.tp} is no multiple of 64, on which "
            "matmuls of a GPU are fastest"
        )


def _powers_of_two_in(value: int) -> str:
    powers = [2**k for k in range(int(math.log2(value)) + 1) if value % 2**k == 0]
    return " or ".join(map(str, powers)) if len(powers) > 1 else "1"


@dataclass(frozen=True)
class Rule:
    """of_the_model: it looks at the architecture. advice: what it says is no reason not to run."""

    reason: str
    problems: Callable[[Choice], Iterator[str]]
    of_the_model: bool = False
    advice: bool = False


RULES = (
    Rule("the global batch is no multiple of micro-batch x dp", _global_batch),
    Rule("the schedule cannot run so many micro-batches", _schedule_microbatches),
    Rule("a key that only a pipeline has", _pipeline_keys),
    Rule("the schedule cannot run so many stages a rank", _virtual_stages),
    Rule("a schedule that splits the backward excludes another key", _split_backward),
    Rule("tp does not divide the model's heads or ffn", _heads, of_the_model=True),
    Rule("tp does not divide the sequence", _sequence),
    Rule("tp does not divide the vocabulary", _vocabulary, of_the_model=True),
    Rule("more stages than layers", _layers, of_the_model=True),
    Rule("few micro-batches for the pipeline", _short_pipeline, advice=True),
    Rule("full recompute with a split backward", recomputed_split_backward, advice=True),
    Rule("receive buffers of many micro-batches", _many_buffers, advice=True),
    Rule("a vocabulary that matmuls are slower on", _odd_vocabulary, of_the_model=True, advice=True),
)
