"""Two machines, imitated by network namespaces: one run over both, one of them dying, the cable pulled."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallelize.planner.hardware import cluster_of
from tests.dist.hosts import Hosts, why_not
from tests.dist.runs import records
from tests.dist.test_command import ROOT, SMALL, assert_same_curve, run, wait_for_step

pytestmark = pytest.mark.hosts
RUN = [*SMALL, "--training.steps=16", "--job.output_dir=run", "--checkpoint.interval=2"]
PATIENCE_S = 60  # for a launcher whose peer machine has died
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4000), timeout=float(sys.argv[2])).close()"


@pytest.fixture(scope="module", autouse=True)
def _can_be_had():
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def hosts():
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """16 steps in one process: the curve that the others must follow."""
    folder = tmp_path_factory.mktemp("straight")
    result = run(folder, *RUN)
    assert result.returncode == 0, result.stderr
    return folder / "run"


def start_on(hosts: Hosts, index: int, tmp_path: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    """The same command on one of the machines; 2 ranks."""
    command = [str(ROOT / "run_train.sh"), *RUN, "--nproc=2", *arguments]
    return hosts.popen(
        index, command, {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def start_on_both(hosts: Hosts, tmp_path: Path, *arguments: str) -> list[subprocess.Popen]:
    meeting = {"NNODES": "2", "MASTER_ADDR": hosts.names[0], "MASTER_PORT": "29500"}
    return [start_on(hosts, index, tmp_path, *arguments, NODE_RANK=str(index), **meeting) for index in range(2)]


def test_two_machines_with_addresses_of_their_own(straight, hosts, tmp_path):
    """Ranks must find each other at addresses that are not 127.0.0.1."""
    launchers = start_on_both(hosts, tmp_path, "--parallel.tp=2", "--parallel.pp=2")
    for launcher in launchers:
        out, err = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, err
    assert_same_curve(tmp_path / "run", straight)


def test_links_within_and_between_machines_are_measured(hosts, tmp_path):
    """Ranks of one machine share its memory; what passes between machines passes a bridge at 10 MB/s."""
    try:
        for index in range(2):
            hosts.limit(index, "80mbit")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no traffic shaping here: {error}")
    command = [sys.executable, "-m", "trainer", "plan", "--gpu=cpu", "--gpus-per-node=2", "--measure=here.toml"]
    meeting = {"NNODES": "2", "MASTER_ADDR": hosts.names[0], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        hosts.popen(
            index, command, {**meeting, "NODE_RANK": str(index)},
            cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=180) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "written" in said[0][0] and said[1][0] == ""
    found = cluster_of(str(tmp_path / "here.toml"), 2, 2)
    # Two ranks share a machine's way out.
    assert 1e6 < found.network_link.bytes_per_s < 6e6
    assert found.node_link.bytes_per_s > 4 * found.network_link.bytes_per_s
    assert 0 < found.calibration.attention_efficiency <= 1


def test_a_machine_dies_and_the_other_goes_on_alone(straight, hosts, tmp_path):
    """The launcher that is left ends by itself; one machine then goes on from the last checkpoint at its own layout."""
    left, dead = start_on_both(hosts, tmp_path, "--parallel.tp=2", "--parallel.pp=2")
    wait_for_step(tmp_path / "run", 3)
    hosts.kill(1)
    out, err = left.communicate(timeout=PATIENCE_S)
    assert len(records(tmp_path / "run")) < 16, "it was done before the machine died"
    assert left.returncode not in (0, 2, 75), (left.returncode, err)
    assert hosts.pids(0) == hosts.pids(1) == []
    dead.communicate()
    assert dead.returncode == -9

    alone = start_on(hosts, 0, tmp_path, "--parallel.dp_shard=2")
    out, err = alone.communicate(timeout=120)
    assert alone.returncode == 0, err
    assert "resuming " in out, out
    assert_same_curve(tmp_path / "run", straight)


def test_a_cut_link_is_a_hang_that_ends_and_the_next_start_goes_on(hosts, tmp_path):
    """No connection is closed: the watchdogs on both sides say who is missing, and both launchers end."""
    keys = ["--parallel.tp=2", "--parallel.pp=2", "--job.step_timeout_s=5"]
    constant = "--lr_schedule.decay=constant"
    launchers = start_on_both(hosts, tmp_path, *keys, constant, "--training.steps=100000")
    wait_for_step(tmp_path / "run", 3)
    hosts.cut(1)
    said = [launcher.communicate(timeout=150)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [1, 1], said
    assert "nothing has moved for more than 5 s (job.step_timeout_s): rank 2, rank 3 did not arrive" in said[0]
    assert "rank 2: does not answer (stopped, its machine down, or the link to it cut)" in said[0]
    assert "The job's store does not answer: is the first machine, or the link to it, down?" in said[1]
    assert hosts.pids(0) == hosts.pids(1) == []

    hosts.mend(1)
    reached = int(sorted(folder.name for folder in (tmp_path / "run/checkpoints").iterdir())[-1].split("-")[1])
    steps = f"--training.steps={reached + 2}"
    for launcher in start_on_both(hosts, tmp_path, *keys, constant, steps):
        out, err = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, err
    assert run(tmp_path, *RUN, constant, steps, "--job.output_dir=alone").returncode == 0
    assert_same_curve(tmp_path / "run", tmp_path / "alone")


def test_with_a_machine_less_the_job_goes_on_by_itself(straight, tmp_path):
    """NNODES=1:3: of three machines one dies; the others start again, from the last checkpoint, as one smaller world."""
    with Hosts(3) as hosts:
        meeting = {"NNODES": "1:3", "MASTER_ADDR": hosts.names[0], "MASTER_PORT": "29500"}
        keys = ["--nproc=1", "--max-restarts=3", "--training.global_batch_size=12", "--training.steps=60"]
        launchers = [start_on(hosts, index, tmp_path, *keys, NODE_RANK=str(index), **meeting) for index in range(3)]
        wait_for_step(tmp_path / "run", 3)
        hosts.kill(2)
        for launcher in launchers[:2]:
            out, err = launcher.communicate(timeout=240)
            assert launcher.returncode == 0, err
            if "layout" in out:
                layouts = [line.split("  ")[-1] for line in out.splitlines() if line.startswith("layout")]
    assert layouts == ["dp_shard 3; 3 processes on CPU", "dp_shard 2; 2 processes on CPU"], layouts
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 61))


def connects(hosts: Hosts, timeout_s: float = 3) -> bool:
    """Whether machine 1 reaches port 4000 of machine 0."""
    command = [sys.executable, "-c", CONNECT, hosts.addresses[0], str(timeout_s)]
    return hosts.popen(1, command, stderr=subprocess.DEVNULL).wait(timeout=60) == 0


def test_a_cable_is_pulled_and_put_back(hosts):
    """What the imitation itself promises: its own names and addresses, no packets while cut."""
    listen = "import socket, time; s = socket.create_server(('', 4000)); print(socket.gethostname(), flush=True); time.sleep(600)"
    server = hosts.popen(0, [sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline().strip() == hosts.names[0]
    assert connects(hosts)
    hosts.cut(0)
    assert not connects(hosts, timeout_s=1)
    hosts.mend(0)
    assert connects(hosts, timeout_s=20)
    hosts.kill(0)
    assert server.wait(timeout=5) == -9
