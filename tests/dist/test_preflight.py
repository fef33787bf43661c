"""What is checked before a run: machines that agree, links that work."""

import os
import re
import socket

import pytest
import torch.distributed as dist

from tests.dist.parity import CPU
from tests.dist.pool import mesh_of
from tests.dist.runs import run_config, run_training
from tests.dist.test_command import SMALL, run
from tests.tiny import tiny_config
from trainer import preflight
from trainer.config_rules import resolve_config
from trainer.errors import UserError


def refusal(config, ranks_a_machine: int = 8, other: str = "") -> str:
    """What this rank is told where machines have so many ranks, and the last rank has an ``other`` something."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    os.environ["GROUP_RANK"] = str(dist.get_rank() // ranks_a_machine)
    layout = resolve_config(config, dist.get_world_size()).layout
    packages = preflight._PACKAGES
    if is_last and other == "config":
        config = config.model_copy(update={"job": config.job.model_copy(update={"seed": 5})})
    if is_last and other == "code":
        preflight._PACKAGES = packages[:2]
    try:
        preflight.check_machines(config, layout)
        return ""
    except UserError as error:
        return error.message()
    finally:
        preflight._PACKAGES = packages
        del os.environ["GROUP_RANK"]


@pytest.mark.parametrize("other, said", [("config", "the config differs"), ("code", "the code of Meshloom differs")])
def test_machines_that_start_something_else_are_told(ranks, tmp_path, other, said):
    for message in ranks(2, refusal, tiny_config(), 1, other):
        assert message.startswith(f"error: {said} between machines: rank 1 (") and message.count("\n") == 0
    assert ranks(2, refusal, tiny_config(), 1) == ["", ""]


def test_a_tensor_parallel_group_stays_on_one_machine_unless_asked(ranks):
    across = tiny_config(parallel__tp=4, model__n_kv_heads=4)
    for message in ranks(4, refusal, across, 2):
        assert "parallel.tp = 4, but ranks 0 to 3 are on several machines, of 2 processes" in message
        assert "parallel.tp_across_nodes = true" in message
    asked = tiny_config(parallel__tp=4, model__n_kv_heads=4, parallel__tp_across_nodes=True)
    for config, ranks_a_machine in ((across, 4), (asked, 2), (tiny_config(parallel__tp=2), 2)):
        assert ranks(4, refusal, config, ranks_a_machine) == [""] * 4


def links(config) -> str:
    layout = resolve_config(config, dist.get_world_size()).layout
    return preflight.measure_links(mesh_of(layout), CPU)


def test_links_are_measured_axis_by_axis(ranks, tmp_path):
    seen = ranks(4, links, tiny_config(parallel__pp=2, parallel__tp=2))
    assert len(set(seen)) == 1 and re.fullmatch(r"pp 2: [\d.e+-]+ GB/s, tp 2: [\d.e+-]+ GB/s", seen[0])
    console = ranks(2, run_training, run_config(tmp_path, training__steps=1))[0]["console"]
    assert "links       dp_shard 2: " in console


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path):
    with socket.create_server(("", 0)) as other_job:
        port = str(other_job.getsockname()[1])
        meeting = dict(NNODES="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        result = run(tmp_path, *SMALL, "--nproc=1", **meeting)
    assert result.returncode == 2 and f"MASTER_PORT={port} cannot be used on this machine" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("nodes", ["0", "2:1", "1:", "two", "-1"])
def test_a_bad_number_of_machines_is_named(tmp_path, nodes):
    result = run(tmp_path, *SMALL, NNODES=nodes, NODE_RANK="0", MASTER_ADDR="127.0.0.1")
    assert result.returncode == 2 and f"NNODES={nodes}" in result.stderr, result.stderr
