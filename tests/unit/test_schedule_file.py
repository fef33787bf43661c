"""Schedules from files: what torch writes is read, and what cannot run is refused with the place."""

import csv

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from parallelize.schedules import read_schedule, schedule_of
from tests.tiny import tiny_config
from trainer.config_rules import resolve_config
from trainer.errors import UserError

GPIPE = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


def write(folder, text: str) -> str:
    (folder / "mine.csv").write_text(text)
    return str(folder / "mine.csv")


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_a_schedule_of_torch_written_to_a_file_is_itself(tmp_path, name, pp):
    ops = get_schedule_ops(name, pp, 8, num_stages_per_rank=2)
    with (tmp_path / "dumped.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["" if op is None else str(op) for op in row] for row in ops])
    named, written = schedule_of(name), read_schedule(str(tmp_path / "dumped.csv"))
    assert written.pp == pp and written.n_microbatches == 8
    assert written.stages == named.stage_ranks(pp, 2 * pp)
    assert written.splits_backward == named.splits_backward


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "no actions in it"),
        ("0F0,0X0\n", "row 1: '0X0' is not an action: write STAGE"),
        ("0F0,0B0\n1F0,1SEND_B0,1B0\n", "row 2: '1SEND_B0' is not an action"),
        ("0F0,0B0,0F0\n1F0,1B0\n", "0F0 is there twice"),
        ("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1\n", "only one row with actions"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n", "the last stage, 1, must run its forwards in the order"),
        ("0F0,0B0,(0F1;0B1)OVERLAP_F_B\n1F0,1B0,1F1,1B1\n", "row 1 before 0F1+0B1, row 2 before 1F1"),
        ("0F0,0B0\n9999999F0,1B0\n", "'9999999F0' is not an action"),
        ("0F0,0B0\n1F\u0660,1B0\n", "is not an action"),
        ("0f0,0b0\n1f0,1b0\n", "in capitals"),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", "stage 0 has F of micro-batch 1: it needs F, and B or both I and W"),
        ("0F0,0I0\n1F0,1B0\n", "stage 0 has F and I of micro-batch 0"),
        ("0F0,0F2,0B0,0B2\n1F0,1F2,1B0,1B2\n", "stage 0 has nothing of micro-batch 1"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no action, but there is a stage 2"),
        ("0F0,0B0,1F0\n1B0\n", "stage 1 is in row 1 and in row 2"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "3 stages in 2 rows"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "wait for each other forever: row 1 before 0B0, row 2 before 1F1"),
        ("0B0,0F0\n1F0,1B0\n", "row 1 before 0B0"),
        ("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n", "must pair a forward with a full backward"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_schedule(path)
    assert expected in str(error.value) and path in str(error.value)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (dict(parallel__pp=4), "has 2 rows, one a pipeline rank: use parallel.pp = 2"),
        (dict(parallel__pp=1), "needs parallel.pp = 2 (it is 1)"),
        (dict(parallel__pp=2, parallel__virtual_stages=2), "has 2 stages, 1 a rank: leave parallel.virtual_stages out"),
        (dict(parallel__pp=2), "runs 2: set parallel.schedule_microbatches = 2"),
        (dict(parallel__pp=2, training__global_batch_size=6), "runs 2: use as many, or a multiple"),
        (dict(parallel__pp=2, parallel__schedule_microbatches=3), "makes 4 micro-batch(es): use 1, 2, 4"),
        (
            dict(parallel__pp=2, parallel__schedule_microbatches=4),
            "schedule_microbatches = 4, but parallel.schedule = ",
        ),
        (dict(parallel__pp=2, parallel__schedule_microbatches=2, model__n_layers=1), "makes 2 stages"),
    ],
)
def test_a_layout_that_does_not_fit_the_file_is_refused(tmp_path, overrides, expected):
    keys = dict(parallel__schedule=f'"{write(tmp_path, GPIPE)}"') | overrides
    with pytest.raises(UserError) as error:
        resolve_config(tiny_config(**keys), keys["parallel__pp"])
    assert expected in error.value.message()


def test_a_missing_file_and_an_unknown_name_are_refused():
    with pytest.raises(UserError, match="parallel.schedule: nowhere.csv: cannot be read"):
        resolve_config(tiny_config(parallel__pp=2, parallel__schedule="nowhere.csv"), 2)
    with pytest.raises(
        UserError, match='parallel.schedule = "1F2B".*expected "GPipe" or "1F1B" or .*the path of a .csv file'
    ):
        tiny_config(parallel__schedule="1F2B")


def test_runs_of_the_schedule(tmp_path):
    config = tiny_config(
        parallel__pp=2, parallel__schedule_microbatches=2, parallel__schedule=f'"{write(tmp_path, GPIPE)}"'
    )
    resolved = resolve_config(config, 2)
    assert (resolved.n_microbatches, resolved.n_schedule_runs, resolved.stage_ranks) == (4, 2, (0, 1))
