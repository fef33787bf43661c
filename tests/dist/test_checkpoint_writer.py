"""Saving: in the background, what is kept, and what happens where it fails."""

import contextlib
import io
import pickle
import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.dist.runs import StopAt, records, run_config, run_training
from trainer.checkpoint_files import read_tensors, stored_tensors
from trainer.checkpoint_folder import complete_checkpoints
from trainer.checkpoint_writer import CheckpointWriter
from trainer.errors import UserError


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    stored = stored_tensors(folder)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    read_tensors(folder, tensors)
    return tensors


@contextlib.contextmanager
def slow_disk(seconds: float):
    """Every save takes this much longer, before its first file."""
    original = CheckpointWriter._write
    CheckpointWriter._write = lambda *arguments: (time.sleep(seconds), original(*arguments))
    try:
        yield
    finally:
        CheckpointWriter._write = original


def run_on_slow_disk(config, seconds: float) -> dict:
    with slow_disk(seconds):
        return run_training(config)


@pytest.mark.parametrize("overrides", [{}, dict(parallel__pp=2, parallel__tp=2)], ids=["dp4", "pp2_tp2"])
def test_b41_an_async_save_is_of_one_step(ranks, tmp_path, overrides):
    """While a slow writer works training goes on for steps; what it writes is what a synchronous save writes."""
    keys = dict(training__steps=8, checkpoint__interval=2, checkpoint__keep_latest=0, **overrides)
    ranks(4, run_training, run_config(tmp_path / "sync", **keys))
    asynchronous = run_config(tmp_path / "async", checkpoint__async_save=True, **keys)
    ranks(4, run_on_slow_disk, asynchronous, 0.3)
    folders = [complete_checkpoints(tmp_path / name / "run/checkpoints") for name in ("sync", "async")]
    assert [folder.name for folder in folders[0]] == [folder.name for folder in folders[1]]
    assert [folder.name[-1] for folder in folders[0]] == ["2", "4", "6", "8"]  # a second save waits for the first
    for sync, background in zip(*folders):
        want, got = all_tensors(sync), all_tensors(background)
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want), background
    losses = [[record["loss"] for record in records(tmp_path / name / "run")] for name in ("sync", "async")]
    assert losses[0] == losses[1]


def run_and_watch(config, seconds: float) -> list[list[str]]:
    """What complete checkpoints there were, at every moment of a run on a slow disk."""
    seen, over = [], threading.Event()

    def watch():
        while not over.is_set():
            now = [folder.name for folder in complete_checkpoints(Path(config.job.output_dir) / "checkpoints")]
            if not seen or seen[-1] != now:
                seen.append(now)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run_on_slow_disk(config, seconds)
    finally:
        over.set()
        thread.join()
    return seen


def run_until_asked(config, step: int, seconds: float) -> dict:
    """One rank alone is asked to stop, on a slow disk."""
    with slow_disk(seconds):
        return run_training(config, stop=StopAt(step) if torch.distributed.get_rank() == 1 else None)


@pytest.mark.parametrize("step, complete", [(3, "23"), (4, "24"), (6, "46")])
def test_b83_asked_to_stop_while_a_save_is_under_way(ranks, tmp_path, step, complete):
    """The save is finished, then that of the step at which all agreed; the rest of the curve is the same."""
    keys = dict(training__steps=6, checkpoint__interval=2, checkpoint__async_save=True)
    straight = ranks(2, run_training, run_config(tmp_path / "straight", **keys))[0]
    for seen in ranks(2, run_until_asked, run_config(tmp_path, **keys), step, 0.3):
        assert seen["finished"] is (step == 6) and seen["error"] is None
    assert "".join(f.name[-1] for f in complete_checkpoints(tmp_path / "run/checkpoints")) == complete
    ranks(2, run_training, run_config(tmp_path, **keys))
    got, want = records(tmp_path / "run"), records(tmp_path / "straight/run")
    assert [r["loss"] for r in got] == [r["loss"] for r in want]
    resumed = all_tensors(tmp_path / "run/checkpoints/step-00000006")
    assert all(torch.equal(resumed[f"model.{name}"], torch.from_numpy(w)) for name, w in straight["weights"].items())


@pytest.mark.parametrize("async_save", [False, True])
def test_b39_at_every_moment_there_is_a_complete_checkpoint(ranks, tmp_path, async_save):
    config = run_config(tmp_path, training__steps=6, checkpoint__keep_latest=1, checkpoint__async_save=async_save)
    for seen in ranks(2, run_and_watch, config, 0.1):
        while seen and not seen[0]:  # before the first
            seen.pop(0)
        assert seen and all(seen)
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000006"]


def test_b39_what_cannot_be_resumed_from_is_not_counted(ranks, tmp_path):
    """A folder without its state, and one of a later step that was damaged, never push a good one out."""
    ranks(2, run_training, run_config(tmp_path, training__steps=4, checkpoint__keep_latest=2))
    root = tmp_path / "run/checkpoints"
    (root / "step-00000004/__0_0.distcp").write_bytes(b"torn")
    (root / "step-00000009").mkdir()
    longer = run_config(tmp_path, training__steps=6, checkpoint__interval=0, checkpoint__keep_latest=1)
    ranks(2, run_with_failing_writes, longer, 1)
    assert [folder.name[-1] for folder in complete_checkpoints(root)] == ["3"]  # the damaged one is set aside
    ranks(2, run_training, longer)
    assert [folder.name[-1] for folder in complete_checkpoints(root)] == ["6"]


