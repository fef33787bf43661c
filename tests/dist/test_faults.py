"""Ranks that raise, die, hang or stop: what the others do, and how the job goes on. Real processes, under torchrun."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time

import pytest

from tests.dist.runs import records
from tests.dist.test_command import (
    SMALL,
    assert_same_curve,
    children_of,
    job_processes,
    kill_job,
    processes_left,
    run,
    start,
    start_job,
    wait_for_step,
)


def run_with_fault(tmp_path, fault: str, *arguments: str, nproc: int = 2, restarts: int = 0, timeout_s: float = 90):
    """``fault``: see failing_rank.py. Returns the ended process, with what it has said."""
    command = ["-m", "tests.dist.failing_rank", "train", *SMALL, "--job.output_dir=run", *arguments]
    code = (
        "from trainer.torchrun import run_ranks; import sys; "
        f"sys.exit(run_ranks({nproc}, {command!r}, ['--standalone', '--max-restarts={restarts}']))"
    )
    process = start_job(tmp_path, ["-c", code], FAULT=fault)
    try:
        out, err = process.communicate(timeout=timeout_s)
        assert not processes_left(process)
    finally:
        kill_job(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    result = run(folder, *SMALL, "--training.steps=8", "--job.output_dir=run")
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_b61_an_error_on_one_rank_ends_every_rank(tmp_path):
    started = time.monotonic()
    result = run_with_fault(tmp_path, "1 3 raise", "--parallel.pp=2", nproc=4)
    assert result.returncode == 1
    assert "[rank 1] RuntimeError: planted fault" in result.stderr
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert time.monotonic() - started < 80  # a hang would last until gloo's own time-out, half an hour


@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_a_crashed_group_starts_again_and_follows_the_same_curve(straight, tmp_path, kind):
    keys = ["--training.steps=8", "--checkpoint.interval=2"]
    result = run_with_fault(tmp_path, f"1 6 {kind}", *keys, restarts=2, timeout_s=150)
    assert result.returncode == 0, result.stderr
    assert "resuming    run/checkpoints/step-00000004" in result.stdout
    assert_same_curve(tmp_path / "run", straight)


def test_what_would_end_the_same_way_again_does_not_start_again(tmp_path):
    """An error of the user's on one rank alone ends the others too, with its code, in spite of --max-restarts."""
    result = run_with_fault(tmp_path, "1 3 user", "--training.steps=8", restarts=5)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("planted: a file that only this rank misses") == 1
    assert "Traceback" not in result.stderr and result.stdout.count("layout  ") == 1


def test_a_signal_stops_a_job_that_may_restart(straight, tmp_path):
    arguments = [*SMALL, "--training.steps=8", "--job.output_dir=run", "--nproc=2", "--max-restarts=5"]
    process = start(tmp_path, *arguments)
    wait_for_step(tmp_path / "run", 2)
    os.kill(children_of(process.pid)[1], signal.SIGTERM)  # one rank alone: all agree
    out, err = process.communicate(timeout=60)
    stopped = records(tmp_path / "run")[-1]["step"]
    assert process.returncode == 75 if stopped < 8 else 0, out + err
    assert out.count("layout  ") == 1 and not processes_left(process)
    assert run(tmp_path, *arguments).returncode == 0
    assert_same_curve(tmp_path / "run", straight)


