"""The ``plan`` command: predicts memory and time of layouts, picks, and explains."""

import argparse
import contextlib
import json
import os
import re
import sys
from pathlib import Path

from parallelize.planner.hardware import Cluster, cluster_of
from parallelize.schedules import schedule_of
from trainer.config import Config
from trainer.config_load import Override, dump_config, load_config
from trainer.config_rules import architecture_of, resolve_config
from trainer.data.tokenizer import load_tokenizer_for, tokenizer_file
from trainer.errors import UserError
from trainer.layout_rules import Choice
from trainer.output_folder import write_whole
from trainer.plan_measure import measure_machine, measured_step_s
from trainer.plan_report import as_dict, explain_text, measured_text, plan_text, plot, trace_text
from trainer.planner import SEARCHED, Planner, for_gpu
from trainer.traced_rank import trace_rank

# What --explain and --trace may name besides the keys of [parallel].
_OTHER_KEYS = {"micro_batch_size": "training.micro_batch_size", "recompute": "activation_checkpoint.mode"}


def main(options: argparse.Namespace, overrides: list[Override]) -> int:
    """Print the best layouts, or with --explain one. Exit code 0; raises ``UserError`` if no layout fits."""
    _check_flags(options)
    config = load_config(options.config, [*overrides, *_explained(options.explain or "")])
    cluster = _cluster(options)
    n_gpus = cluster.n_nodes * cluster.gpus_per_node
    if options.measure:
        return measure_machine(Path(options.measure), options.gpu, n_gpus)
    config = for_gpu(config, cluster)
    planner = Planner(config, architecture_of(config), cluster)
    _check_tokenizer(config, planner.architecture.vocab_size)
    if options.explain is not None:
        return _explain(options, planner)
    for line in [*_not_modelled(config), *_searched_anyway(overrides)]:
        print(f"note: {line}", file=sys.stderr)
    # What is printed between is for people.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        plan = planner.search(max(options.top, options.measure_top))
    if not plan.best:
        raise UserError(plan_text(planner, plan))
    if not options.json:
        print(plan_text(planner, plan), flush=True)
    measured = []
    for prediction in plan.best[: options.measure_top]:
        measured.append(measured_step_s(prediction.choice.config, n_gpus))
        if not options.json:
            print(measured_text(prediction, measured[-1]), flush=True)
    if options.json:
        print(json.dumps(as_dict(planner, plan) | {"measured_step_s": measured}, indent=1))
    _save(options, planner, plan.best[0])
    return 0


def _check_flags(options: argparse.Namespace) -> None:
    """Raises ``UserError`` for flags that do not go together, and for files that could not be written in the end."""
    given = [flag for flag in ("explain", "measure", "measure_top") if getattr(options, flag) not in (None, 0)]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1].replace('_', '-')} do not go together: give one of them")
    if options.trace and options.explain is None:
        raise UserError("--trace is of one layout: give --explain too")
    for flag in ("write", "plot", "measure"):
        if path := getattr(options, flag):
            parent = Path(path).resolve().parent
            if Path(path).is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
                raise UserError(f"--{flag}: {path} cannot be written: name a file in a folder that exists")


def _not_modelled(config: Config) -> list[str]:
    """What the config asks for, and no time or memory printed counts."""
    lines = []
    if config.compile.enabled:
        lines.append("compile.enabled = true: compiled blocks are predicted as if they were not")
    if config.float8.recipe != "none":
        lines.append(f'float8.recipe = "{config.float8.recipe}": matmuls are predicted as if they were not in float8')
    if config.compile.memory_budget < 1:
        lines.append("compile.memory_budget: what it saves and computes again is not counted")
    if config.data.isolate_documents:
        lines.append("data.isolate_documents = true: attention is counted as over whole rows")
    if config.parallel.balance == "measured":
        lines.append('parallel.balance = "measured" is predicted as "flops"')
    return lines


