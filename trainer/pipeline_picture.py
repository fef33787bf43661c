"""Drawing what pipeline ranks do over time: a PNG, and a page that zooms."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelize.planner.replay import Replay
from trainer.errors import UserError
from trainer.output_folder import write_whole

_KINDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
# A hue for each of a rank's stages, in turn; a shade for each kind.
_HUES = (0.60, 0.08, 0.36, 0.83)  # blue, orange, green, purple: by the rank's first, second, ... stage
_SHADES = {"F": (0.45, 0.95), "B": (0.75, 0.75), "I": (0.60, 0.85), "W": (0.95, 0.55)}  # saturation, value


@dataclass(frozen=True)
class Panel:
    """One timeline. send_s: seconds of what leaves an action for another rank; None: not known."""

    title: str
    replay: Replay
    send_s: float | None


def draw_png(panels: Sequence[Panel], path: Path) -> None:
    """One panel above the other, on the same scale of time. Raises ``UserError``."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("a picture needs matplotlib: pip install -e '.[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    n_ranks = len(panels[0].replay.spans)
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(16, len(panels) * (1.4 + 0.45 * n_ranks)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    end = max(panel.replay.end_s for panel in panels)
    for axis, panel in zip(axes[:, 0], panels):
        for span in _spans(panel):
            axis.broken_barh(
                [(span["start"], span["end"] - span["start"])], (span["rank"] + span["low"], span["height"]),
                facecolor=span["colour"], edgecolor="white", linewidth=0.3,
            )  # fmt: skip
            if span["kind"] != "P" and span["end"] - span["start"] > end / 90:
                middle = (span["start"] + span["end"]) / 2
                axis.text(middle, span["rank"], span["mb"], ha="center", va="center", fontsize=7)
        axis.set_ylim(n_ranks - 0.5, -0.5)
        axis.set_yticks(range(n_ranks), [f"rank {rank}" for rank in range(n_ranks)])
        axis.set_title(panel.title, loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("seconds")
    axes[-1, 0].set_xlim(0, end)
    entries = [Patch(color=colour, label=name) for name, colour in _legend(panels)]
    figure.legend(handles=entries, loc="outside lower center", ncols=min(6, len(entries)), fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def draw_page(panels: Sequence[Panel], path: Path) -> None:
    """One file that any browser shows: the wheel zooms, dragging moves, pointing tells. Raises ``UserError``."""
    data = [{"title": panel.title, "ranks": len(panel.replay.spans), "spans": _spans(panel)} for panel in panels]
    page = (Path(__file__).parent / "pipeline_page.html").read_text(encoding="utf-8")
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in _legend(panels)
    )
    end = max(panel.replay.end_s for panel in panels)
    facts = json.dumps({"panels": data, "end": end}).replace("</", "<\\/")
    write_whole(path, page.replace("__LEGEND__", legend).replace("__DATA__", facts))


def _spans(panel: Panel) -> list[dict]:
    """Boxes: rank, start, end, where in the rank's row, colour, and what to say of them."""
    owner = {action.stage: rank for rank, spans in enumerate(panel.replay.spans) for action, _, _ in spans}
    boxes = []
    for rank, spans in enumerate(panel.replay.spans):
        local = {stage: index for index, stage in enumerate(sorted({action.stage for action, _, _ in spans}))}
        for action, start, end in spans:
            says = f"{_KINDS[action.kind]}, stage {action.stage}, micro-batch {action.microbatch}"
            box = {"rank": rank, "start": start, "end": end, "kind": action.kind, "mb": action.microbatch}
            boxes.append(
                {**box, "low": -0.4, "height": 0.7, "colour": _colour(local[action.stage], action.kind), "says": says}
            )
            to = action.stage + 1 if action.kind == "F" else action.stage - 1
            if panel.send_s and action.kind != "W" and to in owner and owner[to] != rank:
                sent = {"end": end + panel.send_s, "start": end, "kind": "P", "colour": "#888888"}
                boxes.append({**box, **sent, "low": 0.32, "height": 0.1, "says": f"sent to stage {to}"})
    return boxes


def _colour(local_stage: int, kind: str) -> str:
    from colorsys import hsv_to_rgb

    rgb = hsv_to_rgb(_HUES[local_stage % len(_HUES)], *_SHADES[kind])
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _legend(panels: Sequence[Panel]) -> list[tuple[str, str]]:
    actions = {action for panel in panels for spans in panel.replay.spans for action, _, _ in spans}
    n_local = max(len({action.stage for action, _, _ in spans}) for spans in panels[0].replay.spans)
    entries = []
    for local in range(min(n_local, len(_HUES))):
        which = f", stage {local + 1} of a rank" if n_local > 1 else ""
        kinds = [kind for kind in _KINDS if any(action.kind == kind for action in actions)]
        entries += [(_KINDS[kind] + which, _colour(local, kind)) for kind in kinds]
    return [*entries, ("sending", "#888888")] if any(panel.send_s for panel in panels) else entries