@pytest.mark.parametrize(
    "kind, seen",
    [("sleep", "rank 1 (pp 1), step 4: busy in failing_rank.py"), ("stop", "rank 1: does not answer (stopped, ")],
)
def test_a_hang_ends_the_job_and_names_the_rank(straight, tmp_path, kind, seen):
    """With the stacks of every rank that answers; and the next start goes on."""
    keys = ["--parallel.pp=2", "--training.steps=8", "--checkpoint.interval=2", "--job.step_timeout_s=8"]
    result = run_with_fault(tmp_path, f"1 4 {kind}", *keys, timeout_s=120)
    assert result.returncode == 1
    name = "rank 1 (pp 1)" if kind == "sleep" else "rank 1"
    assert f"error: nothing has moved for more than 8 s (job.step_timeout_s): {name} did not arrive" in result.stderr
    assert seen in result.stderr, result.stderr
    assert "rank 0 (pp 0), step 4: waits for other ranks, in mesh.py" in result.stderr
    stacks = sorted(path.name for path in (tmp_path / "run/logs").glob("stacks-*"))
    assert stacks == (["stacks-rank-0.txt", "stacks-rank-1.txt"] if kind == "sleep" else ["stacks-rank-0.txt"])
    assert "forward_backward" in (tmp_path / "run/logs/stacks-rank-0.txt").read_text()
    assert "Traceback" not in result.stderr
    assert run(tmp_path, *SMALL, *keys[:3], "--job.output_dir=run", "--nproc=2").returncode == 0
    assert_same_curve(tmp_path / "run", straight)


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_save_that_does_not_end_ends_the_job(tmp_path, async_save):
    """In the background the next save waits for it, and the job for that one."""
    keys = ["--parallel.pp=2", "--checkpoint.interval=2", "--checkpoint.timeout_s=3", f"--checkpoint.async_save={async_save}"]
    result = run_with_fault(tmp_path, "1 4 save", *keys, timeout_s=90)
    assert result.returncode == 1
    assert "error: nothing has moved for more than 3 s (checkpoint.timeout_s)" in result.stderr, result.stderr
    saved = 4 if async_save == "false" else 6
    assert f"rank 1 (pp 1), the checkpoint of step {saved}: busy in failing_rank.py" in result.stderr, result.stderr
    assert f"rank 0 (pp 0), the checkpoint of step {saved}: waits for other ranks" in result.stderr
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("*2")] == ["step-00000002"]


def test_a_hang_of_one_process_alone_ends_too(tmp_path):
    result = run_with_fault(tmp_path, "0 3 sleep", "--job.step_timeout_s=8", nproc=1)
    assert result.returncode == 1
    assert "rank 0 is in step 3 for more than 8 s (job.step_timeout_s): busy in failing_rank.py" in result.stderr


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_rank_that_dies_in_a_save_starts_both_machines_again(straight, tmp_path, async_save):
    """Two launchers, as on two machines: the one whose rank is alive must not take the lost save for the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code = (
        "import sys; from trainer.launch import rendezvous_flags; from trainer.torchrun import run_ranks; sys.exit(run_ranks(1, sys.argv[1:], rendezvous_flags(2)[0]))"
    )
    keys = ["--training.steps=8", "--checkpoint.interval=2", f"--checkpoint.async_save={async_save}", "--job.output_dir=run"]
    meeting = dict(NNODES="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, FAULT="1 4 dies")
    command = ["-c", code, "-m", "tests.dist.failing_rank", "train", *SMALL, *keys]
    launchers = [start_job(tmp_path, command, NODE_RANK=str(rank), **meeting) for rank in range(2)]
    try:
        for launcher in launchers:
            out, err = launcher.communicate(timeout=180)
            assert launcher.returncode == 0, err
            assert "could not be written" not in err, err
    finally:
        for launcher in launchers:
            kill_job(launcher)
    assert_same_curve(tmp_path / "run", straight)


def test_a_launcher_does_not_wait_long_for_a_machine_that_never_ends(tmp_path):
    """As when the link is cut after the last step: torchrun's own patience is 300 s."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, time\nfrom trainer.exit_status import exit_now\n"
        "time.sleep(1000 if os.environ['RANK'] == '1' else 0)\nexit_now(0, restart=False)\n"
    )
    code = (
        "import sys; from trainer.launch import rendezvous_flags; from trainer.torchrun import run_ranks; "
        f"sys.exit(run_ranks(1, [{str(rank)!r}], rendezvous_flags(0)[0], others_s=2))"
    )
    meeting = dict(NNODES="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    launchers = [start_job(tmp_path, ["-c", code], NODE_RANK=str(rank), **meeting) for rank in range(2)]
    try:
        out, err = launchers[0].communicate(timeout=60)
        assert launchers[0].returncode == 0 and "Traceback" not in err, err
        assert launchers[1].poll() is None
    finally:
        for launcher in launchers:
            kill_job(launcher)


def test_a_second_ctrl_c_to_the_launcher_ends_everything(tmp_path):
    code = "from trainer.torchrun import run_ranks; import sys; sys.exit(run_ranks(2, sys.argv[1:], ['--standalone']))"
    command = ["-m", "tests.dist.failing_rank", "train", *SMALL, "--job.output_dir=run"]
    process = start_job(tmp_path, ["-c", code, *command], FAULT="1 3 sleep")
    try:
        wait_for_step(tmp_path / "run", 2)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(3)
        assert process.poll() is None  # the ranks cannot come to the end of their step
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=15)
        assert process.returncode == 1 and "Traceback" not in err and not processes_left(process), err
    finally:
        kill_job(process)


