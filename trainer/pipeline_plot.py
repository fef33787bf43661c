"""The ``pipeline-plot`` command: what pipeline ranks do over time, as predicted and as measured in a run."""

import argparse
from pathlib import Path

from parallelize.planner.hardware import cluster_of
from trainer.config import Config
from trainer.config_load import Override, load_config
from trainer.config_rules import architecture_of, layout_needs, resolve_config, schedule_for
from trainer.errors import UserError
from trainer.layout_rules import Choice
from trainer.pipeline_picture import Panel, draw_page, draw_png
from trainer.pipeline_record import read_record
from trainer.planner import Planner, for_gpu


def main(options: argparse.Namespace, overrides: list[Override]) -> int:
    """Write OUT.png and OUT.html. Exit code 0; raises ``UserError``."""
    run = None if options.measured is None else Path(options.measured)
    if run is not None and options.config is None:
        options.config = str(run / "config.toml")
    config = load_config(options.config, overrides)
    panels = [_predicted(config, options)]
    if run is not None:
        panels.append(_measured(config, run))
    for panel in panels:
        print(panel.title)
    out = Path(options.out)
    if out.suffix in (".png", ".html"):
        out = out.with_suffix("")
    draw_png(panels, out.with_name(out.name + ".png"))
    draw_page(panels, out.with_name(out.name + ".html"))
    print(f"written: {out}.png {out}.html")
    return 0


def _predicted(config: Config, options: argparse.Namespace) -> Panel:
    n_processes = layout_needs(config.parallel)
    try:
        cluster = cluster_of(options.gpu, -(-n_processes // 8), min(n_processes, 8))
    except ValueError as error:
        raise UserError(str(error)) from None
    config = for_gpu(config, cluster)
    resolved = resolve_config(config, n_processes)
    if resolved.layout.pp == 1:
        raise UserError("parallel.pp = 1: there is no pipeline to plot; use 2 or more")
    planner = Planner(config, architecture_of(config), cluster)
    choice = Choice(config, planner.architecture, resolved.layout, schedule_for(config.parallel))
    replay, send_s = planner.timeline(choice)
    calibration = cluster.calibration.label
    return Panel(
        f"predicted on {cluster.gpu.name}: {resolved.layout}, {config.parallel.schedule}, "
        f"{len(resolved.layers_per_stage)} stages, {choice.n_in_a_run} micro-batches: {replay.end_s:.3g} s, "
        f"{100 * replay.idle_share:.1f}% idle. Times: {calibration}",
        replay,
        send_s,
    )


def _measured(config: Config, run: Path) -> Panel:
    step, replay = read_record(run / "plots", config.parallel.pp)
    return Panel(
        f"measured in {run}, step {step}: {replay.end_s:.3g} s, {100 * replay.idle_share:.1f}% idle", replay, None
    )
