"""The doctor must find what is planted. Without its measurements: tests/dist/test_doctor.py."""

import json
import socket
import sys

import pytest

from trainer import __main__, doctor_checks
from trainer.hardware import GIB


@pytest.fixture
def findings(monkeypatch, capsys, tmp_path):
    """``findings(*arguments)``: the exit code, and check -> its (state, text, advice) one after another."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trainer", "doctor", "--quick", "--json", *arguments])
        code = __main__.main()
        out = capsys.readouterr().out
        found: dict = {}
        for finding in json.loads(out)["findings"]:
            found.setdefault(finding["check"], []).append(
                (finding["state"], finding["text"] + " -> " + finding["advice"])
            )
        return code, found

    return run


def states(found: dict, check: str) -> list[str]:
    return [state for state, _ in found[check]]


def test_a_sound_machine_has_no_problem(findings):
    code, found = findings("--config", "debug.toml")
    assert code == 0 and states(found, "torch") == ["ok"] and states(found, "layout") == ["ok"], found
    assert "4,885,760 parameters" in found["layout"][0][1]


def test_what_is_wrong_in_the_environment_is_found(findings, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        code, found = findings()
        assert code == 0 and "is in use" in found["ports"][0][1]  # a note: most jobs are of one machine
    for variable, value, check in (
        ("MASTER_PORT", "many", "ports"), ("GLOO_SOCKET_IFNAME", "nope0", "network"), ("TORCH_LOGS", "", "environment"),
        ("OMP_NUM_THREADS", "all", "cores"),
    ):  # fmt: skip
        with monkeypatch.context() as context:
            context.setenv(variable, value)
            code, found = findings()
            assert code == 1 and states(found, check)[0] == "problem" and variable in found[check][0][1], found


def test_what_a_config_needs_and_is_not_there_is_found(findings, tmp_path):
    (tmp_path / "file").write_text("")
    code, found = findings("--job.output_dir=file/run", "--data.path=nothing.txt", "--parallel.tp=3", "--nproc=3")
    assert code == 1
    assert states(found, "disk")[0] == "problem" and "job.output_dir" in found["disk"][0][1]
    assert "nothing.txt" in found["data"][0][1] and "parallel.tp" in found["layout"][0][1]
    code, found = findings("--model.size=3.1-405B")
    assert code == 1 and "GiB" in found["layout"][0][1]


def test_versions_are_compared_with_the_bounds_and_with_those_tested(findings, monkeypatch):
    real = doctor_checks.version
    monkeypatch.setattr(doctor_checks, "version", lambda name: "0.1" if name == "tqdm" else real(name))
    code, found = findings()
    assert code == 0 and "tqdm 0.1 (tested: " in found["versions"][0][1]


def test_little_shared_memory_is_a_problem_only_where_it_is_used(findings, monkeypatch):
    real = doctor_checks.shutil.disk_usage
    usage = type(real("/"))
    small = usage(64 << 20, 0, 64 << 20)
    monkeypatch.setattr(
        doctor_checks.shutil, "disk_usage", lambda path: small if path == "/dev/shm" else usage(GIB << 10, 0, GIB << 10)
    )
    assert states(findings()[1], "shared memory") == ["note"]
    code, found = findings("--data.workers=2")
    assert code == 1 and "--shm-size" in found["shared memory"][0][1]
