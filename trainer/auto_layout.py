"""``parallel.layout = "auto"``: the planner's first choice for the GPUs that are there, the same on every rank."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.build import compute_dtype
from trainer.config import ActivationCheckpoint, Config, Parallel
from trainer.config_load import dump_config
from trainer.errors import UserError
from trainer.hardware import machine_memory_bytes
from trainer.rank import on_main_rank

# What torchrun tells a rank; the planner is none.
_RANKS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def choose_layout(config: Config, device: torch.device) -> Config:
    """The config with the layout, micro-batch and recompute mode that ``plan`` puts first. Called by every rank.

    What the config says of them is not looked at. Raises ``UserError`` if nothing fits.
    """
    keys = on_main_rank(_plan, config, device)
    if dist.get_rank() == 0:
        shown = " ".join(f"--{key}={value}" for key, value in keys.items() if value is not None)
        print(f"planned     {shown}", flush=True)
    return with_keys(config, keys)


def without_layout(config: Config) -> Config:
    """The config on one process, for checks that need no layout."""
    training = config.training.model_copy(update={"micro_batch_size": 1})
    return config.model_copy(
        update={"parallel": Parallel(), "training": training, "activation_checkpoint": ActivationCheckpoint()}
    )


def with_keys(config: Config, keys: dict) -> Config:
    """The config with other values of some keys, by their dotted names, and its layout taken as it then is."""
    sections: dict[str, dict] = {"parallel": {"layout": "manual"}}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _plan(config: Config, device: torch.device) -> dict:
    """Keys of the first choice. Runs the ``plan`` command: this process is a rank, and cannot play another one."""
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if dist.get_world_size() % n_local:
        raise UserError(
            f'parallel.layout = "auto": {dist.get_world_size()} processes on machines of {n_local} are not alike'
        )
    with tempfile.TemporaryDirectory(prefix="meshloom-plan-") as folder:
        written = Path(folder) / "config.toml"
        manual = with_keys(config, {"precision.compute": compute_dtype(config, device.type)})
        written.write_text(dump_config(manual), encoding="utf-8")
        command = [
            sys.executable, "-m", "trainer", "plan", "--config", str(written), "--json", "--top", "1",
            "--gpu", str(_hardware(device, n_local, Path(folder))), "--nodes", str(dist.get_world_size() // n_local),
            "--gpus-per-node", str(n_local),
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in _RANKS_OWN}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    notes = [line for line in lines if line.startswith("note: ")]
    print("\n".join(notes), file=sys.stderr, end="\n" * bool(notes), flush=True)
    if done.returncode:
        raise UserError(*(line.removeprefix("error: ") for line in lines if line not in notes))
    return json.loads(done.stdout)["layouts"][0]["keys"]


def known_gpu(device_name: str) -> str | None:
    """What the planner's table calls a device of this name; None if it is not in it."""
    return next((known for known in ("b200", "h200", "h100", "a100") if known in device_name.lower()), None)


def _hardware(device: torch.device, n_local: int, folder: Path) -> str | Path:
    """--gpu for the device that is there: its name in the planner's table, with the memory that it has."""
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device).lower(), torch.cuda.mem_get_info(device)[1]
        base = known_gpu(name)
        if base is None:
            raise UserError(
                f'parallel.layout = "auto": the planner knows no {name}: run plan with --gpu FILE.toml and set the layout'
            )
    else:
        base, memory = "cpu", machine_memory_bytes() / n_local
    path = folder / "hardware.toml"
    path.write_text(f'base = "{base}"\n[gpu]\nmemory_bytes = {memory:.1f}\n', encoding="utf-8")
    return path
