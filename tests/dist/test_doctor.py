"""The doctor's own ranks: a matmul each, and an all-reduce between them."""

import json

from tests.dist.test_command import run


def test_the_doctor_measures_and_tells_a_script(tmp_path):
    result = run(tmp_path, "doctor", "--json", module="trainer")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert report["ok"] and "TFLOP/s" in found["matmul"]["text"] and "GB/s" in found["all-reduce"]["text"]


def test_ranks_that_cannot_meet_are_a_problem(tmp_path):
    result = run(tmp_path, "doctor", module="trainer", GLOO_SOCKET_IFNAME="nope0")
    assert result.returncode == 1
    ranks = next(line for line in result.stdout.splitlines() if line.startswith("problem  ranks"))
    assert "a network interface that was asked for is not there" in ranks, result.stdout
    assert not result.stderr
