"""Which checkpoints count: at a start, and when old ones are removed."""

import json
import os
import shutil
import zlib

import pytest

from tests.dist.runs import StopAt, records, refused, run_config, run_training
from tests.dist.test_checkpoint_damage import damage_a_file
from trainer.checkpoint_folder import complete_checkpoints


def steps_kept(tmp_path) -> list[int]:
    return [int(folder.name.split("-")[1]) for folder in complete_checkpoints(tmp_path / "run/checkpoints")]


def test_b39_a_damaged_checkpoint_is_set_aside_and_counts_no_more(ranks, tmp_path):
    keys = dict(checkpoint__keep_latest=2, lr_schedule__total_steps=9)
    ranks(2, run_training, run_config(tmp_path, training__steps=4, **keys))
    root = tmp_path / "run/checkpoints"
    damage_a_file(root / "step-00000004/__0_0.distcp", "flipped")
    ranks(2, run_training, run_config(tmp_path, training__steps=5, checkpoint__interval=0, **keys))
    assert steps_kept(tmp_path) == [3, 5]  # the newest two of those that one can go on from
    assert (root / "step-00000004.damaged/__0_0.distcp").is_file()


def test_b39_a_damaged_best_checkpoint_pushes_no_good_one_out(ranks, tmp_path):
    keys = dict(
        checkpoint__keep_latest=1, checkpoint__keep_best=True, validation__interval=1, validation__batches=1,
        lr_schedule__decay="constant",
    )  # fmt: skip
    ranks(2, run_training, run_config(tmp_path, training__steps=4, **keys | dict(checkpoint__keep_latest=2)))
    damage_a_file(tmp_path / "run/checkpoints/step-00000004/__0_0.distcp", "flipped")
    ranks(2, run_training, run_config(tmp_path, training__steps=7, optimizer__lr=1.0, **keys))  # it only gets worse
    losses = {record["step"]: record["validation_loss"] for record in records(tmp_path / "run")}
    assert losses[3] < min(losses[step] for step in (5, 6, 7)), losses
    assert steps_kept(tmp_path) == [3, 7]


def test_the_best_is_of_the_sets_that_are_validated_now(ranks, tmp_path):
    """Losses on another text say nothing: after a change the comparison begins anew, and the change is said."""
    (tmp_path / "easy.txt").write_text("aaaa " * 400)
    (tmp_path / "hard.txt").write_text("".join(chr(33 + 7 * i * i % 90) for i in range(2000)))
    keys = dict(
        checkpoint__keep_latest=1, checkpoint__keep_best=True, validation__interval=1, validation__batches=1,
        lr_schedule__decay="constant",
    )  # fmt: skip
    easy, hard = ({"one": str(tmp_path / f"{name}.txt")} for name in ("easy", "hard"))
    ranks(1, run_training, run_config(tmp_path, training__steps=3, validation__sets=easy, **keys))
    seen = ranks(1, run_training, run_config(tmp_path, training__steps=8, validation__sets=hard, **keys))[0]
    assert "validation.sets: {'one': '" in seen["console"]
    losses = {record["step"]: record["validation_loss"] for record in records(tmp_path / "run")}
    best = min((4, 5, 6, 7, 8), key=losses.get)
    assert losses[3] < losses[best], losses  # else there is nothing to mistake
    assert steps_kept(tmp_path) == sorted({best, 8})


def test_the_folder_that_a_run_was_started_from_may_go(ranks, tmp_path):
    """Its own checkpoints come first, whatever has become of the one that checkpoint.resume names."""
    ranks(1, run_training, run_config(tmp_path / "source", training__steps=2))
    source = tmp_path / "source/run/checkpoints/step-00000002"
    keys = dict(checkpoint__resume=str(source), checkpoint__keep_latest=3)
    ranks(1, run_training, run_config(tmp_path, training__steps=4, **keys))
    shutil.rmtree(source)
    damage_a_file(tmp_path / "run/checkpoints/step-00000004/__0_0.distcp", "flipped")  # nobody asked for this one
    seen = ranks(1, run_training, run_config(tmp_path, training__steps=5, **keys))[0]
    assert "checkpoints/step-00000003" in seen["console"]
    assert [record["step"] for record in records(tmp_path / "run")] == [3, 4, 5]
    assert "is not a checkpoint folder" in ranks(1, refused, run_config(tmp_path / "new", **keys))[0]


