"""TensorBoard on a real run's folder, opened in a real browser."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.dist.runs import run_config, run_training

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
LINE_RGB = (255, 112, 67)  # in which TensorBoard draws the first run


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read the folder."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port=0", "--load_fast=false"],
        text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        address = next(found[1] for line in process.stderr if (found := re.search(r"(http://\S+?)/? \(", line)))
        deadline = time.monotonic() + 60
        while not json.load(urllib.request.urlopen(f"{address}/data/plugin/scalars/tags")):
            assert time.monotonic() < deadline, "TensorBoard found no curve"
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def look(address: str, *, picture: Path | None = None) -> str:
    """Open a page without a window; its document as text, or a picture of it once its scripts are at rest."""
    what = "--dump-dom" if picture is None else f"--screenshot={picture}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,2600", "--virtual-time-budget=30000"]
    command = [CHROMIUM, *flags, what, address]
    return subprocess.run(command, text=True, capture_output=True, timeout=120, check=True).stdout


def n_pixels(picture: Path, rgb: tuple[int, int, int]) -> int:
    pixels = matplotlib.image.imread(picture)[..., :3] * 255
    return int((np.abs(pixels - np.array(rgb)).max(axis=-1) < 4).sum())


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_opens_on_its_charts(ranks, tmp_path):
    keys = dict(metrics__tensorboard=True, training__steps=8, parallel__pp=2, validation__interval=2, validation__batches=1)
    ranks(2, run_training, run_config(tmp_path, **keys))
    with tensorboard(tmp_path / "run/tensorboard") as address:
        tags = set(json.load(urllib.request.urlopen(f"{address}/data/plugin/scalars/tags"))["."])
        assert {"training/loss", "validation/loss", "throughput/tokens_per_s", "pipeline/bubble_fraction"} <= tags
        groups = json.load(urllib.request.urlopen(f"{address}/data/plugin/custom_scalars/layout"))["category"]
        charts = {group["title"]: [chart["title"] for chart in group["chart"]] for group in groups}
        assert list(charts) == ["training", "throughput", "memory", "pipeline"]
        # Of what never comes on such a run there is no empty chart.
        assert "MFU" not in charts["throughput"] and "validation loss by set" not in charts["training"]

        document = look(f"{address}/#timeseries")
        assert 'title="memory/peak_bytes"' in document and 'title="pipeline/bubble_fraction"' in document
        look(f"{address}/#custom_scalars", picture=tmp_path / "charts.png")
        empty = tmp_path / "empty.png"
        look(f"{address}/#hparams", picture=empty)
        assert n_pixels(tmp_path / "charts.png", LINE_RGB) > n_pixels(empty, LINE_RGB) + 2000  # lines, drawn
