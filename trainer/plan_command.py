"""The ``plan`` command: predicts memory and time of layouts, picks, and explains."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from parallelize.planner.hardware import cluster_of
from parallelize.schedules import schedule_of
from trainer.config_load import Override, dump_config, load_config
from trainer.config_rules import architecture_of, resolve_config
from trainer.errors import UserError
from trainer.layout_rules import Choice
from trainer.output_folder import write_whole
from trainer.plan_report import as_dict, explain_text, plan_text, plot, trace_text
from trainer.planner import Planner
from trainer.traced_rank import trace_rank

# What --explain and --trace may name besides the keys of [parallel].
_OTHER_KEYS = {"micro_batch_size": "training.micro_batch_size", "recompute": "activation_checkpoint.mode"}


def main(options: argparse.Namespace, overrides: list[Override]) -> int:
    """Print the best layouts, or with --explain one. Exit code 0; raises ``UserError`` if no layout fits."""
    config = load_config(options.config, [*overrides, *_explained(options.explain or "")])
    if config.precision.compute == "auto":  # planned for a GPU, wherever this runs
        config = config.model_copy(update={"precision": config.precision.model_copy(update={"compute": "bfloat16"})})
    for flag in ("nodes", "gpus_per_node", "top"):
        if getattr(options, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: at least 1 is needed")
    try:
        cluster = cluster_of(options.gpu, options.nodes, options.gpus_per_node)
    except ValueError as error:
        raise UserError(str(error)) from None
    planner = Planner(config, architecture_of(config), cluster)
    if options.explain is not None:
        return _explain(options, planner)
    # What is printed between is for people.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        plan = planner.search(options.top)
    if not plan.best:
        raise UserError(plan_text(planner, plan))
    if options.json:
        print(json.dumps(as_dict(planner, plan), indent=1))
    else:
        print(plan_text(planner, plan))
    _save(options, planner, plan.best[0])
    return 0


def _explain(options: argparse.Namespace, planner: Planner) -> int:
    choice = _choice(planner)
    prediction = planner.predict(choice)
    if options.json:
        print(json.dumps(as_dict(planner, None, prediction), indent=1))
    else:
        print(explain_text(planner, prediction))
    if options.trace:
        resolved = resolve_config(choice.config, choice.layout.world_size)
        for rank in range(choice.layout.pp):
            print(trace_text(rank, prediction.memory[rank], trace_rank(resolved, rank)), flush=True)
    _save(options, planner, prediction)
    return 0


def _explained(text: str) -> list[Override]:
    """``tp=8,pp=4,recompute=full`` as overrides. Raises ``UserError``."""
    overrides = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UserError(
                f"--explain {text}: {part!r} is not KEY=VALUE, such as tp=8,pp=4,micro_batch_size=1,recompute=full"
            )
        overrides.append(Override(_OTHER_KEYS.get(key, f"parallel.{key}"), value))
    return overrides


def _choice(planner: Planner) -> Choice:
    """The config's own layout. Raises ``UserError`` with every problem."""
    config = planner.config
    n_gpus = planner.cluster.n_nodes * planner.cluster.gpus_per_node
    resolved = resolve_config(config, n_gpus)
    return Choice(config, planner.architecture, resolved.layout, schedule_of(config.parallel.schedule))


def _save(options: argparse.Namespace, planner: Planner, prediction) -> None:
    if options.write:
        head = f"# Chosen by plan for {planner.cluster.n_nodes} nodes of {planner.cluster.gpus_per_node} x {options.gpu}.\n"
        write_whole(Path(options.write), head + dump_config(prediction.choice.config))
        print(f"written: {options.write}", file=sys.stderr)
    if options.plot:
        plot(planner, prediction, Path(options.plot))
        print(f"written: {options.plot}", file=sys.stderr)