def test_weights_that_a_run_was_started_from_may_be_damaged_later(ranks, tmp_path):
    ranks(1, run_training, run_config(tmp_path / "source", training__steps=1))
    source = tmp_path / "source/run/checkpoints/step-00000001"
    keys = dict(checkpoint__init_from=str(source), checkpoint__keep_latest=3)
    ranks(1, run_training, run_config(tmp_path, training__steps=2, **keys))
    (source / "trainer_state.json").write_text("{")
    (tmp_path / "run/checkpoints/step-00000002/trainer_state.json").write_text("null")
    seen = ranks(1, run_training, run_config(tmp_path, training__steps=3, **keys))[0]
    assert "checkpoints/step-00000001" in seen["console"] and seen["finished"]


def test_b26_a_changed_text_is_noticed_and_a_moved_one_is_the_same(ranks, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 60)
    keys = dict(data__source="text", data__path=str(text), training__steps=2)
    ranks(1, run_training, run_config(tmp_path, **keys))
    moved = tmp_path / "moved.txt"
    shutil.copy(text, moved)
    longer = dict(training__steps=3, data__path=str(moved))
    assert ranks(1, run_training, run_config(tmp_path, **keys | longer))[0]["finished"]
    moved.write_text(moved.read_text().replace("worst", "Worst", 1))
    message = ranks(1, refused, run_config(tmp_path, **keys | longer | dict(training__steps=4)))[0]
    assert "tokens that are not those the run" in message and str(moved) in message


def test_a_limit_of_steps_in_a_row_holds_over_a_resume(ranks, tmp_path):
    keys = dict(training__nonfinite="skip", training__nonfinite_limit=3, lr_schedule__total_steps=9)
    ranks(1, run_training, run_config(tmp_path, training__steps=3, **keys), ((2, 3), 0, float("nan")))
    seen = ranks(1, run_training, run_config(tmp_path, training__steps=6, **keys), (1, 0, float("nan")))[0]
    assert seen["error"] is not None and "the 3th in a row" in seen["error"], seen["error"]


def test_checkpoints_of_an_earlier_version_open(ranks, tmp_path):
    """Without what it did not write down yet."""
    ranks(1, run_training, run_config(tmp_path, training__steps=2))
    for folder in complete_checkpoints(tmp_path / "run/checkpoints"):
        path = folder / "trainer_state.json"
        state = json.loads(path.read_text())
        for key in ("validation_loss", "nonfinite_in_a_row", "data", "crc32"):
            del state[key]
        del state["config"]["debug"], state["config"]["validation"]
        del state["config"]["data"]["packing"], state["config"]["data"]["isolate_documents"]
        path.write_text(json.dumps(state | {"crc32": zlib.crc32(json.dumps(state, sort_keys=True).encode())}))
    assert ranks(1, run_training, run_config(tmp_path, training__steps=3))[0]["finished"]


def test_foreign_lines_in_the_records_do_no_harm(ranks, tmp_path):
    ranks(1, run_training, run_config(tmp_path, training__steps=2))
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"note": "mine"}\n[1]\n3\n{"step": "x"}\n')
    ranks(1, run_training, run_config(tmp_path, training__steps=3))
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("what", ["link", "folder"])
def test_a_checkpoint_that_was_moved_to_another_disk_retires(ranks, tmp_path, what):
    keys = dict(checkpoint__keep_latest=1)
    ranks(1, run_training, run_config(tmp_path, training__steps=2, **keys))
    folder, elsewhere = tmp_path / "run/checkpoints/step-00000002", tmp_path / "elsewhere"
    if what == "link":
        shutil.move(folder, elsewhere)
        os.symlink(elsewhere, folder)
    ranks(1, run_training, run_config(tmp_path, training__steps=3, **keys))
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000003"]
    assert elsewhere.exists() == (what == "link")


def test_no_checkpoint_where_none_is_wanted(ranks, tmp_path):
    """Neither at the end nor at a stop; and the next start begins anew."""
    config = run_config(tmp_path, checkpoint__enabled=False)
    assert [ranks(1, run_training, config, None, stop)[0]["finished"] for stop in (StopAt(2), None)] == [False, True]
    assert not (tmp_path / "run/checkpoints").exists() and len(records(tmp_path / "run")) == 5
