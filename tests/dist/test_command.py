"""The front door, with real processes, signals and files."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.runs import records
from trainer.config_load import load_config

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--model.dim=64", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.ffn_dim=128",
    "--training.seq_len=32", "--training.global_batch_size=8", "--training.micro_batch_size=2",
    "--lr_schedule.warmup_steps=2", "--checkpoint.interval=5",
]  # fmt: skip


def start(tmp_path: Path, *arguments: str, module: str = "trainer.launch", **environment: str) -> subprocess.Popen:
    return start_job(tmp_path, ["-m", module, *arguments], **environment)


def start_job(tmp_path: Path, arguments: list[str], **environment: str) -> subprocess.Popen:
    """A Python process whose descendants can be found by a mark in their environment: torchrun's ranks have sessions of
    their own."""
    environment = {"PYTHONPATH": str(ROOT), "MESHLOOM_TEST_JOB": secrets.token_hex(8)} | environment
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, env=os.environ | environment,
    )  # fmt: skip
    process.mark = f"MESHLOOM_TEST_JOB={environment['MESHLOOM_TEST_JOB']}".encode()
    return process


def job_processes(process: subprocess.Popen) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if process.mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def run(tmp_path: Path, *arguments: str, timeout_s: float = 180, **options) -> subprocess.CompletedProcess:
    process = start(tmp_path, *arguments, **options)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        kill_job(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill_job(process: subprocess.Popen) -> None:
    for _ in range(3):  # one may just be starting another
        for pid in job_processes(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_left(process: subprocess.Popen, patience_s: float = 5) -> bool:
    """Whether anything of the job is there still; what ends takes a moment."""
    deadline = time.monotonic() + patience_s
    while (left := job_processes(process)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(left)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(folder: Path, step: int, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and any(record["step"] >= step for record in records(folder)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """12 steps in one process: the curve that the others must follow."""
    folder = tmp_path_factory.mktemp("straight")
    result = run(folder, *SMALL, "--training.steps=12", "--job.output_dir=run")
    assert result.returncode == 0, result.stderr
    return folder / "run", result.stdout


def assert_same_curve(folder: Path, expected: Path, rel: float = 1e-5) -> None:
    got, want = records(folder), records(expected)
    assert [record["step"] for record in got] == [record["step"] for record in want]
    assert [record["loss"] for record in got] == pytest.approx([record["loss"] for record in want], rel=rel)
    assert [record["lr"] for record in got] == [record["lr"] for record in want]


def test_one_process_writes_what_the_contract_says(straight):
    folder, console = straight
    losses = [record["loss"] for record in records(folder)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.2
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["checkpoints", "config.toml", "hparams", "logs", "metrics.jsonl", "tensorboard"]
    assert load_config(str(folder / "config.toml")).training.steps == 12
    assert f"tensorboard --logdir {Path('run/tensorboard')}" in console
    assert "step 12/12  loss" in console and "tokens/s" in console and "left 0:00" in console


def test_b71_b72_three_axes_one_curve_one_event_file(straight, tmp_path):
    """tp 2 x pp 2 x dp_shard 2 on 8 ranks: the same losses, on the console of rank 0 alone, one event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    layout = ["--parallel.tp=2", "--parallel.pp=2", "--parallel.dp_shard=2"]
    result = run(tmp_path, *SMALL, "--training.steps=12", "--job.output_dir=run", "--nproc", "8", *layout)
    assert result.returncode == 0, result.stderr
    assert_same_curve(tmp_path / "run", straight[0])
    assert [line.count("/12  loss") for line in result.stdout.splitlines()].count(1) == 12
    assert result.stderr == ""
    events = list((tmp_path / "run/tensorboard").iterdir())
    assert len(events) == 1
    scalars = EventAccumulator(str(events[0])).Reload().Scalars("training/loss")
    assert [scalar.step for scalar in scalars] == list(range(1, 13))
    assert [scalar.value for scalar in scalars] == pytest.approx([r["loss"] for r in records(tmp_path / "run")], rel=1e-6)


PP2 = ["--nproc", "2", "--parallel.pp=2"]


