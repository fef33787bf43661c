"""Cases about going on: which rows and rates a step uses, what a save leaves, where the data ends."""

import random
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.dist.parity import CPU, as_numpy
from tests.dist.pool import mesh_of
from tests.dist.runs import records, run_config, run_training
from tests.dist.test_cases_state import merged
from tests.tiny import reference_model
from trainer import evaluate
from trainer.build import build_model, build_train_step
from trainer.checkpoint import Checkpointer, stored_tensors
from trainer.config_rules import resolve_config
from trainer.data.order import RowOrder
from trainer.hf_directory import read_json
from trainer.hf_export import export_run
from trainer.observe import digest, whole
from trainer.optimizer import optimizer_tensors

SEQ_LEN = 32
LAYOUTS = {
    "dp2": (2, {}),
    "dp4": (4, {}),
    "dp2_tp2": (4, dict(parallel__tp=2)),
    "dp2_pp2": (4, dict(parallel__pp=2)),
}


def text_of(folder: Path, n_rows: int) -> tuple[dict, torch.Tensor]:
    """A text of exactly ``n_rows`` different rows and a shorter one: its keys, and the rows int64 [n_rows, 2, S]."""
    text = "".join(random.Random(n_rows).choices("abcdefghij", k=n_rows * SEQ_LEN + 7))
    (folder / "text.txt").write_text(text)
    stream = torch.tensor(list(text.encode()) + [256])
    rows = [stream[row * SEQ_LEN : (row + 1) * SEQ_LEN + 1] for row in range(n_rows)]
    keys = dict(model__n_layers=2, data__source="text", data__path=str(folder / "text.txt"), data__tokenizer="bytes")
    return keys, torch.stack([torch.stack((row[:-1], row[1:])) for row in rows])


def in_order(rows: torch.Tensor, n_steps: int, batch_size: int = 8, shuffle: bool = True) -> list[list[str]]:
    """The global batch of each step as digests: epoch after epoch, each row once in each."""
    order, samples = RowOrder(len(rows), 0, shuffle), []
    while len(samples) < n_steps * batch_size:
        epoch = order.epoch(len(samples) // len(rows))
        assert sorted(epoch) == list(range(len(rows)))
        samples += [digest(rows[row]) for row in epoch]
    assert len(set(samples)) == len(rows)
    return [samples[step * batch_size : (step + 1) * batch_size] for step in range(n_steps)]


def global_batches(seen: list[dict], dp: int) -> list[list[str]]:
    """Each step's batch over all ranks, in order of the data ranks; ranks of one data rank must read the same."""
    shares = {}
    for rank in seen:
        assert shares.setdefault(rank["dp_index"], rank["batches"]) == rank["batches"], "tp or pp peers differ"
    assert sorted(shares) == list(range(dp))
    return [sum((shares[index][step] for index in range(dp)), []) for step in range(len(shares[0]))]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder / "run")]


def test_b30_saved_at_dp_2_it_goes_on_at_dp_1_and_4_with_the_very_next_rows(ranks, tmp_path):
    """29 rows: the saved step 3 ends at row 24 of the first epoch, the first resumed step reaches into the second."""
    keys, rows = text_of(tmp_path, 29)
    keys |= dict(training__steps=6, checkpoint__interval=3)
    straight = global_batches(ranks(2, run_training, run_config(tmp_path / "straight", **keys)), dp=2)
    assert straight == in_order(rows, 6)
    saved = tmp_path / "straight/run/checkpoints/step-00000003"
    for dp in (1, 4):
        config = run_config(tmp_path / str(dp), checkpoint__resume=str(saved), **keys)
        resumed = ranks(dp, run_training, config)
        assert "resuming" in resumed[0]["console"]
        assert global_batches(resumed, dp) == straight[3:]
        assert losses(tmp_path / str(dp)) == pytest.approx(losses(tmp_path / "straight")[3:], rel=1e-5)


