"""What a run shows of itself: numbers of every rank in one record, traces, stragglers, logs; none of it changes the run."""

import gc
import gzip
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dist.runs import records, run_config, run_training
from tests.dist.test_command import SMALL, run, start, wait_for_step
from tests.dist.test_faults import run_with_fault
from trainer.pipeline_record import read_record


def with_slow_rank(config, rank: int, seconds: float) -> dict:
    """A run in which every forward of one rank's first block takes longer."""
    from models.decoder import Block

    original = Block.forward

    def slow(self, *arguments, **keys):
        if torch.distributed.get_rank() == rank:
            time.sleep(seconds)
        return original(self, *arguments, **keys)

    Block.forward = slow
    try:
        return run_training(config)
    finally:
        Block.forward = original


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_numbers_of_each_stage_are_in_the_record(ranks, tmp_path, schedule):
    keys = dict(parallel__pp=2, parallel__tp=2, parallel__schedule=schedule, metrics__log_interval=2)
    ranks(4, run_training, run_config(tmp_path / "pp", **keys))
    ranks(1, run_training, run_config(tmp_path / "one", metrics__log_interval=2))
    seen, alone = records(tmp_path / "pp/run"), records(tmp_path / "one/run")
    assert [record["step"] for record in seen] == [2, 4, 5]
    for record, single in zip(seen, alone):
        norms = record["grad_norm_by_stage"]
        assert len(norms) == 2 and math.hypot(*norms) == pytest.approx(single["grad_norm"], rel=1e-4)
        assert 0 < record["bubble_fraction"] < 1
        assert record["memory_peak_bytes"] == max(record["memory_peak_bytes_by_stage"]) > 50e6
        assert all(a <= p for a, p in zip(record["memory_allocated_bytes_by_stage"], record["memory_peak_bytes_by_stage"]))
        assert not {key for key in single if key.endswith("_by_stage")} and "bubble_fraction" not in single
    assert ["first_step_time_s" in record for record in seen] == [True, False, False]


def test_a_slow_stage_is_a_bubble_of_the_other(ranks, tmp_path):
    """Four micro-batches through two stages, one of them far slower: the other is idle most of the time."""
    config = run_config(tmp_path, parallel__pp=2, training__steps=3)
    ranks(2, with_slow_rank, config, 1, 0.05)
    assert all(0.35 < record["bubble_fraction"] < 0.6 for record in records(tmp_path / "run")[1:])


@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
def test_the_slow_rank_is_named(ranks, tmp_path, axis):
    keys = {f"parallel__{axis}": 2, "metrics__straggler_interval": 2, "training__steps": 4, "metrics__log_interval": 3}
    ranks(2, with_slow_rank, run_config(tmp_path, **keys), 1, 0.03)
    seen = {record["step"]: record.get("stragglers") for record in records(tmp_path / "run")}
    assert [step for step, found in seen.items() if found] == [2, 4]
    for found in (seen[2], seen[4]):
        assert found["slowest"] == f"rank 1 ({axis} 1)" and found["host"]
        least, median, most = found["compute_s"]
        assert least <= median <= most and most > 0.03 * 2  # it sleeps in each of its blocks and micro-batches
        assert len(found["communication_s"]) == 2 and found["communication_s"][0] > found["communication_s"][1]


def test_looking_changes_nothing(ranks, tmp_path):
    """Traces, straggler reports, timed actions, collected garbage: the same losses and weights, bit for bit."""
    keys = dict(parallel__pp=2, parallel__tp=2)
    looking = dict(
        debug__profile_steps=(2, 3), debug__profile_ranks=(0, 3), metrics__straggler_interval=2, job__gc_interval=1,
        metrics__pipeline_steps=(3,), metrics__tensorboard=True, validation__interval=2, validation__batches=1,
    )  # fmt: skip
    seen = ranks(4, run_training, run_config(tmp_path / "looking", **keys, **looking))
    plain = ranks(4, run_training, run_config(tmp_path / "plain", metrics__log_interval=5, job__gc_interval=0, metrics__rank_logs=False, **keys))
    for ours, theirs in zip(seen, plain):
        assert all((ours["weights"][name] == weight).all() for name, weight in theirs["weights"].items())
    assert records(tmp_path / "looking/run")[-1]["loss"] == records(tmp_path / "plain/run")[-1]["loss"]
    assert ranks(4, gc.isenabled) == [True] * 4  # as it was before

    traces = sorted(path.name for path in (tmp_path / "looking/run/profile").iterdir())
    assert traces == [f"step-0000000{step}-rank-{rank}.pt.trace.json.gz" for step in (2, 3) for rank in (0, 3)]
    with gzip.open(tmp_path / "looking/run/profile" / traces[0]) as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert "gloo:all_gather" in names and any(name.startswith("aten::") for name in names)
    assert not (tmp_path / "plain/run/profile").exists() and not (tmp_path / "plain/run/logs").exists()


