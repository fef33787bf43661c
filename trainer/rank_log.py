"""A log file of each rank: what it is, what it did, what it was warned of, with the time, its rank and its stage."""

import logging
import os
import platform
import socket
import sys
from pathlib import Path

import torch

LOG = logging.getLogger("meshloom")
LOG.setLevel(logging.INFO)
LOG.propagate = False  # the console is rank 0's, and says other things


def open_rank_log(folder: Path, rank: int, place: str, device: torch.device) -> None:
    """Let ``LOG`` write to ``folder``/rank-RANK.log, after what earlier starts wrote. Where it cannot, the run goes on."""
    close_rank_log()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"rank-{rank:05d}.log", encoding="utf-8")
    except OSError as error:
        print(f"warning: no log file of rank {rank}: {error}", file=sys.stderr, flush=True)
        return
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {place}: %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    handler.handleError = lambda record: None  # a full disk is the checkpoint's to report
    for name in ("meshloom", "py.warnings"):
        logging.getLogger(name).addHandler(handler)
    logging.captureWarnings(rank != 0)  # Python's warnings: rank 0 says them for all
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    LOG.info(
        "started: host %s, process %d, %s, torch %s, Python %s",
        socket.gethostname(), os.getpid(), name, torch.__version__, platform.python_version(),
    )  # fmt: skip


def close_rank_log() -> None:
    logging.captureWarnings(False)
    for name in ("meshloom", "py.warnings"):
        logger = logging.getLogger(name)
        for handler in logger.handlers[:]:
            handler.close()
            logger.removeHandler(handler)
