"""``pipeline-plot``: a picture, and a page with every action on it."""

import json
import re
import sys

import pytest

from parallelize.planner.replay import Replay, action_orders
from parallelize.schedule_file import Action
from parallelize.schedules import schedule_of
from trainer.__main__ import main
from trainer.pipeline_picture import Panel, draw_page

SMALL = ("--model.n_layers=4", "--training.global_batch_size=8", "--training.micro_batch_size=1", "--parallel.pp=2")


def pipeline_plot(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["trainer", "pipeline-plot", "--gpu=cpu", *arguments])
    code = main()
    return code, *capsys.readouterr()


def spans_of(page: str) -> list[list[dict]]:
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1]
    return [panel["spans"] for panel in json.loads(data)["panels"]]


@pytest.mark.parametrize("schedule, virtual_stages", [("1F1B", 1), ("ZBVZeroBubble", 2)])
def test_every_action_is_on_the_page(monkeypatch, capsys, tmp_path, schedule, virtual_stages):
    out = tmp_path / "plot.v1"  # a name with a dot keeps it
    code, text, _ = pipeline_plot(
        monkeypatch, capsys, *SMALL, f"--parallel.schedule={schedule}", f"--parallel.virtual_stages={virtual_stages}",
        "--out", str(out),
    )  # fmt: skip
    assert code == 0 and "% idle" in text and "uncalibrated" in text
    assert (tmp_path / "plot.v1.png").read_bytes().startswith(b"\x89PNG")
    (spans,) = spans_of((tmp_path / "plot.v1.html").read_text())
    actions = [(span["rank"], span["kind"], span["mb"]) for span in spans if span["kind"] != "P"]
    listed = action_orders(schedule_of(schedule), 2, virtual_stages, 8)
    assert actions == [(rank, a.kind, a.microbatch) for rank, of_rank in enumerate(listed) for a in of_rank]
    n_sent = sum(span["kind"] == "P" for span in spans)
    assert n_sent == 2 * 8 if schedule == "1F1B" else n_sent > 0


def test_a_measured_step_stands_below(monkeypatch, capsys, tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "config.toml").write_text("[parallel]\npp = 2\n")
    actions = {
        0: [[0, "F", 0, 100.0, 101.0], [0, "B", 0, 103.0, 104.0]],
        1: [[1, "F", 0, 101.0, 102.0], [1, "B", 0, 102.0, 103.0]],
    }
    for rank, of_rank in actions.items():
        (tmp_path / "plots" / f"pipeline-00000007-rank-{rank}.json").write_text(json.dumps(of_rank))
    (tmp_path / "plots" / "pipeline-00000009-rank-0.json").write_text("[]")  # the other rank has not got so far
    code, text, error = pipeline_plot(monkeypatch, capsys, "--measured", str(tmp_path), "--out", str(tmp_path / "m"))
    assert code == 0, error
    assert "step 7: 4 s, 50.0% idle" in text
    predicted, measured = spans_of((tmp_path / "m.html").read_text())
    assert [(span["start"], span["end"]) for span in measured] == [(0, 1), (3, 4), (1, 2), (2, 3)]

    (tmp_path / "plots" / "pipeline-00000007-rank-1.json").write_text('[["x"]]')
    code, _, error = pipeline_plot(monkeypatch, capsys, "--measured", str(tmp_path), "--out", str(tmp_path / "m"))
    assert code == 2 and "step 7" in error and "cannot be read" in error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--parallel.pp=1",), "parallel.pp = 1: there is no pipeline"),
        ((*SMALL, "--gpu", "h900"), "h900"),
        ((*SMALL, "--out", "/none/plot"), "/none/plot.png cannot be written"),
        ((*SMALL, "--measured", "/none"), "/none"),
        (("--config", "debug", *SMALL, "--measured", "/none"), "--metrics.pipeline_steps"),
        (("--parallel.pp=7",), "parallel.pp"),
    ],
)
def test_wrong_input(monkeypatch, capsys, arguments, message):
    code, _, error = pipeline_plot(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in error


def test_idle_share_and_a_title_that_looks_like_html(tmp_path):
    replay = Replay((((Action(0, "F", 0), 0.0, 1.0),), ((Action(1, "F", 0), 1.0, 3.0),)))
    assert replay.idle_share == pytest.approx(0.5)
    draw_page([Panel("</script><b>", replay, None)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "</script><b>" not in page and len(spans_of(page)[0]) == 2
