"""Rules that tie several keys together, checked before any process group starts.

Every problem is collected, so that one run of the command shows them all; each names the keys, their
values, and a value that would work.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from models.decoder_config import DecoderConfig
from parallelize.balance import balance_costs
from parallelize.layout import Layout
from parallelize.schedules import Schedule, balance_uniform, schedule_of
from trainer.checkpoint_folder import (
    EXPORT_MARKER,
    architecture_in,
    checkpoint_root,
    complete_checkpoints,
    holds_adapters,
    read_state,
)
from trainer.config import Config, Model, Parallel
from trainer.data.mixture import pattern_of, weights_by_step
from trainer.errors import UserError
from trainer.extend import families_of
from trainer.hf_directory import read_architecture
from trainer.layout_rules import Choice, layout_problems
from trainer.tuning import is_lora
from trainer.tuning_rules import check_first_stage, tuning_problems

_LARGEST_BETA = 1 - 2**-8  # of moments in bfloat16, which has 8 bits
_NOT_ARCHITECTURE = {"family", "size", "hf_path"}


@dataclass(frozen=True)
class Resolved:
    """A checked config, with what follows from it and the number of processes."""

    config: Config
    architecture: DecoderConfig
    layout: Layout
    layers_per_stage: tuple[int, ...]
    stage_ranks: tuple[int, ...]  # the pipeline rank of each stage

    def full_config(self, compute: str) -> Config:
        """The config with nothing left open: what a run writes down. ``compute``: the dtype that "auto" became."""
        config = self.config
        model = architecture_keys(self.architecture)
        total_steps = config.lr_schedule.total_steps or config.training.steps
        filled = {
            "model": config.model.model_copy(update=model),
            "parallel": config.parallel.model_copy(update={"dp_shard": self.layout.dp_shard}),
            "precision": config.precision.model_copy(update={"compute": compute}),
            "lr_schedule": config.lr_schedule.model_copy(update={"total_steps": total_steps}),
        }
        return config.model_copy(update=filled)

    @property
    def n_microbatches(self) -> int:
        """Micro-batches per optimizer step on each data rank."""
        training = self.config.training
        return training.global_batch_size // (training.micro_batch_size * self.layout.dp)

    @property
    def n_schedule_runs(self) -> int:
        """How often a step runs the pipeline schedule."""
        return self.n_microbatches // (self.config.parallel.schedule_microbatches or self.n_microbatches)

    @property
    def replicates_kv_heads(self) -> bool:
        """Whether kv heads are fewer than tp ranks, and so computed on every one."""
        return self.config.parallel.replicate_kv_heads and self.layout.tp > self.architecture.n_kv_heads

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len


def architecture_keys(architecture: DecoderConfig) -> dict:
    """The ``[model]`` keys that spell out an architecture."""
    return {key: getattr(architecture, key) for key in Model.model_fields if key not in _NOT_ARCHITECTURE}


def resolve_config(config: Config, world_size: int, start_with: str = "--nproc {}") -> Resolved:
    """Check ``config`` for ``world_size`` processes. Raises ``UserError`` with every problem found.

    start_with: how the command is told another number of processes.
    """
    problems: list[str] = []

    def attempt(function, *arguments):
        try:
            return function(*arguments)
        except UserError as error:
            problems.extend(error.problems)
            return None

    if config.parallel.layout == "auto":
        problems.append(
            'parallel.layout = "auto" is for train alone; use "manual" here, with what plan or a run has chosen'
        )
    architecture = attempt(architecture_of, config)
    layout = attempt(layout_of, config.parallel, world_size, start_with)
    problems += _lr_problems(config)
    problems += _moment_problems(config)
    problems += _data_problems(config)
    problems += _validation_problems(config)
    problems += _checkpoint_problems(config)
    problems += _start_problems(config)
    problems += _compile_problems(config)
    tunes = bool(config.training.freeze) or is_lora(config)
    problems += tuning_problems(config, architecture)
    schedule = attempt(schedule_for, config.parallel)
    if layout is not None and schedule is not None:
        problems += [problem for _, problem in layout_problems(Choice(config, architecture, layout, schedule))]
    if problems:
        raise UserError(*problems)
    layers_per_stage = layers_per_stage_of(Choice(config, architecture, layout, schedule))
    stage_ranks = schedule.stage_ranks(layout.pp, len(layers_per_stage)) if layout.pp > 1 else (0,)
    if tunes and layout.pp > 1 and schedule.splits_backward:
        check_first_stage(config, architecture, layers_per_stage[0])
    return Resolved(config, architecture, layout, layers_per_stage, stage_ranks)


def architecture_of(config: Config) -> DecoderConfig:
    """The architecture of the initial weights if the config names any, else the named size with the section's keys.

    Weights fit one architecture only; a key may restate it or change the rotary frequencies (for a longer context),
    and nothing else.
    """
    model = config.model
    overrides = model.model_dump(exclude=_NOT_ARCHITECTURE, exclude_none=True)
    if config.model.hf_path is not None or config.checkpoint.init_from is not None:
        base, source = _architecture_of_weights(config)
        problems = [
            f"model.{key} = {value}, but the weights in {source} are of a model with {getattr(base, key)}: leave it out"
            for key, value in overrides.items()
            if value != getattr(base, key) and not key.startswith("rope_")
        ]
        if problems:
            raise UserError(*problems)
        return replace(base, **{key: value for key, value in overrides.items() if key.startswith("rope_")})
    families = families_of(config.job.imports)
    if model.family not in families:
        raise UserError(f'model.family = "{model.family}": there is {", ".join(families)}')
    sizes = families[model.family]
    if model.size not in sizes:
        raise UserError(f'model.size = "{model.size}": {model.family} has {", ".join(sizes)}')
    base = sizes[model.size]
    if "head_dim" not in overrides and overrides.keys() & {"dim", "n_heads"}:
        base = replace(base, head_dim=None)  # follow the new quotient
        overrides["head_dim"] = None
    try:
        return replace(base, **overrides)
    except ValueError as error:
        raise UserError(f"model: {error}") from None


def _architecture_of_weights(config: Config) -> tuple[DecoderConfig, str]:
    """The architecture of ``model.hf_path`` or ``checkpoint.init_from``, and where it was read.

    A run that has a checkpoint of its own does not need them any more.
    """
    source = config.model.hf_path or config.checkpoint.init_from
    try:
        return (read_architecture(source) if config.model.hf_path else architecture_in(Path(source))), source
    except UserError:
        for own in reversed(complete_checkpoints(checkpoint_root(config))):
            with contextlib.suppress(UserError):  # damaged: there may be an earlier one
                return architecture_in(own), str(own)
        raise


def layout_of(parallel: Parallel, world_size: int, start_with: str = "--nproc {}") -> Layout:
    """The layout with ``dp_shard = -1`` filled in. Raises ``UserError`` where it does not fit the processes."""
    if parallel.cp != 1:
        raise UserError(f"parallel.cp = {parallel.cp}: context parallel is not available yet; use 1")
    rest = parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp
    dp_shard = parallel.dp_shard
    if dp_shard == -1:
        dp_shard = max(1, world_size // rest)
    layout = Layout(parallel.pp, parallel.dp_replicate, dp_shard, parallel.cp, parallel.tp)
    if layout.world_size != world_size:
        shown = ", ".join(
            f"{axis} {getattr(parallel, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        )
        raise UserError(
            f"[parallel] {shown} needs {'a multiple of ' + str(rest) if parallel.dp_shard == -1 else layout.world_size} "
            f"processes, but there {'is' if world_size == 1 else 'are'} {world_size}: start with {start_with.format(layout.world_size)}, or change a degree"
        )
    return layout


def layout_needs(parallel: Parallel) -> int:
    """The smallest number of processes that the layout can run on."""
    return parallel.pp * parallel.dp_replicate * parallel.cp * parallel.tp * max(1, parallel.dp_shard)


def schedule_for(parallel: Parallel) -> Schedule:
    """The schedule that ``parallel.schedule`` names. Raises ``UserError`` for a file that cannot be run."""
    try:
        return schedule_of(parallel.schedule)
    except ValueError as error:
        raise UserError(f"parallel.schedule: {error}") from None


def layers_per_stage_of(choice: Choice) -> tuple[int, ...]:
    """How many layers each stage of a choice without problems gets; "measured" starts from "flops"."""
    balance, architecture, n_stages = choice.config.parallel.balance, choice.architecture, choice.n_stages
    if n_stages == 1:
        return (architecture.n_layers,)
    if balance == "uniform":
        return balance_uniform(architecture.n_layers, n_stages)
    if balance in ("flops", "measured"):
        block, head = architecture.unit_flops_per_token(choice.config.training.seq_len)
        return balance_costs((block,) * architecture.n_layers, n_stages, last=head)
    return balance


def _lr_problems(config: Config) -> Iterator[str]:
    schedule, steps = config.lr_schedule, config.training.steps
    total = schedule.total_steps or steps
    if total < steps:
        yield f"lr_schedule.total_steps = {total} is below training.steps = {steps}: use at least {steps}, or leave it out"
    if schedule.decay_steps is not None and schedule.decay != "wsd":
        yield f'lr_schedule.decay_steps = {schedule.decay_steps} is only for decay = "wsd"; decay is "{schedule.decay}"'
    elif schedule.decay_steps is not None and schedule.warmup_steps + schedule.decay_steps > total:
        yield (
            f"lr_schedule.warmup_steps = {schedule.warmup_steps} + decay_steps = {schedule.decay_steps} is above the "
            f"{total} steps of the schedule"
        )


def _moment_problems(config: Config) -> Iterator[str]:
    beta = max(config.optimizer.betas)
    if config.precision.moments == "bfloat16" and beta > _LARGEST_BETA:
        yield (
            f"optimizer.betas has {beta:g}: in bfloat16 (precision.moments) a moment that decays so slowly is rounded back to "
            f'what it was: use at most {_LARGEST_BETA:g}, or precision.moments = "param"'
        )


def _data_problems(config: Config) -> Iterator[str]:
    data = config.data
    if data.source == "bundled" and data.path is not None:
        yield f'data.path = "{data.path}" is not read with data.source = "bundled"; leave data.source out'
    if data.source not in ("auto", "bundled") and data.path is None:
        yield f'data.source = "{data.source}" needs data.path'
    if data.packing == "best_fit" and not data.isolate_documents:
        yield (
            'data.packing = "best_fit" needs data.isolate_documents = true, and it is false: documents that have nothing '
            "to do with each other share a row"
        )
    if config.training.method == "sft" and data.packing != "best_fit":
        yield (
            f'data.packing = "{data.packing}" would cut conversations where a row ends: with training.method = "sft" use "best_fit", '
            "or leave it out"
        )
    if data.sources and (data.path is not None or data.source != "auto"):
        yield "data.sources is instead of data.path and data.source: keep one"
    yield from _mixture_problems(config)


def _mixture_problems(config: Config) -> Iterator[str]:
    data, problems = config.data, []
    if data.curriculum and not data.sources:
        yield "data.curriculum changes the weights of data.sources, and there are none"
        return
    by_epochs = [name for name, source in data.sources.items() if source.epochs is not None]
    if by_epochs and (len(by_epochs) < len(data.sources) or data.curriculum):
        yield (
            f"data.sources.{by_epochs[0]}.epochs is set: then every source needs epochs, and there can be no data.curriculum; or "
            "use weight"
        )
        return
    steps = [stage.step for stage in data.curriculum]
    for before, after in zip(steps, steps[1:]):
        if after <= before:
            problems.append(f"data.curriculum: step {after} comes after step {before}: put the stages in order")
    for stage in data.curriculum:
        for name in stage.weights.keys() - data.sources.keys():
            problems.append(
                f'data.curriculum, step {stage.step}: no source "{name}"; data.sources has {", ".join(data.sources)}'
            )
    if problems:
        yield from problems
        return
    for step, weights in weights_by_step(data):
        shown = f"data.sources: from step {step} on the weights are {dict(weights)}"
        if not any(weights.values()):
            yield f"{shown}: one must be above 0"
            continue
        try:
            pattern_of(list(weights.values()))
        except ValueError as error:
            yield f"{shown}: {error}"


def _checkpoint_problems(config: Config) -> Iterator[str]:
    section = config.checkpoint
    for key, wanted in (("keep_best", section.keep_best), ("export_dir", section.export_dir is not None)):
        if wanted and not section.enabled:
            yield f"checkpoint.{key} is set, but checkpoint.enabled = false writes none: use true, or leave {key} out"


def _validation_problems(config: Config) -> Iterator[str]:
    validation, checkpoint = config.validation, config.checkpoint
    if validation.sets and not validation.interval:
        yield "validation.sets is set, but validation.interval = 0 never validates: set it"
    if checkpoint.keep_best and (not validation.interval or checkpoint.interval % validation.interval):
        yield (
            f"checkpoint.keep_best needs the validation loss of every checkpoint: with checkpoint.interval = {checkpoint.interval}, "
            f"validation.interval must divide it, and is {validation.interval}"
        )


def _compile_problems(config: Config) -> Iterator[str]:
    section = config.compile
    if section.mode != "default" and section.backend != "inductor":
        yield (
            f'compile.mode = "{section.mode}" is one of inductor\'s, and compile.backend = "{section.backend}": '
            'use compile.backend = "inductor" or compile.mode = "default"'
        )
    if section.memory_budget < 1 and not (section.enabled and section.backend == "inductor"):
        yield (
            f"compile.memory_budget = {section.memory_budget:g} is inductor's to keep: set compile.enabled = true and "
            'compile.backend = "inductor", or leave it out'
        )
    if section.memory_budget < 1 and config.activation_checkpoint.mode != "none":
        yield (
            f"compile.memory_budget = {section.memory_budget:g} and activation_checkpoint.mode = "
            f'"{config.activation_checkpoint.mode}" both say what to compute again: keep one'
        )


def _start_problems(config: Config) -> Iterator[str]:
    if config.model.hf_path is not None and config.checkpoint.init_from is not None:
        yield (
            f'model.hf_path = "{config.model.hf_path}" and checkpoint.init_from = "{config.checkpoint.init_from}" both name '
            "initial weights: keep one"
        )
    init_from, adapts = config.checkpoint.init_from, False
    if init_from is not None:
        with contextlib.suppress(UserError):  # told where it is needed: a run with a checkpoint of its own does not
            adapts = holds_adapters(read_state(Path(init_from)))
    if adapts:
        yield (
            f'checkpoint.init_from = "{init_from}" holds adapters alone: write the whole model with export-hf --merge and name that in '
            "model.hf_path, or go on with them (checkpoint.resume)"
        )
    if config.checkpoint.export_dir is not None:
        yield from _export_problems(config, Path(config.checkpoint.export_dir))


def _export_problems(config: Config, out: Path) -> Iterator[str]:
    """Of a directory that is written after the last step: known now rather than then."""
    named = f'checkpoint.export_dir = "{out}"'
    if out.is_dir() and any(out.iterdir()):
        try:
            mine = json.loads((out / EXPORT_MARKER).read_text())["output_dir"] == str(
                Path(config.job.output_dir).resolve()
            )
        except (OSError, ValueError, KeyError, TypeError):
            mine = False
        if not mine:
            yield f"{named} holds something else than an export of this run: name a new directory"
    elif out.exists() and not out.is_dir():
        yield f"{named} is not a directory"
    elif not os.access(next(parent for parent in out.resolve().parents if parent.exists()), os.W_OK):
        yield f"{named} cannot be made there: no permission to write"
