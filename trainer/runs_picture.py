"""Drawing the curves of runs over each other."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import UserError

# Matplotlib's own font has no Chinese: the first of these that is installed is asked for what it lacks.
_CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "SimHei",
)
_LOOKS = ({"linewidth": 2.6, "color": "#8ab6e8"}, {"linewidth": 1.1, "color": "#b03a2e", "linestyle": "--"})


def draw(
    names: Sequence[str], panels: dict[str, Sequence[dict[int, float]]], mark: int | None, mark_name: str, path: Path
) -> None:
    """A PNG with one panel a title, and in it a curve (step -> number) a run. Panels without numbers are left out.

    The first run is a broad line below the second's thin one, so that equal curves are both seen. mark: a step to
    point out. Raises ``UserError``.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("a picture needs matplotlib: pip install -e '.[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import font_manager, pyplot

    panels = {title: curves for title, curves in panels.items() if any(curves)}
    if not panels:
        raise UserError("there is nothing to draw: no record of these runs holds a number")
    installed = {*font_manager.get_font_names()}
    fonts = ["DejaVu Sans", *(name for name in _CHINESE_FONTS if name in installed)]
    # parse_math: a name may have dollars in it
    with matplotlib.rc_context({"font.family": fonts, "text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # shown as a box
        try:
            _figure(pyplot, names, panels, mark, mark_name).savefig(path, dpi=120, format="png")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error}") from None
        except (ValueError, ArithmeticError) as error:  # numbers at the end of what floating point can hold
            raise UserError(f"the curves cannot be drawn: {error}") from None
        finally:
            pyplot.close("all")


def _figure(pyplot, names: Sequence[str], panels: dict, mark: int | None, mark_name: str):
    figure, axes = pyplot.subplots(
        len(panels), figsize=(11, 1 + 3 * len(panels)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (title, curves) in zip(axes[:, 0], panels.items()):
        for name, curve, looks in zip(names, curves, _LOOKS):
            marker = "o" if len(curve) < 40 else None  # a few points, or one, make no line to see
            axis.plot(list(curve), list(curve.values()), label=name, marker=marker, markersize=4, **looks)
        if mark is not None:
            axis.axvline(mark, color="grey", linestyle=":", linewidth=1, label=f"{mark_name}: step {mark}")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=9)
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    return figure
