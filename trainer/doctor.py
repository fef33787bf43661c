"""The ``doctor`` command: is this machine fit to train, and if not, what is to be done."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.config_load import Override, load_config
from trainer.doctor_checks import Finding, checks_of_config, checks_of_machine, checks_of_packages, note, ok, problem
from trainer.errors import EXIT_FAILED
from trainer.hardware import peak_flops
from trainer.launch import count_gpus, count_processes

_SLOW = 0.5  # of the data sheet: a large square matmul reaches 0.6 to 0.8
_UNEVEN = 0.85  # of the fastest rank
_MEASURE_S = 60  # for all of it; a hang is a finding


def main(options: argparse.Namespace, overrides: list[Override]) -> int:
    """Print the findings. Exit code 1 if one is a problem; raises ``UserError`` for a config that cannot run anywhere."""
    asked = options.config is not None or bool(overrides)
    config = load_config(options.config, overrides)
    nproc = count_processes(config, options.nproc, n_nodes=1)  # of the config; who measures needs a second one
    n_measuring = options.nproc or count_gpus() or 2
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="meshloom-doctor-") as folder:
        answer = Path(folder) / "measured.json"
        measuring = None if options.quick else _start_measuring(n_measuring, answer)  # meanwhile:
        try:
            for part in (
                checks_of_packages(),
                checks_of_machine(config),
                checks_of_config(config, nproc) if asked else (),
            ):
                findings += _shown(part, options.json)
            if measuring is not None:
                findings += _shown(_measured(measuring, answer, n_measuring), options.json)
        finally:
            if measuring is not None and measuring.poll() is None:
                measuring.kill()
                measuring.wait()
    n_problems = sum(finding.state == "problem" for finding in findings)
    if options.json:
        print(json.dumps({"ok": not n_problems, "findings": [vars(finding) for finding in findings]}, indent=1))
    else:
        print(f"\n{n_problems} problem(s), {sum(finding.state == 'note' for finding in findings)} note(s)")
    return EXIT_FAILED if n_problems else 0


def _shown(findings: Iterator[Finding], silent: bool) -> list[Finding]:
    """The findings, each printed as soon as it is there."""
    kept = []
    for finding in findings:
        kept.append(finding)
        if not silent:
            print(finding.line(), flush=True)
    return kept


def _start_measuring(nproc: int, answer: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "trainer.doctor_ranks", str(nproc), str(answer)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _measured(process: subprocess.Popen, answer: Path, nproc: int) -> Iterator[Finding]:
    try:
        _, said = process.communicate(timeout=_MEASURE_S)
    except subprocess.TimeoutExpired:
        yield problem(
            "ranks", f"{nproc} processes did not meet and add up a tensor within {_MEASURE_S} s",
            "a link between GPUs or a firewall on the loopback hangs: NCCL_P2P_DISABLE=1 and NCCL_DEBUG=INFO tell more",
        )  # fmt: skip
        return
    if process.returncode or not answer.is_file():
        lines = [line for line in said.splitlines() if line.strip()]
        first = next(
            (line for line in lines if "error: " in line), lines[-1] if lines else f"exit code {process.returncode}"
        )
        yield problem(
            "ranks",
            f"{nproc} processes could not add up a tensor: {first}",
            f"in full: python -m trainer.doctor_ranks {nproc} out.json",
        )
        return
    seen = json.loads(answer.read_text())
    yield _matmul(seen)
    if nproc > 1:
        yield ok("all-reduce", f"{nproc} ranks over {seen['backend']}: {seen['all_reduce_gb_per_s']:.2g} GB/s")


def _matmul(seen: dict) -> Finding:
    rates, device = seen["flops_per_s"], seen["device"]
    peak = peak_flops(device, "bfloat16") if seen["backend"] == "nccl" else None
    shown = f"{min(rates) / 1e12:.3g} TFLOP/s a rank" if max(rates) == min(rates) else (
        f"{min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s a rank"
    )  # fmt: skip
    text = f"{shown}, {seen['dtype']} on {device}"
    if peak is not None:
        text += f", {100 * min(rates) / peak:.0f}% of the data sheet's {peak / 1e12:.0f}"
    if peak is not None and min(rates) < _SLOW * peak:
        advice = "look at nvidia-smi: another process, a power cap or heat (clocks_throttle_reasons)"
        return note("matmul", f"{text}: slow (rank {rates.index(min(rates))})", advice)
    if seen["backend"] == "nccl" and min(rates) < _UNEVEN * max(rates):
        return note(
            "matmul",
            f"{text}: rank {rates.index(min(rates))} is slower than the others",
            "the slowest GPU sets the pace: look at it with nvidia-smi",
        )
    return ok("matmul", text)
