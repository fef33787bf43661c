"""The ``train`` command: what one rank does from a checked config to the end of the run."""

import functools
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.mesh import Mesh
from trainer.adapters import base_of, check_base
from trainer.auto_layout import choose_layout
from trainer.build import build_model, build_train_step, compute_dtype, flops_per_token
from trainer.checkpoint import Checkpointer
from trainer.checkpoint_files import damage_in
from trainer.checkpoint_folder import changed_since, check_same_run, choose_resume, read_state, set_aside
from trainer.config import Config, Debug
from trainer.config_load import dump_config
from trainer.config_rules import Resolved, resolve_config
from trainer.console import say
from trainer.data.loader import batches_in_order, checked, make_loader
from trainer.data.rows import Rows
from trainer.data.samples import Samples, load_samples, load_validation_rows
from trainer.errors import EXIT_STOPPED, UserError
from trainer.explain import is_out_of_memory
from trainer.garbage import Garbage
from trainer.hardware import peak_flops
from trainer.hf_directory import read_origin
from trainer.hf_export import export_run
from trainer.instruments import Instruments
from trainer.loop import Run, RunFacts, Validation, train
from trainer.lr_schedule import LrSchedule
from trainer.manifest import shared_manifest
from trainer.measured_balance import with_measured_balance
from trainer.memory_report import memory_report, start_history, write_snapshot
from trainer.metrics import Reporter
from trainer.nonfinite import NonFiniteGuard
from trainer.output_folder import open_output_folder, write_whole
from trainer.pipeline_record import PipelineRecord
from trainer.places import places_of
from trainer.preflight import check_machines, measure_links
from trainer.profiler import Profiler
from trainer.rank import on_main_rank, run_rank
from trainer.rank_log import LOG, close_rank_log, open_rank_log
from trainer.signals import StopRequest
from trainer.step import TrainStep
from trainer.summary import device_name, stage_lines, summary
from trainer.tuning import is_lora
from trainer.watchdog import Watchdog


def main(config: Config, stop: StopRequest) -> int:
    """Train as one rank of the job. Returns the exit code."""

    def work(device: torch.device, watchdog: Watchdog) -> int:
        stop.listen()
        _switch_on(config.debug, device)
        if not _train(config, device, stop, watchdog):
            return EXIT_STOPPED
        if config.checkpoint.export_dir is not None and dist.get_rank() == 0:  # the others leave: nobody waits
            export_run(config)
        return 0

    # Torch's own limit on a collective comes after ours, which knows more.
    return run_rank(work, timeout_s=max(1800, 2 * config.job.step_timeout_s))


def _switch_on(debug: Debug, device: torch.device) -> None:
    """What torch itself offers for finding faults."""
    if debug.determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    if debug.anomaly:
        torch.autograd.set_detect_anomaly(True)
    if debug.memory_history and device.type == "cuda":
        start_history()


def _train(config: Config, device: torch.device, stop: StopRequest, watchdog: Watchdog) -> bool:
    """Returns whether the run has reached its last step."""
    if config.parallel.layout == "auto":
        config = choose_layout(config, device)
    resolved = resolve_config(config, dist.get_world_size())
    torch.manual_seed(config.job.seed)  # nothing draws from it yet but what a user adds
    check_machines(config, resolved.layout)
    samples = load_samples(config, resolved.architecture.vocab_size)
    if config.data.epochs:
        resolved = resolve_config(_until_data_ends(config, samples), dist.get_world_size())
    config = resolved.full_config(compute_dtype(config, device.type))
    resolved = replace(resolved, config=config)
    folder, steps = Path(config.job.output_dir), config.training.steps
    with open_output_folder(folder):
        resume_from, done_steps = _where_to_start(config, samples)
        if done_steps >= steps:
            if dist.get_rank() == 0:
                print(
                    f"{resume_from} is already at step {done_steps} of {steps}: nothing to do. To go on, raise "
                    "training.steps; for another run, choose another job.output_dir"
                )
            return True
        run = _prepare(resolved, samples, resume_from, device, stop, watchdog)
        finished = False
        try:
            finished = train(run)
        except Exception as error:
            if is_out_of_memory(error):
                _say_out_of_memory(run, watchdog, folder)
            LOG.error("ended: %s", error)
            raise
        finally:
            run.reporter.close(finished)
            run.garbage.close()
            close_rank_log()
    return finished


