"""Data at different layouts: mixtures over resumes, the end of the data, and bad data, the same on every rank."""

import json
import random
import zlib

import pytest

from tests.dist.runs import records, refused, run_config, run_training
from tests.dist.test_cases_resume import LAYOUTS, global_batches, losses, text_of
from trainer.data.prepare import prepare

CURRICULUM = "[{step = 4, weights = {a = 1}}]"


def mixed(folder, **keys) -> dict:
    """Two texts of 13 and 29 rows, 6 to 2; from step 4 on 1 to 2. One lies in prepared shards."""
    for name, n_rows in (("a", 13), ("b", 29)):
        (folder / name).mkdir(exist_ok=True)
        text_of(folder / name, n_rows)
    prepare([str(folder / "b/text.txt")], "bytes", folder / "shards", 1)
    return dict(
        model__n_layers=2, training__steps=8, checkpoint__interval=1, checkpoint__keep_latest=0, data__curriculum=CURRICULUM,
        data__sources__a__path=str(folder / "a/text.txt"), data__sources__a__weight=6,
        data__sources__b__path=str(folder / "shards"), data__sources__b__weight=2,
    ) | keys  # fmt: skip


def test_b30_b32_a_mixture_is_the_same_run_at_any_layout_and_after_a_change_of_dp(ranks, tmp_path):
    keys = mixed(tmp_path)
    straight = global_batches(ranks(1, run_training, run_config(tmp_path / "one", **keys)), dp=1)
    assert len(set(sum(straight, []))) <= 42
    logged = [record["tokens_by_source"] for record in records(tmp_path / "one/run")]
    assert logged[2] == {"a": 3 * 6 * 32, "b": 3 * 2 * 32}
    assert sum(logged[7].values()) == 8 * 8 * 32 and logged[7]["b"] - logged[2]["b"] == 27 * 32  # of 40: a b b a b b ...
    for name, dp in (("dp4", 4), ("dp2_tp2", 2), ("dp2_pp2", 2), ("tp2_pp2", 1)):
        world_size, overrides = LAYOUTS.get(name, (4, dict(parallel__tp=2, parallel__pp=2)))
        saved = tmp_path / "one/run/checkpoints/step-00000002"
        config = run_config(tmp_path / name, checkpoint__resume=str(saved), **keys, **overrides)
        seen = ranks(world_size, run_training, config)
        assert global_batches(seen, dp) == straight[2:], name
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one")[2:], rel=1e-5), name
    changed = dict(data__curriculum="[{step = 2, weights = {a = 1}}]")
    saved = str(tmp_path / "dp4/run/checkpoints/step-00000005")
    for folder, change in (("x", changed), ("y", dict(data__sources__b__weight=3))):
        message = ranks(1, refused, run_config(tmp_path / folder, checkpoint__resume=saved, **keys | change))[0]
        assert "change them from a later step on, in data.curriculum" in message
    later = dict(data__curriculum="[{step = 4, weights = {a = 1}}, {step = 7, weights = {b = 0}}]")
    config = run_config(tmp_path / "z", checkpoint__resume=saved, **keys | later)
    assert global_batches(ranks(2, run_training, config), dp=2)[0] == straight[5]
    assert records(tmp_path / "z/run")[-1]["tokens_by_source"]["b"] == logged[5]["b"]


@pytest.mark.parametrize("name", ["dp4", "dp2_tp2", "dp2_pp2"])
def test_b63_the_end_of_the_data_ends_every_rank_at_the_same_step(ranks, tmp_path, name):
    """29 rows of 8 a step: 3 steps, and 5 rows that do not fill a batch."""
    keys, rows = text_of(tmp_path, 29)
    world_size, overrides = LAYOUTS[name]
    config = run_config(tmp_path, data__epochs=1, training__steps=9, lr_schedule__total_steps=9, **keys, **overrides)
    seen = ranks(world_size, run_training, config)
    assert all(rank["finished"] for rank in seen)
    read = sum(global_batches(seen, dp=4 if name == "dp4" else 2), [])
    assert len(read) == len(set(read)) == 24
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run/checkpoints/step-00000003/trainer_state.json").is_file()
    assert "ends after step 3 of 9 (data.epochs = 1)" in seen[0]["console"]
    again = ranks(world_size, run_training, config)
    assert "already at step 3 of 3" in again[0]["console"]


def test_b63_data_that_ends_before_the_first_step_is_refused(ranks, tmp_path):
    keys, _ = text_of(tmp_path, 5)
    messages = ranks(2, refused, run_config(tmp_path, data__epochs=1, **keys))
    assert messages[0] == messages[1] and "5 rows of training.seq_len = 32 do not fill" in messages[0]
    assert ranks(2, run_training, run_config(tmp_path, data__epochs=2, **keys))[0]["finished"]  # one step


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_b67_bad_lines_are_the_same_on_every_rank(ranks, tmp_path, policy):
    lines = [json.dumps({"text": f"line {number} " * 9}) for number in range(60)]
    lines[7], lines[30] = '{"text": ', '{"text": 3}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = run_config(tmp_path, data__path=str(tmp_path / "a.jsonl"), data__bad_lines=policy, training__steps=2)
    if policy == "error":
        messages = ranks(4, refused, config)
        assert len(set(messages)) == 1 and "a.jsonl:8, byte " in messages[0] and "not one JSON object" in messages[0]
        return
    seen = ranks(4, run_training, config)
    assert "2 bad lines skipped, such as" in seen[0]["console"]
    good = [line for number, line in enumerate(lines) if number not in (7, 30)]
    (tmp_path / "a.jsonl").write_text("\n".join(good))
    clean = ranks(1, run_training, run_config(tmp_path / "clean", data__path=str(tmp_path / "a.jsonl"), training__steps=2))
    assert global_batches(seen, dp=4) == global_batches(clean, dp=1)


def test_a_run_of_a_version_that_shuffled_in_another_way_is_not_mixed_with_this_one(ranks, tmp_path):
    ranks(1, run_training, run_config(tmp_path, training__steps=1))
    path = tmp_path / "run/checkpoints/step-00000001/trainer_state.json"
    state = json.loads(path.read_text())
    del state["data"]["order"], state["crc32"]
    path.write_text(json.dumps(state | {"crc32": zlib.crc32(json.dumps(state, sort_keys=True).encode())}))
    assert "shuffled in another way" in ranks(1, refused, run_config(tmp_path, training__steps=2))[0]


def test_text_that_is_not_small_is_tokenized_by_one_rank_for_all(ranks, tmp_path):
    text = "".join(random.Random(0).choices("abcdefghij \n", k=100_000)) * 90
    (tmp_path / "a.txt").write_text(text)
    cache = tmp_path / "cache"
    keys = dict(data__path=str(tmp_path / "a.txt"), data__cache_dir=str(cache), training__steps=2)
    four = global_batches(ranks(4, run_training, run_config(tmp_path / "4", **keys)), dp=4)
    assert len(list(cache.glob("tokens-*/manifest.json"))) == 1
    assert global_batches(ranks(1, run_training, run_config(tmp_path / "1", **keys)), dp=1) == four
    assert len(list(cache.glob("tokens-*/manifest.json"))) == 1
