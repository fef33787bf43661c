import pytest

from trainer.lr_schedule import LrSchedule


def rates(n=None, **options):
    schedule = LrSchedule(peak=1.0, **options)
    return [schedule.at(step) for step in range(1, (n or schedule.total_steps) + 1)]


def test_b81_worked_values_of_the_convention():
    expected = [1 / 3, 2 / 3, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert rates(total_steps=10, warmup_steps=2, decay="linear") == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd", "constant"])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
@pytest.mark.parametrize("warmup, after", [(2, 8), (0, 10), (10, 0), (5, 10), (2, 0), (0, 1)])
def test_b81_invariants(decay, min_lr_ratio, warmup, after):
    schedule = dict(total_steps=warmup + after, warmup_steps=warmup, decay=decay, min_lr_ratio=min_lr_ratio)
    seen = rates(**schedule)
    assert seen[0] > 0 and seen[-1] > 0
    assert all(rate >= min_lr_ratio for rate in seen[warmup:])
    # The peak is step warmup + 1; a schedule that ends with its warm-up stops just short of it.
    assert max(seen) == (1.0 if after else warmup / (warmup + 1))
    largest_drop = max((a - b for a, b in zip(seen, seen[1:])), default=0)
    assert largest_drop < 0.51, "a jump where two pieces join"


def test_b81_wsd_decays_by_its_own_progress():
    seen = rates(total_steps=10, warmup_steps=2, decay="wsd", decay_steps=4)
    assert seen == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_a_short_wsd_still_decays():
    assert rates(total_steps=5, decay="wsd") == pytest.approx([1, 1, 1, 1, 0.5])


def test_a_pure_function_of_the_step():
    schedule = LrSchedule(peak=3e-4, total_steps=100, warmup_steps=10, decay="cosine", min_lr_ratio=0.1)
    forwards = [schedule.at(step) for step in range(1, 101)]
    assert [schedule.at(step) for step in range(100, 0, -1)] == forwards[::-1]