def test_a_folder_that_is_removed_under_a_run_ends_it(tmp_path):
    process = start(tmp_path, *SMALL, "--training.steps=100000", "--job.output_dir=run", "--metrics.tensorboard=false")
    wait_for_step(tmp_path / "run", 3)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "has been deleted while the run was writing it" in err or "could not be written" in err, err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_b83_the_same_signal_twice_ends_at_once(tmp_path, name):
    """In a process that cannot come to the end of its step: once is a request, and right behind it the same one."""
    code = "from trainer.torchrun import run_ranks; import sys; sys.exit(run_ranks(1, sys.argv[1:], ['--standalone']))"
    command = ["-m", "tests.dist.failing_rank", "train", *SMALL, "--job.output_dir=run"]
    process = start_job(tmp_path, ["-c", code, *command], FAULT="0 3 sleep")
    try:
        wait_for_step(tmp_path / "run", 2)
        rank = children_of(process.pid)[0]
        for _ in range(2):
            os.kill(rank, getattr(signal, name))
            time.sleep(0.5)
        time.sleep(2)
        assert process.poll() is None
        os.kill(rank, getattr(signal, name))
        out, err = process.communicate(timeout=20)
        assert process.returncode == 1 and "Traceback" not in err and not processes_left(process), err
    finally:
        kill_job(process)


@pytest.mark.parametrize("seconds", [0.5, 2.5, 4.0, 6.0])
def test_ranks_do_not_outlive_a_launcher_that_is_killed_while_they_start(tmp_path, seconds):
    process = start(tmp_path, *SMALL, "--training.steps=100000", "--job.output_dir=run", "--nproc=2", "--parallel.pp=2")
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    try:
        assert not processes_left(process, patience_s=20)
    finally:
        kill_job(process)


def test_a_signal_while_the_ranks_start_is_not_waited_out(tmp_path):
    process = start(tmp_path, *SMALL, "--training.steps=100000", "--job.output_dir=run", "--nproc=2")
    while not job_processes(process)[2:]:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=25)  # torchrun would kill ranks that do not listen after 30 s
    assert process.returncode == 75 and "Traceback" not in err and not processes_left(process), err


@pytest.mark.parametrize("seconds", [0.6, 1.8])
def test_b83_a_signal_while_the_launcher_starts_is_heeded(tmp_path, seconds):
    """From the moment that Python runs our code; before, it dies of the signal. Never is it swallowed."""
    process = start(tmp_path, *SMALL, "--training.steps=100000", "--job.output_dir=run", "--nproc=2")
    try:
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=25)
        assert process.returncode in (75, -signal.SIGTERM) and "Traceback" not in err and not processes_left(process), err
    finally:
        kill_job(process)


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_b83_a_terminal_that_is_gone_is_a_request_to_stop(tmp_path, nproc):
    process = start(tmp_path, *SMALL, "--training.steps=100000", "--job.output_dir=run", "--nproc", nproc, "--checkpoint.interval=0")
    try:
        wait_for_step(tmp_path / "run", 3)
        os.kill(process.pid, signal.SIGHUP)
        out, err = process.communicate(timeout=40)
        assert process.returncode == 75 and "Traceback" not in err, err
        last = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1]
        assert (tmp_path / f"run/checkpoints/step-{last:08d}").is_dir()
    finally:
        kill_job(process)


def test_b83_under_nohup_a_terminal_may_go(tmp_path):
    code = "import signal, os, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = ["-c", code, "-m", "trainer.launch", *SMALL, "--training.steps=12", "--job.output_dir=run", "--nproc=2"]
    process = start_job(tmp_path, command)
    try:
        wait_for_step(tmp_path / "run", 2)
        for pid in job_processes(process):
            os.kill(pid, signal.SIGHUP)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and "step 12/12" in out, err
    finally:
        kill_job(process)
