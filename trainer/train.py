"""The ``train`` command: what one rank does from a checked config to the end of the run."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.local_model import LocalModel
from parallelize.mesh import Mesh
from trainer.build import build_model, build_train_step, compute_dtype
from trainer.checkpoint import Checkpointer, check_same_run, choose_resume, read_state
from trainer.config import Config
from trainer.config_load import dump_config
from trainer.config_rules import Resolved, resolve_config
from trainer.data.loader import load_rows, make_loader
from trainer.errors import EXIT_STOPPED
from trainer.hardware import peak_flops
from trainer.loop import Run, RunFacts, train
from trainer.lr_schedule import LrSchedule
from trainer.metrics import Reporter
from trainer.rank import run_rank
from trainer.signals import StopRequest


def main(config: Config) -> int:
    """Train as one rank of the job. Returns the exit code."""
    stop = StopRequest()
    return run_rank(lambda device: 0 if _train(config, device, stop) else EXIT_STOPPED)


def _train(config: Config, device: torch.device, stop: StopRequest) -> bool:
    world_size, is_main = dist.get_world_size(), dist.get_rank() == 0
    resolved = resolve_config(config, world_size)
    training, folder = config.training, Path(config.job.output_dir)

    resume_from = choose_resume(config)
    dist.barrier()  # every rank has looked before any rank writes
    if resume_from is not None:
        check_same_run(resume_from, config)
        if read_state(resume_from)["step"] >= training.steps:
            if is_main:
                print(f"{folder} is already at step {read_state(resume_from)['step']} of {training.steps}: nothing to do. "
                      "To go on, raise training.steps; for another run, choose another job.output_dir")  # fmt: skip
            return True
    rows = load_rows(config.data, training.seq_len, resolved.architecture.vocab_size)

    mesh = Mesh(resolved.layout, device.type)
    model = build_model(resolved, mesh, device)
    step = build_train_step(resolved, model, mesh, device)
    checkpointer = Checkpointer(config, model, step.optimizer, device)
    done_steps = checkpointer.load(resume_from) if resume_from is not None else 0
    loader = make_loader(
        rows, config.data, training.global_batch_size, mesh.dp_index, resolved.layout.dp, first_step=done_steps + 1
    )
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
        _print_summary(resolved, model, device, len(rows), resume_from)
    reporter = Reporter(
        folder,
        is_main=is_main,
        resume_step=done_steps,
        last_step=training.steps,
        tensorboard=config.metrics.tensorboard,
    )
    try:
        return train(
            Run(
                step=step,
                batches=iter(loader),
                lr=_lr_schedule(config),
                checkpointer=checkpointer,
                reporter=reporter,
                stop=stop,
                facts=_facts(resolved, device),
                device=device,
                done_steps=done_steps,
                last_step=training.steps,
                log_interval=config.metrics.log_interval,
                save_interval=config.checkpoint.interval,
                stop_on_nonfinite=training.nonfinite == "stop",
            )
        )
    finally:
        reporter.close()


def _lr_schedule(config: Config) -> LrSchedule:
    section = config.lr_schedule
    return LrSchedule(
        peak=config.optimizer.lr,
        total_steps=section.total_steps or config.training.steps,
        warmup_steps=section.warmup_steps,
        decay=section.decay,
        min_lr_ratio=section.min_lr_ratio,
        decay_steps=section.decay_steps,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _facts(resolved: Resolved, device: torch.device) -> RunFacts:
    config = resolved.config
    return RunFacts(
        tokens_per_step=resolved.tokens_per_step,
        flops_per_token=resolved.architecture.flops_per_token(config.training.seq_len),
        world_size=resolved.layout.world_size,
        peak_flops=peak_flops(_device_name(device), compute_dtype(config, device.type)),
    )


def _print_summary(
    resolved: Resolved, model: LocalModel, device: torch.device, n_rows: int, resume_from: Path | None
) -> None:
    config, layout, training = resolved.config, resolved.layout, resolved.config.training
    precision = config.precision
    stages = "" if layout.pp == 1 else (
        f", {config.parallel.schedule}, layers per stage {'+'.join(map(str, resolved.layers_per_stage))}"
    )  # fmt: skip
    states = {p.dtype for p in model.parts[0].parameters()}
    print(
        f"model       {config.model.family} {config.model.size}, {resolved.architecture.n_params:,} parameters\n"
        f"layout      {layout}{stages}; {layout.world_size} process(es) on {_device_name(device)}\n"
        f"batch       {training.micro_batch_size} sequences x {resolved.n_microbatches} micro-batches x {layout.dp} data ranks "
        f"= {training.global_batch_size} of {training.seq_len} tokens: {resolved.tokens_per_step:,} tokens a step\n"
        f"data        {n_rows:,} rows, {n_rows / training.global_batch_size:.1f} steps an epoch\n"
        f"precision   parameters {precision.param}, compute {compute_dtype(config, device.type)}, gradient reduction "
        f"{precision.reduce}, optimizer {', '.join(str(dtype).removeprefix('torch.') for dtype in states)}\n"
        f"output      {config.job.output_dir}"
    )  # fmt: skip
    if precision.param == "bfloat16":
        print("warning     parameters in bfloat16: an update below 1/256 of a weight is lost (1.0 - 1e-4 == 1.0)")
    if config.metrics.tensorboard:
        print(f"watch       tensorboard --logdir {Path(config.job.output_dir) / 'tensorboard'}")
    if resume_from is not None:
        print(f"resuming    {resume_from}")
    sys.stdout.flush()
