"""The ``wizard`` command: a few questions, a plan, and a config that trains. Every answer is a flag too."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.config_load import Override, load_config, toml_text
from trainer.config_rules import architecture_of, resolve_config
from trainer.data.tokenizer import load_tokenizer_for
from trainer.errors import UserError
from trainer.output_folder import write_whole
from trainer.wizard_answers import (
    DataAnswer,
    Goal,
    Hardware,
    ModelAnswer,
    methods,
    read_data,
    read_file,
    read_goal,
    read_hardware,
    read_method,
    read_model,
    read_yes,
)
from trainer.wizard_files import config_text, slurm_text

# Usual starts where no shipped config says better; the written config says so.
_LR = {"pretrain": 3e-4, "pretrain further": 5e-5, "sft": 2e-5, "lora": 2e-4}
_SIZES = {"cuda": {"seq_len": 2048, "global_batch_size": 64}, "cpu": {"seq_len": 128, "global_batch_size": 16}}
# Said in the config even where they are the default.
_ALWAYS = {
    "model.family", "model.size", "data.tokenizer", "training.method", "training.steps", "training.seq_len",
    "training.global_batch_size", "training.micro_batch_size", "optimizer.lr", "parallel.tp", "parallel.pp",
    "parallel.dp_shard", "activation_checkpoint.mode", "checkpoint.interval",
}  # fmt: skip
_SHOWN = 3  # layouts


class Asker:
    """Takes an answer from its flag, else from the terminal, or with --yes what is proposed."""

    def __init__(self, options: argparse.Namespace):
        self.options = options

    def __call__(self, name: str, question: str, proposed: str, read: Callable[[str], Any]):
        """Raises ``UserError`` for a wrong flag, and at the end of input; a wrong answer is asked again."""
        given = getattr(self.options, name)
        if given is not None:
            return _read(read, given, f"--{name} {given}: ")
        if self.options.yes:
            return _read(read, proposed, f"what is proposed for --{name}, {proposed}, does not do here: ")
        while True:
            try:
                answer = input(f"{question} [{proposed}]: ").strip() or proposed
            except EOFError:
                print()
                raise UserError(f"the input ended before --{name} was answered; --yes takes what is proposed") from None
            except UnicodeDecodeError:
                print("  that is not valid UTF-8")
                continue
            try:
                return _read(read, answer)
            except UserError as error:
                print("\n".join(f"  {problem}" for problem in error.problems))

    def is_free(self, name: str) -> bool:
        """Whether it can be asked again."""
        return getattr(self.options, name) is None and not self.options.yes


@dataclass(frozen=True)
class Answers:
    model: ModelAnswer
    data: DataAnswer
    tokenizer: str
    method: str
    hardware: Hardware
    goal: Goal


def main(options: argparse.Namespace, overrides: list[Override]) -> int:
    """Ask, plan, write, and start if that is wanted. Returns the exit code; raises ``UserError``."""
    ask = Asker(options)
    model = ask("model", "Model: a size, such as smollm2-135M, or a Hugging Face directory", "llama debug", read_model)
    print(f"  {model.name}: {model.architecture.n_params:,} parameters")
    data = ask("data", 'Data: a file, a pattern or a folder; or "bundled"', "bundled", read_data)
    print(f"  {data.text}")
    tokenizer = _ask_tokenizer(ask, model)
    proposed = "sft" if data.is_chat else "pretrain"
    method = ask("method", f"Method: {', '.join(methods())}", proposed, lambda text: read_method(text, data))
    goal = ask("goal", 'Goal: so many steps or tokens, such as "1000 steps" or "20B tokens"', "100 steps", read_goal)
    while True:
        hardware = ask("hardware", 'Hardware: "here", or NODES x GPUS KIND such as "4x8 h100"', "here", read_hardware)
        try:
            config, heading = _plan(Answers(model, data, tokenizer, method, hardware, goal), overrides)
            break
        except UserError as error:
            if not ask.is_free("hardware"):
                raise
            print("\n".join(f"  {problem}" for problem in error.problems))
    path = ask("out", "Name of the config to write", _free_name(model, method), read_file)
    command = _write(path, config, heading, hardware)
    print(f"start it with: {command}")
    if hardware.is_here and ask("start", "Start it now?", "no", read_yes):
        from trainer import launch

        return launch.main(["--config", str(path), "--nproc", str(hardware.cluster.gpus_per_node)])
    return 0


def _read(read: Callable[[str], Any], text: str, where: str = ""):
    try:
        return read(text)
    except UserError as error:
        raise UserError(*(where + problem for problem in error.problems)) from None
    except OSError as error:
        raise UserError(f"{where}{error}") from None


def _ask_tokenizer(ask: Asker, model: ModelAnswer) -> str:
    if ask.options.tokenizer is None and model.keys.get("model.hf_path") == model.tokenizer is not None:
        return model.tokenizer

    def read(text: str) -> str:
        name = os.path.abspath(text) if Path(text).exists() else text
        load_tokenizer_for(name, model.architecture.vocab_size)
        return name

    proposed = model.tokenizer or ("smollm2" if model.architecture.vocab_size >= 49_152 else "bytes")
    return ask("tokenizer", 'Tokenizer: "bytes", "smollm2", a tokenizer.json or its folder', proposed, read)


def _config_of(answers: Answers, overrides: list[Override]) -> Config:
    """The answers as a config on one process; ``overrides`` win. Raises ``UserError``."""
    model, tables = answers.model, answers.model.tables if answers.method == "pretrain" else {}
    sections = ("training", "optimizer", "lr_schedule", "precision", "checkpoint", "metrics")
    keys = {f"{name}.{key}": value for name in sections for key, value in tables.get(name, {}).items()}
    on_cpu = answers.hardware.cluster.gpu.name == "cpu"
    sizes = {f"training.{key}": value for key, value in _SIZES["cpu" if on_cpu else "cuda"].items()}
    keys = keys | sizes if on_cpu else sizes | keys
    further = answers.method == "pretrain" and "model.hf_path" in model.keys
    keys.setdefault("optimizer.lr", _LR["pretrain further" if further else answers.method])
    keys |= model.keys | answers.data.keys | {"data.tokenizer": answers.tokenizer, "training.micro_batch_size": 1}
    if answers.method != "pretrain":
        keys["training.method"] = answers.method
    asked = {override.key for override in overrides}
    flat = [Override(key, toml_text(value)) for key, value in keys.items() if key not in asked]
    config = load_config(None, [*flat, *overrides])
    if "training.steps" in asked:
        raise UserError("training.steps follows from --goal: leave one of them out")
    training = config.training
    steps = answers.goal.steps_of(training.global_batch_size * training.seq_len)
    scale = min(1.0, steps / training.steps) if "training.steps" in keys else 1.0
    schedule = config.lr_schedule
    update = {"warmup_steps": min(round(scale * schedule.warmup_steps), steps // 10)}
    if schedule.decay_steps is not None:
        update["decay_steps"] = max(1, min(round(scale * schedule.decay_steps), steps - update["warmup_steps"]))
    update = {key: value for key, value in update.items() if f"lr_schedule.{key}" not in asked}
    return config.model_copy(
        update={
            "training": training.model_copy(update={"steps": steps}),
            "lr_schedule": schedule.model_copy(update=update),
        }
    )


def _plan(answers: Answers, overrides: list[Override]) -> tuple[Config, list[str]]:
    """The config with the planner's first layout, shown with its reasons; and what the file is to say of it."""
    from trainer.auto_layout import with_keys
    from trainer.plan_report import keys_of, plan_text
    from trainer.planner import Planner, for_gpu

    config, cluster = _config_of(answers, overrides), answers.hardware.cluster
    architecture = architecture_of(config)
    print(f"  planning for {answers.hardware.shown} ...", flush=True)
    planner = Planner(for_gpu(config, cluster), architecture, cluster)
    plan = planner.search(_SHOWN)
    if not plan.best:
        raise UserError(plan_text(planner, plan))
    print("\n" + plan_text(planner, plan) + "\n")
    best = plan.best[0]
    config = with_keys(config, keys_of(best))
    resolve_config(config, cluster.n_nodes * cluster.gpus_per_node)
    steps, tokens = config.training.steps, config.training.global_batch_size * config.training.seq_len
    duration = _duration(steps * best.time.total_s)
    fact = (
        f"{steps:,} steps of {tokens:,} tokens, {steps * tokens:,} in all: about {duration} of training as predicted, "
        f"{best.time.total_s:.3g} s a step, {best.peak_bytes / 2**30:.1f} of {cluster.gpu.memory_bytes / 2**30:.1f} "
        f"GiB of memory"
    )
    print(fact)
    heading = [f"{answers.model.name} on {answers.hardware.shown}: written by python -m trainer wizard.", fact + "."]
    if not answers.model.tables or answers.method != "pretrain":
        heading.append("Learning rate, batch and sequence length are usual starts, not tuned for this model and data.")
    return config, heading


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _free_name(model: ModelAnswer, method: str) -> str:
    stem = model.name if method == "pretrain" else f"{model.name}-{method}"
    names = (f"{stem}{suffix}" for suffix in ["", *(f"-{n}" for n in range(2, 1000))])
    return next(
        f"{name}.toml" for name in names if not Path(f"{name}.toml").exists() and not Path(f"{name}.sh").exists()
    )


def _write(path: Path, config: Config, heading: list[str], hardware: Hardware) -> str:
    """Write the config, and for several nodes the script. Returns the command that starts the run."""
    job = config.job
    if job.output_dir == load_config(None).job.output_dir:  # not asked for: it follows the file's name
        job = job.model_copy(update={"output_dir": f"outputs/{path.stem}"})
    write_whole(path, config_text(config.model_copy(update={"job": job}), heading, _ALWAYS))
    print(f"written: {path}")
    cluster = hardware.cluster
    if cluster.n_nodes == 1:
        return f"./run_train.sh --config {path} --nproc {cluster.gpus_per_node}"
    script = path.with_suffix(".sh")
    write_whole(script, slurm_text(path, cluster.n_nodes, cluster.gpus_per_node))
    print(f"written: {script}")
    return f"sbatch {script} (with --partition and what else your cluster asks for: docs/slurm.md)"
