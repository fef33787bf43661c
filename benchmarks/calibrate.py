"""Fitting the constants of the time model to step times: deterministic Gauss-Newton in the logarithms."""

import dataclasses
import math

import numpy as np

from benchmarks.foreign_trainers import Kernels, Run, step_seconds
from parallelize.planner.hardware import Calibration, cluster_of

# Where every fit starts, and what it is drawn to where the data say nothing. From data sheets and kernel benchmarks,
# not from the runs.
START = Calibration(
    label="start", matmul_efficiency=0.8, matmul_half_size=64, attention_efficiency=0.7, attention_half_seq=512,
    attention_backward=0.8, memory_efficiency=0.8, launch_s=3e-5, node_link_efficiency=0.7,
    network_link_efficiency=0.6, microbatch_s=0.01, step_s=0.02, fsdp_exposed=0.6,
)  # fmt: skip
CALIBRATED = {field.name for field in dataclasses.fields(Calibration)}
PULL = 0.05  # weight of a factor e away from START, in squared relative errors
TRUSTED = 0.15  # relative errors beyond this count by their size, no more by their square (Huber)


@dataclasses.dataclass(frozen=True)
class Constants:
    calibration: Calibration = START
    kernels: Kernels = Kernels()

    def with_values(self, values: dict[str, float]) -> "Constants":
        ours = {name: value for name, value in values.items() if name in CALIBRATED}
        theirs = {name: value for name, value in values.items() if name not in CALIBRATED}
        return Constants(dataclasses.replace(self.calibration, **ours), dataclasses.replace(self.kernels, **theirs))

    def value(self, name: str) -> float:
        return getattr(self.calibration if name in CALIBRATED else self.kernels, name)

    def step_seconds(self, run: Run) -> float:
        nodes = -(-run.layout.world_size // 8)
        cluster = dataclasses.replace(cluster_of("a100", nodes), calibration=self.calibration)
        return step_seconds(run, cluster, self.kernels)


def _huber(errors: np.ndarray) -> np.ndarray:
    size = np.abs(errors)
    return np.where(size < TRUSTED, size**2, 2 * TRUSTED * size - TRUSTED**2)


def fit(runs: list[Run], names: list[str], start: Constants = Constants(), weights=1.0, rounds: int = 8) -> Constants:
    """The named constants for which predicted and measured step times differ least."""
    first = np.log([start.value(name) for name in names])
    measured = np.log([run.measured_s for run in runs])

    def constants(x) -> Constants:
        return start.with_values({name: math.exp(value) for name, value in zip(names, x)})

    def errors(x):
        here = constants(x)
        return np.log([here.step_seconds(run) for run in runs]) - measured

    def loss(x, found):
        return float((weights * _huber(found)).sum() + PULL * ((x - first) ** 2).sum())

    x, found, damping = first, errors(first), 1e-2
    for _ in range(rounds):
        slopes = np.stack([(errors(x + 0.01 * unit) - found) / 0.01 for unit in np.eye(len(x))], axis=1)
        trust = weights / np.maximum(1, np.abs(found) / TRUSTED)
        curvature = slopes.T @ (slopes * np.reshape(trust, (-1, 1))) + PULL * np.eye(len(x))
        gradient = slopes.T @ (trust * found) + PULL * (x - first)
        before = loss(x, found)
        while damping < 1e4:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            tried = x + np.clip(step, -0.7, 0.7)
            new = errors(tried)
            if loss(tried, new) < before:
                x, found, damping = tried, new, damping / 3
                break
            damping *= 4
        if damping >= 1e4 or before - loss(x, found) < 1e-3 * before:
            break
    return constants(x)