def _check_tokenizer(config: Config, vocab_size: int) -> None:
    """As ``train`` does, where the tokenizer is here: a plan may be made on another machine than the run's."""
    try:
        tokenizer_file(config.data.tokenizer)
    except UserError as error:
        print(f"note: {error}: not checked against model.vocab_size = {vocab_size}", file=sys.stderr)
    else:
        load_tokenizer_for(config.data.tokenizer, vocab_size)


def _searched_anyway(overrides: list[Override]) -> list[str]:
    keys = {f"parallel.{name}" for name in SEARCHED} | {"training.micro_batch_size", "activation_checkpoint.mode"}
    return [
        f"{override.shown} is not looked at: the search goes over {override.key}; use --explain for one layout"
        for override in overrides
        if override.key in keys
    ]


def _cluster(options: argparse.Namespace) -> Cluster:
    """What --gpu, --nodes and --gpus-per-node say. Raises ``UserError``, also for other numbers that cannot be."""
    for flag, least in (("nodes", 1), ("gpus_per_node", 1), ("top", 1), ("measure_top", 0)):
        if getattr(options, flag) < least:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: at least {least} is needed")
    if options.nodes > 1 and (options.measure or options.measure_top):
        raise UserError(
            f"--nodes {options.nodes}: only this one machine can be measured; for the links between machines, run --measure "
            "on each, with NNODES, NODE_RANK and MASTER_ADDR set as for ./run_train.sh"
        )
    if options.measure and options.gpu.endswith(".toml"):
        raise UserError(
            f"--gpu {options.gpu}: what is measured is written beside numbers of a GPU by name, such as h100"
        )
    try:
        return cluster_of(options.gpu, options.nodes, options.gpus_per_node)
    except ValueError as error:
        raise UserError(str(error)) from None


def _explain(options: argparse.Namespace, planner: Planner) -> int:
    choice = _choice(planner)
    prediction = planner.predict(choice)
    for line in _not_modelled(planner.config):
        print(f"note: {line}", file=sys.stderr)
    if not options.json:
        print(explain_text(planner, prediction))
    traced_peaks = []
    if options.trace:
        resolved = resolve_config(choice.config, choice.layout.world_size)
        for rank in range(choice.layout.pp):
            traced = trace_rank(resolved, rank)
            traced_peaks.append(traced.peak_bytes)
            if not options.json:
                print(trace_text(rank, prediction.memory[rank], traced), flush=True)
    if options.json:
        print(json.dumps(as_dict(planner, None, prediction) | {"traced_peak_bytes": traced_peaks}, indent=1))
    _save(options, planner, prediction)
    return 0


def _explained(text: str) -> list[Override]:
    """``tp=8,pp=4,recompute=full`` as overrides. Raises ``UserError``."""
    overrides, seen = [], set()
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):  # a list has its own
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UserError(
                f"--explain {text}: {part!r} is not KEY=VALUE, such as tp=8,pp=4,micro_batch_size=1,recompute=full"
            )
        if key in seen:
            raise UserError(f"--explain {text}: {key} is given twice")
        seen.add(key)
        overrides.append(Override(_OTHER_KEYS.get(key, f"parallel.{key}"), value))
    return overrides


def _choice(planner: Planner) -> Choice:
    """The config's own layout. Raises ``UserError`` with every problem."""
    config = planner.config
    n_gpus = planner.cluster.n_nodes * planner.cluster.gpus_per_node
    resolved = resolve_config(config, n_gpus, "--nodes x --gpus-per-node of {}")
    return Choice(config, planner.architecture, resolved.layout, schedule_of(config.parallel.schedule))


def _save(options: argparse.Namespace, planner: Planner, prediction) -> None:
    if options.write:
        head = f"# Chosen by plan for {planner.cluster.n_nodes} nodes of {planner.cluster.gpus_per_node} x {options.gpu}.\n"
        write_whole(Path(options.write), head + dump_config(prediction.choice.config))
        print(f"written: {options.write}", file=sys.stderr)
    if options.plot:
        plot(planner, prediction, Path(options.plot))
        print(f"written: {options.plot}", file=sys.stderr)
