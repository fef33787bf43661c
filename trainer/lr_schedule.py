"""The learning rate as a pure function of the step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LrSchedule:
    """Warm-up, then decay. ``at(n)`` is the rate that optimizer step n (1 ... total_steps) uses.

    Warm-up: ``n / (warmup_steps + 1)`` of the peak, so step 1 is above zero and step ``warmup_steps + 1``
    is the peak. Decay: from the peak towards ``min_lr_ratio``, which the step after the last would reach.
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    decay: str = "cosine"  # "constant", "linear", "cosine" or "wsd"
    min_lr_ratio: float = 0.0
    decay_steps: int | None = None  # length of the "wsd" decay; None: a tenth of total_steps

    def at(self, step: int) -> float:
        if step <= self.warmup_steps:
            return self.peak * step / (self.warmup_steps + 1)
        return self.peak * (self.min_lr_ratio + (1 - self.min_lr_ratio) * self._shape(step))

    def _shape(self, step: int) -> float:
        """1 at the peak, towards 0 at the end."""
        last_peak = self.warmup_steps + 1
        if self.decay == "wsd":
            decay_steps = max(1, self.total_steps // 10) if self.decay_steps is None else self.decay_steps
            last_peak = max(last_peak, self.total_steps - decay_steps)
        if self.decay == "constant" or step <= last_peak:
            return 1.0
        progress = min(1.0, (step - last_peak) / (self.total_steps - last_peak + 1))
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1 - progress