@pytest.mark.parametrize(
    "layout, name",
    [([], "SIGTERM"), ([], "Ctrl-C"), *((PP2, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "Ctrl-C", "SIGTERM to all"))],
    ids=lambda value: value if isinstance(value, str) else "pp2" if value else "one",
)
def test_b72_stopped_by_a_signal_it_goes_on_where_it_was(straight, tmp_path, layout, name):
    """Exit 75 after a checkpoint; run again, the rest of the same curve, no step twice, no point lost."""
    arguments = [*SMALL, "--training.steps=12", "--job.output_dir=run", "--checkpoint.interval=0", *layout]
    process = start(tmp_path, *arguments)
    wait_for_step(tmp_path / "run", 3)
    if name == "SIGTERM to all":  # as schedulers do; torchrun passes its own on to the ranks besides
        for pid in [process.pid, *children_of(process.pid)]:
            os.kill(pid, signal.SIGTERM)
    elif name == "Ctrl-C":  # the terminal sends it to the launcher and to every rank
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid, getattr(signal, name))
    out, err = process.communicate(timeout=60)
    stopped = [record["step"] for record in records(tmp_path / "run")]
    if len(stopped) < 12:  # else it was quicker than the signal
        assert process.returncode == 75, out + err
        checkpoints = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
        assert checkpoints == [f"step-{stopped[-1]:08d}"]
    assert "Traceback" not in err
    assert not processes_left(process)
    result = run(tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert_same_curve(tmp_path / "run", straight[0])


def test_killed_in_the_middle_it_goes_on_from_the_last_checkpoint(straight, tmp_path):
    arguments = [*SMALL, "--training.steps=12", "--job.output_dir=run", "--checkpoint.interval=2"]
    process = start(tmp_path, *arguments)
    wait_for_step(tmp_path / "run", 5)
    kill_job(process)
    process.communicate()
    result = run(tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert_same_curve(tmp_path / "run", straight[0], rel=0)  # bitwise on the same layout


def test_two_machines_make_one_run(straight, tmp_path):
    """NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, with both "machines" on this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*SMALL, "--training.steps=12", "--job.output_dir=run", "--nproc=1"]
    nodes = [
        start(tmp_path, *arguments, NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        for rank in range(2)
    ]
    for node in nodes:
        out, err = node.communicate(timeout=120)
        assert node.returncode == 0, err
    assert_same_curve(tmp_path / "run", straight[0])


def test_machines_that_do_not_share_the_folder_are_told(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        environment = dict(NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        nodes.append(start(tmp_path / str(rank), *SMALL, "--job.output_dir=run", "--nproc=1", **environment))
    for node in nodes:
        out, err = node.communicate(timeout=120)
        assert node.returncode == 2 and "is not the same folder on every machine" in err, err
        assert "Traceback" not in err


def test_a_signal_to_the_whole_group_spares_the_loader(straight, tmp_path):
    """Schedulers signal every process: loader workers must live until their rank has saved."""
    arguments = [*SMALL, "--training.steps=12", "--job.output_dir=run", "--data.workers=2"]
    process = start(tmp_path, *arguments)
    wait_for_step(tmp_path / "run", 3)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, 75) and "Traceback" not in err, err
    assert run(tmp_path, *arguments).returncode == 0
    assert_same_curve(tmp_path / "run", straight[0])


def test_a_rank_that_is_killed_is_named(tmp_path):
    process = start(tmp_path, *SMALL, "--training.steps=100000", "--job.output_dir=run", "--nproc=2")
    wait_for_step(tmp_path / "run", 2)
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "error: rank 1 was ended by SIGKILL: out of memory?" in err, err
    assert "Traceback" not in err and not processes_left(process)


def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    arguments = [*SMALL, "--training.steps=100000", "--job.output_dir=run", "--nproc=2", "--checkpoint.interval=0"]
    process = start(tmp_path, *arguments)
    try:
        wait_for_step(tmp_path / "run", 2)
        process.kill()
        deadline = time.monotonic() + 30
        while processes_left(process) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.2)
        assert not processes_left(process)
    finally:
        kill_job(process)
        process.communicate()


def test_ctrl_c_while_torch_loads_is_no_traceback(tmp_path):
    process = start(tmp_path, *SMALL, "--training.steps=5", "--job.output_dir=run")
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err and process.returncode in (75, 130, -2), (process.returncode, err)


def test_tensorboard_is_purged_of_what_a_kill_left(straight, tmp_path):
    """Killed before the first checkpoint and started again: each step once on the page."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = [*SMALL, "--training.steps=12", "--job.output_dir=run", "--checkpoint.interval=0"]
    process = start(tmp_path, *arguments)
    wait_for_step(tmp_path / "run", 5)
    kill_job(process)
    process.communicate()
    assert run(tmp_path, *arguments).returncode == 0
    assert_same_curve(tmp_path / "run", straight[0], rel=0)
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 2
    steps = [s.step for s in EventAccumulator(str(tmp_path / "run/tensorboard")).Reload().Scalars("training/loss")]
    assert steps == list(range(1, 13))


def test_a_run_shorter_than_its_warm_up(tmp_path):
    result = run(tmp_path, "--training.steps=2", "--job.output_dir=run")
    assert result.returncode == 0 and "within the warm-up of 20 steps" in result.stdout, result.stderr


@pytest.mark.parametrize("text, code", [("x" * 5000, 0), ("x", 2)])
def test_a_thread_in_torch_does_not_abort_a_process_that_ends(tmp_path, text, code):
    (tmp_path / "text.txt").write_text(text)
    program = (
        "import sys, threading, torch; from trainer.__main__ import main\n"
        "def work(a=torch.ones(9)):\n"
        "    while True: a + a\n"
        "threading.Thread(target=work, daemon=True).start(); sys.exit(main())"
    )
    keys = ["--data.source=text", "--data.path=text.txt", "--training.steps=1", "--training.global_batch_size=2"]
    process = start_job(tmp_path, ["-c", program, "train", *SMALL, *keys])
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err


BAD = {
    "unknown_key": (["--training.seq_lenn=3"], "unknown key training.seq_lenn"),
    "wrong_type": (["--training.steps=many"], "training.steps = \"many\""),
    "tp_and_heads": (["--nproc=3", "--parallel.tp=3"], "parallel.tp = 3 does not divide n_heads = 8"),
    "tp_and_kv_heads": (["--nproc=8", "--parallel.tp=8"], "parallel.tp = 8 does not divide n_kv_heads = 4"),
    "more_stages_than_layers": (["--nproc=7", "--parallel.pp=7"], "n_layers = 6"),
    "batch": (["--training.global_batch_size=7"], "training.global_batch_size = 7"),
    "missing_file": (["--data.source=text", "--data.path=none.txt"], "no such file"),
    "empty_file": (["--data.source=text", "--data.path=empty.txt"], "the file is empty"),
    "short_text": (["--data.source=text", "--data.path=short.txt"], "fewer than one row of training.seq_len"),
    "short_text_on_2": (["--data.source=text", "--data.path=short.txt", "--nproc=2"], "fewer than one row"),
    "tokenizer_too_large": (["--data.tokenizer=smollm2"], "has 49152 ids, but the model has vocab_size = 320"),
    "nproc_and_layout": (["--nproc=3", "--parallel.tp=2"], "start with --nproc 2"),
    "nproc_zero": (["--nproc=0"], "--nproc 0"),
    "output_dir": (["--job.output_dir=empty.txt/run"], "job.output_dir = 'empty.txt/run' cannot be written"),
    "no_such_config": (["--config=llama9.toml"], "not found"),
    "not_toml": (["--config=bad.toml"], "not valid TOML"),
    "no_gpus": (["--config=llama3_8b.toml"], "8.0B parameters needs 120 GiB"),
    "no_cluster": (["--config=llama3_70b.toml"], "try the same code here with ./run_train.sh --config debug.toml"),
    "nnodes": (["NNODES=two"], "NNODES=two"),
    "node_rank": (["NNODES=2,NODE_RANK=2,MASTER_ADDR=localhost"], "NODE_RANK=2: must be a whole number, from 0 to 1"),
    "master_port": (["NNODES=2,NODE_RANK=0,MASTER_ADDR=localhost,MASTER_PORT=99999999"], "MASTER_PORT=99999999"),
    "no_master": (["NNODES=2"], "NODE_RANK and MASTER_ADDR is not set"),
    "batch_too_large": (["--training.global_batch_size=4000000000000"], "at most 10000000"),
    "nul_in_path": (['--job.output_dir="a\\u0000b"'], "cannot be written"),
    "flag": (["--steps=3"], "unrecognized arguments"),
    "no_value": (["--training.steps"], "needs a value"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said_once_and_exits_2(tmp_path, name):
    arguments, expected = BAD[name]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("Only a few words.")
    (tmp_path / "bad.toml").write_text("[training\n")
    environment = {}
    if arguments[-1].startswith("NNODES"):
        environment = dict(pair.split("=") for pair in arguments[-1].split(","))
        arguments = arguments[:-1]
    process = start(tmp_path, *arguments, **environment)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert err.count(expected) == 1, err
    assert "Traceback" not in err and out == ""
    assert not processes_left(process)
    assert not (tmp_path / "outputs").exists() or not list((tmp_path / "outputs").rglob("checkpoints"))