def test_keep_every_keeps_for_good(ranks, tmp_path):
    keys = dict(training__steps=7, checkpoint__keep_latest=2, checkpoint__keep_every=3)
    ranks(2, run_training, run_config(tmp_path, **keys))
    assert [folder.name[-1] for folder in complete_checkpoints(tmp_path / "run/checkpoints")] == ["3", "6", "7"]


@contextlib.contextmanager
def file_size_limit(n_bytes: int):
    """Files of this process cannot grow beyond: the operating system fails the write, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_with_failing_writes(config, on_rank: int) -> dict:
    limited = torch.distributed.get_rank() == on_rank
    with file_size_limit(60_000) if limited else contextlib.nullcontext(), contextlib.redirect_stderr(io.StringIO()) as said:
        seen = run_training(config)
        return seen | {"stderr": said.getvalue()}


@pytest.mark.parametrize("async_save", [False, True])
def test_b42_a_write_that_fails_on_one_rank_is_everyones_error(ranks, tmp_path, async_save):
    """It names path, rank and reason; the checkpoints before it stay, and a later start goes on from them."""
    ranks(2, run_training, run_config(tmp_path, training__steps=2))
    longer = run_config(tmp_path, training__steps=9, checkpoint__async_save=async_save, checkpoint__interval=4)
    for seen in ranks(2, run_with_failing_writes, longer, 1):
        assert seen["finished"] is None
        assert "step-00000004 could not be written" in seen["error"] and "File too large (rank 1)" in seen["error"]
        assert "MiB are free there" in seen["error"]
    root = tmp_path / "run/checkpoints"
    assert sorted(folder.name for folder in root.iterdir()) == ["step-00000001", "step-00000002"]
    assert 4 <= records(tmp_path / "run")[-1]["step"] <= (7 if async_save else 4)
    assert ranks(2, run_training, longer)[0]["finished"]
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 10))


@pytest.mark.parametrize("async_save", [False, True])
def test_b42_warn_goes_on_but_the_last_one_must_be_written(ranks, tmp_path, async_save):
    keys = dict(checkpoint__on_failure="warn", checkpoint__async_save=async_save, checkpoint__interval=2)
    ran = ranks(2, run_with_failing_writes, run_config(tmp_path, training__steps=5, **keys), 1)
    for seen in ran:
        assert "step-00000005 could not be written" in seen["error"]
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    for step in (2, 4, 5):
        assert f"warning: checkpoint {tmp_path}/run/checkpoints/step-0000000{step} could not" in ran[0]["stderr"]


def test_b42_a_folder_that_cannot_be_made(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("a file in its place")
    for seen in ranks(2, run_training, run_config(tmp_path)):
        assert f"{tmp_path}/run/checkpoints" in seen["error"] and "(rank 0)" in seen["error"]


def test_b43_the_last_step_is_saved_once(ranks, tmp_path):
    keys = dict(training__steps=7, checkpoint__interval=3, checkpoint__keep_latest=0, checkpoint__async_save=True)
    ranks(2, run_training, run_config(tmp_path, **keys))
    assert sorted(folder.name[-1] for folder in (tmp_path / "run/checkpoints").iterdir()) == ["3", "6", "7"]


def name_in_a_pickle(module: str, name: str) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"."


@pytest.mark.parametrize(
    "module, name",
    [("builtins", "exec"), ("os", "system"), ("torch", "load"), ("torch.serialization", "load")]
    # What torch's module of records holds besides them: dataclass() alone runs the names of its fields.
    + [("torch.distributed.checkpoint.metadata", name) for name in ("dataclass", "field", "os", "torch", "__builtins__")],
)
def test_a_checkpoint_names_nothing_but_records(tmp_path, module, name):
    """Whatever the checksums say: they lie in the same folder."""
    (tmp_path / ".metadata").write_bytes(name_in_a_pickle(module, name))
    with pytest.raises(UserError, match=f"{name} is not part of a checkpoint"):
        stored_tensors(tmp_path)


def test_a_checkpoint_holds_nothing_but_tensors(ranks, tmp_path):
    """torch unpickles an entry that calls itself bytes, without restraint."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    ranks(2, run_training, run_config(tmp_path, training__steps=1))
    folder = tmp_path / "run/checkpoints/step-00000001"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["rng.cpu.0"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="BytesStorageMetadata is not part of a checkpoint"):
        stored_tensors(folder)
    with pytest.raises(UserError, match="is not part of a checkpoint"):
        read_tensors(folder, {"model.norm.weight": torch.empty(64)})


def run_until_nan(config, step: int, seconds: float) -> dict:
    with slow_disk(seconds):
        return run_training(config, (step, 0, float("nan")))


def test_b21_a_stop_while_a_save_is_under_way_names_what_is_there_then(ranks, tmp_path):
    config = run_config(tmp_path, checkpoint__async_save=True, checkpoint__keep_latest=1)
    for seen in ranks(2, run_until_nan, config, 3, 0.3):
        assert "stopped at step 3" in seen["error"] and "The newest checkpoint is " in seen["error"]
        assert seen["error"].split("The newest checkpoint is ")[1] == str(tmp_path / "run/checkpoints/step-00000002")
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]


def test_b21_steps_are_skipped_up_to_the_limit_in_a_row(ranks, tmp_path):
    config = run_config(tmp_path, training__nonfinite="skip", training__nonfinite_limit=3, training__steps=9)
    bad = (2, 3, 5, 6, 7)  # two in a row, and then three
    for seen in ranks(2, run_training, config, (bad, 0, float("nan"))):
        assert "stopped at step 7" in seen["error"]
