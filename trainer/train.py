"""The ``train`` command: what one rank does from a checked config to the end of the run."""

import contextlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.mesh import Mesh
from trainer.auto_layout import choose_layout
from trainer.build import build_model, build_train_step, compute_dtype
from trainer.checkpoint import Checkpointer
from trainer.checkpoint_files import damage_in
from trainer.checkpoint_folder import changed_since, check_same_run, choose_resume, read_state
from trainer.config import Config
from trainer.config_load import dump_config
from trainer.config_rules import Resolved, resolve_config
from trainer.data.loader import batches_in_order, load_rows, load_validation_rows, make_loader
from trainer.data.rows import TokenRows
from trainer.errors import EXIT_STOPPED, UserError
from trainer.hardware import peak_flops
from trainer.hf_directory import read_origin
from trainer.hf_export import export_run
from trainer.loop import Run, RunFacts, Validation, train
from trainer.lr_schedule import LrSchedule
from trainer.measured_balance import with_measured_balance
from trainer.metrics import Reporter
from trainer.nonfinite import NonFiniteGuard
from trainer.output_folder import open_output_folder, write_whole
from trainer.pipeline_record import PipelineRecord
from trainer.preflight import check_machines, measure_links
from trainer.rank import on_main_rank, run_rank
from trainer.signals import StopRequest
from trainer.watchdog import Watchdog


def main(config: Config, stop: StopRequest) -> int:
    """Train as one rank of the job. Returns the exit code."""

    def work(device: torch.device, watchdog: Watchdog) -> int:
        stop.listen()
        if not _train(config, device, stop, watchdog):
            return EXIT_STOPPED
        if config.checkpoint.export_dir is not None and dist.get_rank() == 0:  # the others leave: nobody waits
            export_run(config)
        return 0

    # Torch's own limit on a collective comes after ours, which knows more.
    return run_rank(work, timeout_s=max(1800, 2 * config.job.step_timeout_s))


def _train(config: Config, device: torch.device, stop: StopRequest, watchdog: Watchdog) -> bool:
    """Returns whether the run has reached its last step."""
    if config.parallel.layout == "auto":
        config = choose_layout(config, device)
    resolved = resolve_config(config, dist.get_world_size())
    config = resolved.full_config(compute_dtype(config, device.type))
    resolved = replace(resolved, config=config)
    folder, steps = Path(config.job.output_dir), config.training.steps

    check_machines(config, resolved.layout)
    rows = load_rows(config.data, config.training.seq_len, resolved.architecture.vocab_size)
    with open_output_folder(folder):
        resume_from, done_steps = _where_to_start(config)
        if done_steps >= steps:
            if dist.get_rank() == 0:
                print(
                    f"{resume_from} is already at step {done_steps} of {steps}: nothing to do. To go on, raise "
                    "training.steps; for another run, choose another job.output_dir"
                )
            return True
        run = _prepare(resolved, rows, resume_from, device, stop, watchdog)
        with contextlib.closing(run.reporter):
            return train(run)


def _prepare(
    resolved: Resolved,
    rows: TokenRows,
    resume_from: Path | None,
    device: torch.device,
    stop: StopRequest,
    watchdog: Watchdog,
) -> Run:
    """Build model, step, loader and reports, and load the checkpoint."""
    config, training = resolved.config, resolved.config.training
    folder, is_main = Path(config.job.output_dir), dist.get_rank() == 0
    mesh, links = _connect(resolved, device, folder, watchdog)
    if config.parallel.balance == "measured" and resolved.layout.pp > 1:
        resolved = with_measured_balance(resolved, mesh, device, folder)
        config = resolved.config
    init_from = config.checkpoint.init_from
    model = build_model(resolved, mesh, device, initialise=resume_from is None and init_from is None)
    step = build_train_step(resolved, model, mesh, device)
    checkpointer = Checkpointer(config, model, step.optimizer, device)
    state = _load(config, checkpointer, resume_from)
    done = state["step"]
    if is_main:
        write_whole(folder / "config.toml", dump_config(config))
        _print_summary(resolved, device, len(rows), links)
        _print_start(config, resume_from, state)
    loader = make_loader(
        rows, config.data, training.global_batch_size, mesh.dp_index, resolved.layout.dp, first_step=done + 1
    )
    return Run(
        step=step,
        batches=iter(loader),
        lr=_lr_schedule(config),
        checkpointer=checkpointer,
        reporter=Reporter(
            folder,
            is_main=is_main,
            resume_step=done,
            last_step=training.steps,
            tensorboard=config.metrics.tensorboard,
            loss_spike=config.metrics.loss_spike,
        ),
        stop=stop,
        watchdog=watchdog,
        facts=_facts(resolved, device),
        device=device,
        done_steps=done,
        last_step=training.steps,
        log_interval=config.metrics.log_interval,
        save_interval=config.checkpoint.interval,
        validation=_validation(resolved, mesh, device),
        pipeline_record=PipelineRecord(step.micro_batches, config.metrics.pipeline_steps, folder / "plots", mesh),
        nonfinite=NonFiniteGuard(
            folder,
            place=mesh.place,
            parameter_names=list(model.named),
            limit=1 if training.nonfinite == "stop" else training.nonfinite_limit,
            n_skipped=state["skipped_steps"],
        ),
    )


