"""What a run is, on one screen: what people paste into issues."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.grad_norm import local_tensor
from parallelize.local_model import LocalModel
from parallelize.planner.replay import StageTime, action_orders, replay
from parallelize.planner.topology import node_map
from trainer.build import flops_per_token
from trainer.config import Config
from trainer.config_rules import Resolved, schedule_for
from trainer.data.samples import Samples
from trainer.hardware import GIB
from trainer.tuning import lora_scale

_EQUAL = StageTime(forward_s=1.0, input_s=1.0, weight_s=1.0)


def stage_lines(resolved: Resolved, model: LocalModel) -> list[str]:
    """A line a pipeline rank: its stages, layers, parameters, and what a rank of it keeps. Called by all ranks together."""
    held = list(model.named.values()) + list(model.copies.values())
    n_parameters = sum(parameter.numel() for parameter in held)
    n_trained = sum(parameter.numel() for parameter in held if parameter.requires_grad)
    # With its gradient and two moments, where it is trained.
    state_bytes = sum(local_tensor(parameter).nbytes * (4 if parameter.requires_grad else 1) for parameter in held)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (n_parameters, n_trained, state_bytes))
    lines = []
    for rank in range(resolved.layout.pp):
        ranks = everyone[rank * resolved.layout.stage_ranks : (rank + 1) * resolved.layout.stage_ranks]
        stages = [stage for stage, owner in enumerate(resolved.stage_ranks) if owner == rank]
        layers = "+".join(str(resolved.layers_per_stage[stage]) for stage in stages)
        of = (
            ""
            if resolved.layout.pp == 1
            else f"pp {rank}: stage {', '.join(map(str, stages))}, {layers} layer{'s' * (layers != '1')}, "
        )
        lines.append(
            f"{of}{ranks[0][0]:,} parameters{_of_which(*ranks[0][:2])}; {_size(max(of_rank[2] for of_rank in ranks))} a rank with "
            "gradients and optimizer"
        )
    return lines


def summary(resolved: Resolved, device_name: str, samples: Samples, links: str, stages: list[str]) -> str:
    """Lines of a label and what it stands for. ``links``: as measured; ``stages``: ``stage_lines``."""
    config, layout, training = resolved.config, resolved.layout, resolved.config.training
    precision, n_processes = config.precision, layout.world_size
    architecture = resolved.architecture
    model = config.model.hf_path or config.checkpoint.init_from or f"{config.model.family} {config.model.size}"
    flops = flops_per_token(config, architecture)
    recompute, compiles = config.activation_checkpoint.shown, "on" if config.compile.enabled else "off"
    lines = [
        ("model", f"{model}, {architecture.n_params:,} parameters"),
        *(("method", line) for line in [_method(config)] if line),
        (
            "compute",
            f"{flops / 1e6:,.4g} MFLOP a token, attention counted in full; recompute {recompute}, compile {compiles}",
        ),
        ("layout", f"{layout}; {n_processes} process{'es' * (n_processes > 1)} on {device_name}"),
        *_nodes(resolved),
        *(("state" if layout.pp == 1 else "stages", line) for line in stages),
        *(() if layout.pp == 1 else (("schedule", _schedule(resolved)),)),
        (
            "batch",
            f"{training.micro_batch_size} sequences x {resolved.n_microbatches} micro-batches x {layout.dp} data ranks "
            f"= {training.global_batch_size} of {training.seq_len} tokens: {resolved.tokens_per_step:,} tokens a step",
        ),
        *(("data", line) for line in _data(config, samples)),
        (
            "precision",
            f"parameters and optimizer {precision.param}, compute {precision.compute}, gradient reduction {precision.reduce}",
        ),
        ("checkpoints", _checkpoints(config)),
        ("output", config.job.output_dir),
    ]
    if links:
        lines.append(("links", links))
    if precision.param == "bfloat16":
        lines.append(
            ("warning", "parameters in bfloat16: an update below 1/256 of a weight is lost (1.0 - 1e-4 == 1.0)")
        )
    if config.training.method != "pretrain" and not (config.model.hf_path or config.checkpoint.init_from):
        lines.append(
            ("warning", f"{config.training.method} of weights drawn at random: name trained ones with model.hf_path")
        )
    if config.lr_schedule.warmup_steps >= training.steps:
        lines.append(("warning", f"the run ends within the warm-up of {config.lr_schedule.warmup_steps} steps"))
    if config.metrics.tensorboard:
        lines.append(
            (
                "watch",
                f"tensorboard --logdir {Path(config.job.output_dir) / 'tensorboard'}, then http://localhost:6006/#custom_scalars",
            )
        )
    shown = [
        f"{'' if label == before else label:<12}{text}" for (before, _), (label, text) in zip([("", "")] + lines, lines)
    ]
    return "\n".join(shown)


def _method(config: Config) -> str:
    """How it is fine-tuned; "" if it is not."""
    training, lora = config.training, config.lora
    frozen = f"; frozen: {', '.join(training.freeze)}" if training.freeze else ""
    if training.method == "pretrain":
        return frozen.removeprefix("; ")
    if training.method == "sft":
        return f"sft: the assistant's part of conversations{frozen}"
    return f"lora: rank {lora.rank}, scale {lora_scale(lora):.4g}, on {', '.join(lora.targets)}{frozen}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _nodes(resolved: Resolved) -> list[tuple[str, str]]:
    """Which axes cross machines, where there are several alike."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", resolved.layout.world_size))
    if per_node >= resolved.layout.world_size:
        return []
    first, *axes = node_map(resolved.layout, per_node).splitlines()
    return [("nodes", first.split(":")[0].replace("GPUs", "processes")), *(("nodes", line.strip()) for line in axes)]