def test_each_rank_has_a_log(ranks, tmp_path):
    config = run_config(tmp_path, parallel__pp=2, training__steps=3, metrics__log_interval=2, checkpoint__interval=2)
    ranks(2, run_training, config)
    for rank in range(2):
        lines = (tmp_path / f"run/logs/rank-0000{rank}.log").read_text().splitlines()
        assert all(f"INFO rank {rank} (pp {rank}): " in line for line in lines)
        assert [line.split("): ")[1].split(":")[0] for line in lines] == [
            "started", "step 2", "checkpoint of step 2", "step 3", "checkpoint of step 3"
        ]  # fmt: skip


def curves_in(folder: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(p.step, p.value) for p in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_has_every_curve_once_over_a_restart(ranks, tmp_path):
    keys = dict(metrics__tensorboard=True, parallel__pp=2, validation__interval=2, validation__batches=1)
    ranks(2, run_training, run_config(tmp_path, **keys | dict(training__steps=3)))
    ranks(2, run_training, run_config(tmp_path, **keys))
    curves, seen = curves_in(tmp_path / "run/tensorboard"), records(tmp_path / "run")
    for key, tag in (("loss", "training/loss"), ("lr", "training/lr"), ("tokens_seen", "training/tokens_seen")):
        assert curves[tag] == [(r["step"], pytest.approx(r[key], rel=1e-6)) for r in seen], tag
    for stage in range(2):
        points = [(r["step"], pytest.approx(r["grad_norm_by_stage"][stage], rel=1e-6)) for r in seen]
        assert curves[f"training/grad_norm_by_stage/stage_{stage}"] == points
    # The first step of each start is no measure of speed.
    assert [step for step, _ in curves["throughput/tokens_per_s"]] == [2, 3, 5]
    assert [step for step, _ in curves["validation/loss"]] == [2, 3, 4, 5]
    assert [step for step, _ in curves["time/first_step_s"]] == [1, 4]


def test_tensorboard_knows_config_charts_and_final_metrics(ranks, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    keys = dict(metrics__tensorboard=True, lr_schedule__total_steps=9)
    for steps in (2, 4):
        ranks(1, run_training, run_config(tmp_path, training__steps=steps, **keys))
    accumulator = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    text = accumulator.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    global_batch_size = 8" in text
    assert "custom_scalars__config__" in accumulator.Tags()["tensors"]
    row = EventAccumulator(str(tmp_path / "run/hparams")).Reload()
    stored = row.summary_metadata
    session = metadata.parse_session_start_info_plugin_data(stored["_hparams_/session_start_info"].plugin_data.content)
    assert session.hparams["optimizer.lr"].number_value == pytest.approx(0.01)
    assert session.hparams["training.steps"].number_value == 4  # of the last start
    final = {tag: [(p.step, p.value) for p in row.Scalars(tag)] for tag in row.Tags()["scalars"]}
    last = records(tmp_path / "run")[-1]
    assert final["training/loss"] == [(4, pytest.approx(last["loss"], rel=1e-6))] and "throughput/tokens_per_s" in final
    assert session.hparams["parallel.schedule"].string_value == "1F1B"
    experiment = metadata.parse_experiment_plugin_data(stored["_hparams_/experiment"].plugin_data.content)
    assert "training/loss" in [metric.name.tag for metric in experiment.metric_infos]
    assert "_hparams_/session_end_info" in stored


def test_out_of_memory_is_explained(tmp_path):
    result = run_with_fault(tmp_path, "1 3 memory", "--training.steps=4")
    assert result.returncode == 1
    said = [line for line in result.stderr.splitlines() if line.startswith("[rank 1 (dp_shard 1)]")]
    assert "out of memory in step 3" in said[0] and "parameters" in said[0] and "optimizer state" in said[0], result.stderr
    assert "embedding" in said[1] and "activation_checkpoint.mode" in said[2]
    assert "DefaultCPUAllocator" in result.stderr  # the original is kept
    assert "out of memory in step 3" in (tmp_path / "run/logs/rank-00001.log").read_text()


def test_out_of_memory_while_building_the_model_is_explained(tmp_path):
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged")
    sizes = ["--model.vocab_size=10000000000", "--training.seq_len=8", "--training.global_batch_size=2"]
    result = run(tmp_path, "evaluate", *sizes, "--data.path=text.txt", module="trainer")
    assert result.returncode == 1
    assert "[rank 0] error: out of memory in building the model. What helps: a larger parallel.dp_shard" in result.stderr
    assert "DefaultCPUAllocator" in result.stderr  # the original is kept


def test_anomaly_names_the_operation_and_determinism_keeps_the_losses(tmp_path):
    result = run(tmp_path, *SMALL, "--training.steps=6", "--optimizer.lr=1e30", "--debug.anomaly=true", "--job.output_dir=a")
    assert result.returncode == 1 and "returned nan values in its" in result.stderr, result.stderr
    for name, flags in (("plain", []), ("determined", ["--debug.determinism=true"])):
        assert run(tmp_path, *SMALL, "--training.steps=3", f"--job.output_dir={name}", *flags).returncode == 0
    losses = [[record["loss"] for record in records(tmp_path / name)] for name in ("plain", "determined")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--debug.profile_steps=[2]", "--debug.profile_ranks=[3]"], "debug.profile_ranks = [3], but the ranks are 0 to 0"),
        (["--debug.profile_ranks=[]"], "debug.profile_ranks"),
        (["--debug.profile_steps=[0]"], "debug.profile_steps"),
        (["--metrics.straggler_interval=-1"], "metrics.straggler_interval"),
        (["--job.gc_interval=x"], "job.gc_interval"),
        (["--debug.profile=[1]"], "did you mean debug.profile_steps?"),
    ],
)
def test_wrong_values_are_named(tmp_path, flags, said):
    result = run(tmp_path, *SMALL, *flags)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr, result.stderr


def records_of_wandb(path: Path) -> Iterator[bytes]:
    """The records of its log: a header of 7 bytes, then LevelDB's format, blocks of 32 KiB of (checksum, length, type, part)."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # what is left of a block is padding
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def test_weights_and_biases_gets_the_same_curves(tmp_path):
    """Its own files of a run without a network; the run started twice is one run there."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    keys = ["--metrics.wandb_project=tiny", "--job.output_dir=run", "--metrics.tensorboard=false", "--checkpoint.interval=1"]
    for steps in (2, 4):
        result = run(tmp_path, *SMALL, *keys, f"--training.steps={steps}", WANDB_MODE="offline")
        assert result.returncode == 0 and result.stderr == "", result.stderr
    points, names = {}, set()
    for path in sorted((tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")):
        names.add(path.name)
        for record in map(Record.FromString, records_of_wandb(path)):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "training/loss" in items:
                points[record.history.step.num] = items["training/loss"]
    assert points == {record["step"]: record["loss"] for record in records(tmp_path / "run")} and len(points) == 4
    assert len(names) == 1


def test_the_bubble_is_that_of_the_noted_actions(ranks, tmp_path):
    """Also where one rank comes to the step late: it has written a trace, or a record, meanwhile."""
    for index, traced in enumerate((0, 1)):
        keys = dict(
            parallel__pp=2, training__steps=4, metrics__log_interval=2, debug__profile_steps=(3,),
            debug__profile_ranks=(traced,), metrics__pipeline_steps=(4,),
        )  # fmt: skip
        ranks(2, run_training, run_config(tmp_path / str(index), **keys))
        step, replay = read_record(tmp_path / str(index) / "run/plots", pp=2)
        seen = records(tmp_path / str(index) / "run")[-1]
        assert step == seen["step"] == 4
        # The two clocks are one here, on one machine, and what is noted in the file is what was counted.
        assert seen["bubble_fraction"] == pytest.approx(replay.idle_share, abs=0.02)


def test_the_time_of_a_trace_is_in_no_step(ranks, tmp_path):
    """Neither on the rank that writes it nor on the one that would wait for it."""
    keys = dict(parallel__dp_shard=2, training__steps=4, debug__profile_steps=(2,))
    for traced in (0, 1):
        folder = tmp_path / str(traced)
        ranks(2, with_slow_traces, run_config(folder, **keys, debug__profile_ranks=(traced,)), 1.5)
        seen = records(folder / "run")
        assert all(record["step_time_s"] < 1.5 for record in seen[1:]), [record["step_time_s"] for record in seen]


def with_slow_traces(config, seconds: float) -> dict:
    from trainer.profiler import Profiler

    original = Profiler._write

    def slow(self, *arguments):
        time.sleep(seconds)
        original(self, *arguments)

    Profiler._write = slow
    try:
        return run_training(config)
    finally:
        Profiler._write = original


def test_a_place_that_fails_is_given_up_and_the_run_goes_on(tmp_path):
    """TensorBoard's folder deleted in the middle; a console that nobody reads; but metrics.jsonl is the run's memory."""
    keys = ["--training.steps=40", "--checkpoint.interval=0", "--job.output_dir=run"]
    process = start(tmp_path, *SMALL, *keys)
    wait_for_step(tmp_path / "run", 3)
    shutil.rmtree(tmp_path / "run/tensorboard")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 0 and "Traceback" not in err, err
    assert "The run goes on without TensorBoard" in err
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 41))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tensorboard").write_text("a file")
    result = run(tmp_path, *SMALL, "--training.steps=2", "--job.output_dir=other")
    assert result.returncode == 2 and "other/tensorboard cannot be written" in result.stderr, result.stderr


def test_weights_and_biases_that_do_not_answer_stop_no_run(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    keys = [*SMALL, "--training.steps=2", "--metrics.wandb_project=x"]
    outage = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    result = run(tmp_path, *keys, "--job.output_dir=outage", **outage)
    assert result.returncode == 0 and "warning: no report to Weights & Biases" in result.stderr, result.stderr
    assert len(records(tmp_path / "outage")) == 2
    for mode in ({"WANDB_MODE": "bogus"}, {"WANDB_API_KEY": "short"}):
        result = run(tmp_path, *keys, "--job.output_dir=wrong", **mode)
        assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
        assert "metrics.wandb_project = 'x'" in result.stderr