@pytest.mark.parametrize("layout", ["dp2_tp2", "dp2_pp2"])
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "file_order"])
def test_b32_peers_read_the_same_and_data_ranks_share_out_the_rows_in_order(ranks, tmp_path, layout, shuffle):
    world_size, overrides = LAYOUTS[layout]
    keys, rows = text_of(tmp_path, 24)
    config = run_config(tmp_path, training__steps=3, data__shuffle=shuffle, **keys, **overrides)
    seen = ranks(world_size, run_training, config)
    assert global_batches(seen, dp=2) == in_order(rows, 3, shuffle=shuffle)
    read = {rank["dp_index"]: set(sum(rank["batches"], [])) for rank in seen}
    assert read[0].isdisjoint(read[1]) and len(read[0]) == len(read[1]) == 12


def rates_of(seen: list[dict]) -> list[float]:
    """The rate of each update, which must be that of every group on every rank."""
    assert all(rank["rates"] == seen[0]["rates"] for rank in seen)
    assert all(len(groups) == 1 for groups in seen[0]["rates"])
    return [rate for groups in seen[0]["rates"] for rate in groups]


SCHEDULES = {
    "cosine": {},
    "wsd": dict(lr_schedule__decay="wsd", lr_schedule__decay_steps=4),
}


@pytest.mark.parametrize("decay", SCHEDULES)
def test_b33_the_rate_is_a_function_of_the_step_over_resumes(ranks, tmp_path, decay):
    """Stopped after 2 of 3 steps of warm-up, and after 6 of 9, in the decay."""
    keys = dict(lr_schedule__warmup_steps=3, checkpoint__interval=0, **SCHEDULES[decay])
    straight = rates_of(ranks(1, run_training, run_config(tmp_path / "straight", training__steps=9, **keys)))
    assert straight[:4] == [0.01 * n / 4 for n in (1, 2, 3, 4)]
    assert straight[5] > straight[6] > straight[7] > straight[8] > 0.001  # 6 is in the decay, which has not ended at 9
    resumed = []
    for steps in (2, 6, 9):
        resumed += rates_of(ranks(1, run_training, run_config(tmp_path / "resumed", training__steps=steps, **keys)))
    assert resumed == straight
    for name in ("straight", "resumed"):
        assert [record["lr"] for record in records(tmp_path / name / "run")] == straight


@pytest.mark.parametrize("stop", [2, 6], ids=["in_warm_up", "in_decay"])
def test_b33_a_changed_rate_or_length_is_honoured_from_the_next_step_on(ranks, tmp_path, stop):
    keys = dict(lr_schedule__warmup_steps=3, checkpoint__interval=0)
    changed = keys | dict(training__steps=8, optimizer__lr=0.02, lr_schedule__total_steps=20)
    straight = rates_of(ranks(1, run_training, run_config(tmp_path / "straight", **changed)))
    before = rates_of(ranks(1, run_training, run_config(tmp_path / "resumed", training__steps=stop, **keys)))
    after = rates_of(ranks(1, run_training, run_config(tmp_path / "resumed", **changed)))
    assert after == straight[stop:]
    assert all(old != new for old, new in zip(before, straight))
    assert [record["lr"] for record in records(tmp_path / "resumed/run")] == before + after


def test_b34_rates_count_updates_and_not_micro_batches(ranks, tmp_path):
    """Accumulation 1, 4, 8 in two runs of a pipeline's schedule, and 4 that becomes 1 at a resume."""
    keys = dict(lr_schedule__warmup_steps=3, lr_schedule__total_steps=10, checkpoint__interval=0)

    def train(name, world_size=1, steps=10, **overrides):
        seen = ranks(world_size, run_training, run_config(tmp_path / name, training__steps=steps, **keys, **overrides))
        assert {float(step) for key, step in merged(seen, "moments").items() if key.endswith(".step")} == {float(steps)}
        return rates_of(seen)

    expected = train("one", training__micro_batch_size=8)
    assert len(expected) == 10 and max(expected) == expected[3] == 0.01
    pipeline = dict(parallel__pp=2, training__micro_batch_size=1, parallel__schedule_microbatches=4)
    assert train("four", training__micro_batch_size=2) == expected
    assert train("pipeline", 2, **pipeline) == expected
    first = train("changed", steps=5, training__micro_batch_size=2)
    assert first + train("changed", training__micro_batch_size=8) == expected
    for name in ("four", "pipeline", "changed"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5), name


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved_at_tp2_pp2(request, ranks, tmp_path_factory):
    """(a checkpoint of step 2, weights and moments at it, losses of a straight run of 4 steps, the keys)."""
    folder = tmp_path_factory.mktemp("tp2_pp2")
    keys = dict(model__n_kv_heads=4, model__tie_embeddings=request.param, model__qkv_bias=True)
    layout = dict(parallel__tp=2, parallel__pp=2, training__micro_batch_size=4)
    ranks(4, run_training, run_config(folder / "straight", training__steps=4, **keys, **layout))
    seen = ranks(4, run_training, run_config(folder / "saved", training__steps=2, **keys, **layout))
    state = merged(seen, "weights") | merged(seen, "moments")
    return folder / "saved/run/checkpoints/step-00000002", state, losses(folder / "straight"), keys