def _data(config: Config, samples: Samples) -> list[str]:
    """A line a source, and what was wrong with some."""
    lines, batch = [], config.training.global_batch_size
    for (name, rows), share in zip(samples.rows.items(), samples.mixture.shares()):
        text = f"{name}: {share:.4g} of the samples, " if name else ""
        text += f"{len(rows):,} rows" + (f", {len(rows) / batch / share:.1f} steps an epoch" if share else "")
        if config.data.packing == "best_fit":
            text += f"; best fit: {rows.share_filled:.1%} of their positions hold a token"
        lines.append(text + ("; documents isolated" if config.data.isolate_documents else ""))
    return [*lines, *samples.warnings]


def _schedule(resolved: Resolved) -> str:
    config, pp = resolved.config, resolved.layout.pp
    n_stages, n_in_a_run = len(resolved.layers_per_stage), resolved.n_microbatches // resolved.n_schedule_runs
    orders = action_orders(schedule_for(config.parallel), pp, n_stages // pp, n_in_a_run)
    idle = replay(orders, [_EQUAL] * n_stages).idle_share
    runs = f", {resolved.n_schedule_runs} runs a step" if resolved.n_schedule_runs > 1 else ""
    return f"{config.parallel.schedule}, {n_stages} stages, {n_in_a_run} micro-batches{runs}: {idle:.1%} idle if stages are equal"


def _of_which(n_parameters: int, n_trained: int) -> str:
    return "" if n_trained == n_parameters else f", {n_trained:,} of them trained"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.1f} MiB"


def _checkpoints(config: Config) -> str:
    section = config.checkpoint
    if not section.enabled:
        return "none"
    if not section.interval:
        return "of the last step alone"
    kept = f"the newest {section.keep_latest}" if section.keep_latest else "all"
    kept += f", every {section.keep_every}th step's" if section.keep_every and section.keep_latest else ""
    kept += " and the best" if section.keep_best and section.keep_latest else ""
    how = "in the background" if section.async_save else "while training waits"
    return f"every {section.interval} steps, {how}; {kept} kept"