def _until_data_ends(config: Config, samples: Samples) -> Config:
    """With ``training.steps`` lowered to what ``data.epochs`` allows; rows that do not fill a last batch are left."""
    training, epochs = config.training, config.data.epochs
    batch = training.global_batch_size
    steps = samples.samples_in(epochs, training.steps * batch) // batch
    if not steps:
        raise UserError(
            f"data.epochs = {epochs} ends before the first step: {samples.n_rows:,} rows of training.seq_len = {training.seq_len} "
            f"do not fill training.global_batch_size = {batch}: use more data or epochs, or a smaller batch"
        )
    if steps < training.steps and dist.get_rank() == 0:
        say(f"data        ends after step {steps:,} of {training.steps:,} (data.epochs = {epochs})")
    return config.model_copy(update={"training": training.model_copy(update={"steps": steps})})


def _prepare(
    resolved: Resolved,
    samples: Samples,
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
    is_fresh = resume_from is None and config.checkpoint.init_from is None
    model = build_model(resolved, mesh, device, initialise=is_fresh or is_lora(config))
    step = build_train_step(resolved, model, mesh, device)
    checkpointer = Checkpointer(config, model, step.optimizer, device, samples.identity)
    state = _load(config, checkpointer, resume_from)
    done, stages = state["step"], stage_lines(resolved, model)
    if config.metrics.rank_logs:
        open_rank_log(folder / "logs", dist.get_rank(), mesh.place, device)
    if is_main:
        write_whole(folder / "config.toml", dump_config(config))
        say(summary(resolved, device_name(device), samples, links, stages))
        _print_start(config, resume_from, state)
    loader = make_loader(
        samples, config.data, training.global_batch_size, mesh.dp_index, resolved.layout.dp, first_step=done + 1
    )
    facts = _facts(resolved, device)
    return Run(
        step=step,
        batches=checked(iter(loader), samples),
        lr=_lr_schedule(config),
        checkpointer=checkpointer,
        reporter=Reporter(
            folder, places_of(config, facts.peak_flops is not None, done) if is_main else (), config.metrics.loss_spike
        ),
        stop=stop,
        watchdog=watchdog,
        facts=facts,
        tokens_by_source=lambda step: samples.tokens_by_source(step * training.global_batch_size),
        device=device,
        done_steps=done,
        last_step=training.steps,
        log_interval=config.metrics.log_interval,
        saves=config.checkpoint.enabled,
        save_interval=config.checkpoint.interval,
        validation=_validation(resolved, mesh, device),
        instruments=_instruments(config, step, mesh, device),
        garbage=Garbage(config.job.gc_interval),
        nonfinite=NonFiniteGuard(
            folder,
            place=mesh.place,
            parameter_names=list(model.trained),
            limit=1 if training.nonfinite == "stop" else training.nonfinite_limit,
            n_skipped=state["skipped_steps"],
            in_a_row=state["nonfinite_in_a_row"] or 0,
        ),
    )


def _instruments(config: Config, step: TrainStep, mesh: Mesh, device: torch.device) -> Instruments:
    folder, metrics, debug = Path(config.job.output_dir), config.metrics, config.debug
    return Instruments(
        PipelineRecord(step.micro_batches, metrics.pipeline_steps, folder / "plots", mesh),
        Profiler(
            debug.profile_steps, debug.profile_ranks, metrics.straggler_interval, folder / "profile", mesh.place, device
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


def _where_to_start(config: Config, samples: Samples) -> tuple[Path | None, int]:
    """The checkpoint to go on from, intact and of this run, and its step; (None, 0) for a fresh start.

    A damaged one that was not asked for by name is passed over, with a warning, for the one before, and set aside.
    Called by all ranks together. Raises ``UserError``.
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
            on_main_rank(check_same_run, resume_from, config, samples.identity)
            on_main_rank(_set_aside, damaged)
            return resume_from, on_main_rank(read_state, resume_from)["step"]
        if config.checkpoint.resume != "auto" and Path(config.checkpoint.resume).resolve() == resume_from.resolve():
            raise UserError(*damage)
        if dist.get_rank() == 0:
            print("\n".join(f"warning: {line}" for line in damage), file=sys.stderr)
            print(f"warning: {resume_from} is damaged and not used", file=sys.stderr, flush=True)
        damaged.append(resume_from)


def _set_aside(damaged: list[Path]) -> None:
    for folder in damaged:
        try:
            print(f"warning: {folder} is now {set_aside(folder)}", file=sys.stderr, flush=True)
        except OSError as error:
            raise UserError(f"{folder} is damaged, and cannot be moved out of the way: {error}") from None


def _load(config: Config, checkpointer: Checkpointer, resume_from: Path | None) -> dict:
    """Fill the state from where the run starts. Returns its ``trainer_state.json``, or that of step 0."""
    init_from = config.checkpoint.init_from
    if is_lora(config):  # whose checkpoints are beside the base, and never of it
        checkpointer.base = base_of(config, shared_manifest)
        if resume_from is not None:
            on_main_rank(check_base, resume_from, read_state(resume_from), checkpointer.base)
        if init_from is not None:
            checkpointer.load_weights(Path(init_from))
    if resume_from is not None:
        return checkpointer.load(resume_from)
    if init_from is not None:
        if not is_lora(config):
            checkpointer.load_weights(Path(init_from))
    elif config.model.hf_path is not None:
        checkpointer.origin = read_origin(config.model.hf_path)
    return {"step": 0, "skipped_steps": 0, "nonfinite_in_a_row": 0}


def _validation(resolved: Resolved, mesh: Mesh, device: torch.device) -> Validation | None:
    config = resolved.config
    if not config.validation.interval:
        return None
    sets = load_validation_rows(config, resolved.architecture.vocab_size)

    def batches(rows: Rows):
        whole = batches_in_order(rows, config.training.global_batch_size, mesh.dp_index, resolved.layout.dp)
        for batch in itertools.islice(whole, config.validation.batches):
            yield tuple(tensor.to(device) for tensor in batch)

    return Validation(
        config.validation.interval, {name: functools.partial(batches, rows) for name, rows in sets.items()}
    )


def _say_out_of_memory(run: Run, watchdog: Watchdog, folder: Path) -> None:
    report = memory_report(run.step.model.named, run.step.optimizer, run.device, watchdog.doing)
    print("".join(f"[{watchdog.place}] {line}\n" for line in report.splitlines()), file=sys.stderr, flush=True)
    LOG.error(report)
    if run.device.type == "cuda":
        write_snapshot(folder / "profile" / f"out-of-memory-rank-{dist.get_rank()}.pickle")


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


def _facts(resolved: Resolved, device: torch.device) -> RunFacts:
    config = resolved.config
    return RunFacts(
        tokens_per_step=resolved.tokens_per_step,
        flops_per_token=flops_per_token(config, resolved.architecture),
        layout=resolved.layout,
        peak_flops=peak_flops(device_name(device), compute_dtype(config, device.type)),
    )


def _print_start(config: Config, resume_from: Path | None, state: dict) -> None:
    weights = config.checkpoint.init_from or config.model.hf_path
    if resume_from is not None:
        say("\n".join([f"resuming    {resume_from}", *changed_since(state, config)]))
    elif weights:
        say(f"weights     {weights}")