def loaded_state(config, folder: Path) -> list[dict]:
    """Weights, moments and step counts right after loading, gathered: of the parameters, and of tied copies."""
    resolved = resolve_config(config, dist.get_world_size())
    mesh = mesh_of(resolved.layout)
    model = build_model(resolved, mesh, CPU, initialise=False)
    optimizer = build_train_step(resolved, model, mesh, CPU).optimizer
    Checkpointer(config, model, optimizer, CPU).load(folder)
    return [
        as_numpy({name: whole(tensor) for name, tensor in (named | optimizer_tensors(optimizer, named)).items()})
        for named in (model.named, model.copies)
    ]


OTHER_LAYOUTS = {
    "one": (1, dict(training__micro_batch_size=8)),
    "tp4": (4, dict(parallel__tp=4, training__micro_batch_size=8)),
    "pp4": (4, dict(parallel__pp=4)),
    "dp4": (4, {}),
    "pp2_v_shaped": (2, dict(parallel__pp=2, parallel__schedule="ZBVZeroBubble")),
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_b35_moments_saved_at_tp_2_pp_2_open_anywhere(ranks, tmp_path, saved_at_tp2_pp2, layout):
    checkpoint, state, straight, keys = saved_at_tp2_pp2
    world_size, overrides = OTHER_LAYOUTS[layout]
    config = run_config(tmp_path, training__steps=4, checkpoint__resume=str(checkpoint), **keys, **overrides)
    names = set()
    for tensors, copies in ranks(world_size, loaded_state, config, checkpoint):
        for name, tensor in [*tensors.items(), *copies.items()]:
            assert np.array_equal(tensor, state[name]), name
        names |= tensors.keys()
    n_parameters = 4 * (9 + 3) + (2 if keys["model__tie_embeddings"] else 3)
    assert names == state.keys() and len(names) == 4 * n_parameters  # each with two moments and a step count
    assert {float(value) for name, value in state.items() if name.endswith(".step")} == {2.0}
    assert all(value.any() for name, value in state.items())
    ranks(world_size, run_training, config)
    assert losses(tmp_path) == pytest.approx(straight[2:], rel=1e-5)  # the loss of step 4 shows the moments


def watch_saves(config) -> tuple[list[tuple[int, bool]], dict]:
    """Train. (step, whether all live state and the random state is as before) of each save, and the final weights."""
    saves, original = [], Checkpointer.save

    def live(checkpointer) -> dict:
        return {name: (tensor.dtype, whole(tensor)) for name, tensor in checkpointer._tensors().items()}

    def save(self, step, *rest):
        before = live(self)
        folder = original(self, step, *rest)
        after = live(self)
        same = [dtype == after[name][0] and torch.equal(tensor, after[name][1]) for name, (dtype, tensor) in before.items()]
        saves.append((step, before.keys() == after.keys() and len(same) >= 4 * 9 and all(same)))
        return folder

    with patch.object(Checkpointer, "save", save):
        return saves, run_training(config)["weights"]


@pytest.mark.parametrize("steps, interval, expected", [(7, 3, [3, 6, 7]), (6, 3, [3, 6]), (2, 0, [2]), (2, 9, [2])])
def test_b43_the_last_step_is_saved_once(ranks, tmp_path, steps, interval, expected):
    keys = dict(training__steps=steps, checkpoint__interval=interval, checkpoint__keep_latest=0)
    saves, _ = ranks(1, watch_saves, run_config(tmp_path, **keys))[0]
    assert saves == [(step, True) for step in expected]
    kept = sorted((tmp_path / "run/checkpoints").iterdir())
    assert [folder.name for folder in kept] == [f"step-{step:08d}" for step in expected]
    assert [read_json(folder / "trainer_state.json")["step"] for folder in kept] == expected


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_b43_files_have_the_dtype_that_was_asked_for(ranks, tmp_path, param):
    layout = dict(parallel__tp=2, parallel__pp=2)
    keys = dict(training__steps=1, precision__param=param, checkpoint__export_dir=str(tmp_path / "out"), **layout)
    seen = ranks(4, watch_saves, run_config(tmp_path, **keys))
    assert all(saves == [(1, True)] for saves, _ in seen)
    weights = {name: torch.from_numpy(weight) for _, rank in seen for name, weight in rank.items()}
    stored = stored_tensors(tmp_path / "run/checkpoints/step-00000001")
    for name, tensor in stored.items():
        expected = "uint8" if name.startswith("rng.") else "float32" if name.endswith(".step") else param
        assert tensor.properties.dtype == getattr(torch, expected), name
    assert len(stored) == 4 * len(weights) + 4
    for dtype in ("float32", "bfloat16"):
        export_run(run_config(tmp_path, checkpoint__export_dtype=dtype, **keys))
        exported = load_file(tmp_path / "out/model.safetensors")
        assert {tensor.dtype for tensor in exported.values()} == {getattr(torch, dtype)}
        assert read_json(tmp_path / "out/config.json")["torch_dtype"] == dtype
        assert len(exported) == len(weights)
        for ours, theirs in (("tok_embeddings", "model.embed_tokens"), ("output", "lm_head"), ("norm", "model.norm")):
            live = weights[f"{ours}.weight"]
            assert torch.equal(exported[f"{theirs}.weight"], live.to(getattr(torch, dtype))), theirs


@pytest.mark.parametrize(
    "n_rows, layouts", [(13, ["dp4", "dp2_tp2", "dp2_pp2"]), (5, ["dp4"])], ids=["ragged", "less_than_a_batch"]
)
def test_b63_every_rank_goes_into_the_next_epoch_at_the_same_step(ranks, tmp_path, n_rows, layouts):
    """The data does not end: a step takes the rest of one epoch and the first rows of the next."""
    keys, rows = text_of(tmp_path, n_rows)
    keys |= dict(training__steps=3, checkpoint__interval=0)
    expected = in_order(rows, 3)
    assert global_batches(ranks(1, run_training, run_config(tmp_path / "one", **keys)), dp=1) == expected
    for name in layouts:
        world_size, overrides = LAYOUTS[name]
        seen = ranks(world_size, run_training, run_config(tmp_path / name, **keys, **overrides))
        assert all(rank["finished"] for rank in seen)
        assert global_batches(seen, dp=4 if name == "dp4" else 2) == expected, name
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5), name


def evaluate_all(config) -> dict:
    with patch.object(evaluate, "Mesh", lambda layout, device_type: mesh_of(layout)):
        return evaluate._evaluate(config, CPU, 0)


@pytest.mark.parametrize("n_rows", [13, 5, 16], ids=["ragged", "less_than_a_batch", "even"])
def test_b63_evaluation_takes_every_row_once_and_ends_on_every_rank(ranks, tmp_path, n_rows):
    """With 13 rows at dp 4 the last batch has two full ranks, one with a single row and one with none."""
    keys, rows = text_of(tmp_path, n_rows)
    resolved = resolve_config(run_config(tmp_path, **keys), 1)
    with torch.no_grad():
        logits = reference_model(resolved)(rows[:, 0])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1].flatten()).item()
    for world_size, overrides in [(1, {}), *LAYOUTS.values()]:
        seen = ranks(world_size, evaluate_all, run_config(tmp_path, **keys, **overrides))
        assert all(rank == seen[0] for rank in seen)
        assert seen[0]["n_tokens"] == n_rows * SEQ_LEN
        assert seen[0]["loss"] == pytest.approx(loss, rel=1e-6)