def _connect(resolved: Resolved, device: torch.device, folder: Path, watchdog: Watchdog) -> tuple[Mesh, str]:
    """The mesh, watched from now on, and what its links have been measured at."""
    config, mesh = resolved.config, Mesh(resolved.layout, device.type)
    limits = {"job.step_timeout_s": config.job.step_timeout_s, "checkpoint.timeout_s": config.checkpoint.timeout_s}
    watchdog.watch(limits, folder / "logs", mesh.place)
    watchdog.begin("the check of the links", "job.step_timeout_s", factor=5)
    links = measure_links(mesh, device)
    watchdog.pause("building the model")
    return mesh, links


def _where_to_start(config: Config) -> tuple[Path | None, int]:
    """The checkpoint to go on from, intact and of this run, and its step; (None, 0) for a fresh start.

    With ``checkpoint.resume = "auto"`` a damaged one is passed over, with a warning, for the one before. Called by
    all ranks together. Raises ``UserError``.
    """
    damaged: list[Path] = []
    while True:
        resume_from = on_main_rank(choose_resume, config, damaged)
        if resume_from is None:
            if damaged:
                raise UserError(
                    f"every checkpoint of this run is damaged: to start over, move {damaged[0].parent} away"
                )
            return None, 0
        damage = damage_in(resume_from)
        if not damage:
            on_main_rank(check_same_run, resume_from, config)
            return resume_from, on_main_rank(read_state, resume_from)["step"]
        if config.checkpoint.resume != "auto":
            raise UserError(*damage)
        if dist.get_rank() == 0:
            print("\n".join(f"warning: {line}" for line in damage), file=sys.stderr)
            print(f"warning: {resume_from} is damaged and not used", file=sys.stderr, flush=True)
        damaged.append(resume_from)


def _load(config: Config, checkpointer: Checkpointer, resume_from: Path | None) -> dict:
    """Fill the state from where the run starts. Returns its ``trainer_state.json``, or that of step 0."""
    if resume_from is not None:
        return checkpointer.load(resume_from)
    if config.checkpoint.init_from is not None:
        checkpointer.load_weights(Path(config.checkpoint.init_from))
    elif config.model.hf_path is not None:
        checkpointer.origin = read_origin(config.model.hf_path)
    return {"step": 0, "skipped_steps": 0}


def _validation(resolved: Resolved, mesh: Mesh, device: torch.device) -> Validation | None:
    config = resolved.config
    rows = load_validation_rows(config, resolved.architecture.vocab_size)
    if rows is None:
        return None

    def batches():
        whole = batches_in_order(rows, config.training.global_batch_size, mesh.dp_index, resolved.layout.dp)
        for tokens, labels in itertools.islice(whole, config.validation.batches):
            yield tokens.to(device), labels.to(device)

    return Validation(config.validation.interval, batches)


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


def _print_start(config: Config, resume_from: Path | None, state: dict) -> None:
    weights = config.checkpoint.init_from or config.model.hf_path
    if resume_from is not None:
        print("\n".join([f"resuming    {resume_from}", *changed_since(state, config)]), flush=True)
    elif weights:
        print(f"weights     {weights}", flush=True)


def _print_summary(resolved: Resolved, device: torch.device, n_rows: int, links: str) -> None:
    config, layout, training = resolved.config, resolved.layout, resolved.config.training
    precision, n_processes = config.precision, layout.world_size
    stages = f", {config.parallel.schedule}, layers per stage {'+'.join(map(str, resolved.layers_per_stage))}"
    print(
        f"model       {config.model.hf_path or config.checkpoint.init_from or f'{config.model.family} {config.model.size}'}, {resolved.architecture.n_params:,} parameters\n"
        f"layout      {layout}{stages if layout.pp > 1 else ''}; {n_processes} process{'es' * (n_processes > 1)} on {_device_name(device)}\n"
        f"batch       {training.micro_batch_size} sequences x {resolved.n_microbatches} micro-batches x {layout.dp} data ranks "
        f"= {training.global_batch_size} of {training.seq_len} tokens: {resolved.tokens_per_step:,} tokens a step\n"
        f"data        {n_rows:,} rows, {n_rows / training.global_batch_size:.1f} steps an epoch\n"
        f"precision   parameters and optimizer {precision.param}, compute {precision.compute}, gradient reduction {precision.reduce}\n"
        f"output      {config.job.output_dir}"
    )
    if links:
        print(f"links       {links}")
    if precision.param == "bfloat16":
        print("warning     parameters in bfloat16: an update below 1/256 of a weight is lost (1.0 - 1e-4 == 1.0)")
    if config.lr_schedule.warmup_steps >= training.steps:
        print(f"warning     the run ends within the warm-up of {config.lr_schedule.warmup_steps} steps")
    if config.metrics.tensorboard:
        print(f"watch       tensorboard --logdir {Path(config.job.output_dir) / 'tensorboard'}")
    sys.stdout.flush()
