"""Cases about state: initialisation, dtypes, buffers, non-finite steps, checkpoints."""

import json

import numpy as np
import pytest
import torch

from models.rotary import rotary_table
from parallelize.grad_norm import local_tensor
from tests.dist.parity import CPU
from tests.dist.pool import mesh_of
from tests.dist.runs import records, refused, run_config, run_training
from tests.tiny import tiny_config
from trainer.build import build_model, build_train_step
from trainer.config_rules import resolve_config
from trainer.observe import whole


def local_and_whole(config, world_size: int) -> dict:
    """name -> (this rank's shard, the whole parameter) right after building."""
    resolved = resolve_config(config, world_size)
    named = build_model(resolved, mesh_of(resolved.layout), CPU).named
    return {name: (local_tensor(p).detach().numpy().copy(), whole(p).numpy()) for name, p in named.items()}


@pytest.mark.parametrize("overrides", [{}, dict(parallel__tp=2)], ids=["fsdp2", "tp2"])
def test_b22_shards_differ_between_ranks(ranks, overrides):
    first, second = ranks(2, local_and_whole, tiny_config(**overrides), 2)
    for name, (shard, full) in first.items():
        if "norm" in name:
            continue
        assert shard.shape == second[name][0].shape and not np.array_equal(shard, second[name][0]), name
        assert full.std() == pytest.approx(0.02, rel=0.35)  # depth-scaled ones are smaller, checked in unit tests
        break
    assert sum(not np.array_equal(shard, second[name][0]) for name, (shard, _) in first.items()) == 4 * 7 + 2


@pytest.mark.parametrize("overrides", [{}, dict(parallel__schedule="Interleaved1F1B")], ids=["pp2", "pp2x2"])
def test_b23_no_two_layers_start_alike(ranks, overrides):
    config = tiny_config(parallel__pp=2, **overrides)
    weights = {}
    for rank in ranks(2, local_and_whole, config, 2):
        weights |= {name: full for name, (_, full) in rank.items()}
    for kind in ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2"):
        layers = [weights[f"layers.{layer}.{kind}.weight"] for layer in range(4)]
        assert all(not np.array_equal(a, b) for i, a in enumerate(layers) for b in layers[:i])
        # Not even a multiple of each other: depth scaling alone would not make them different draws.
        assert all(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.1 for i, a in enumerate(layers) for b in layers[:i])


def tables_after_materialising(config, world_size: int) -> list:
    """Rotary tables of this rank's parts, built while fresh memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        resolved = resolve_config(config, world_size)
        parts = build_model(resolved, mesh_of(resolved.layout), CPU).parts
        assert all(torch.isfinite(local_tensor(p)).all() for part in parts for p in part.parameters())
        return [part.rotary_table.numpy() for part in parts]
    finally:
        torch.use_deterministic_algorithms(False)


def test_b25_rotary_tables_are_rebuilt_on_every_stage(ranks):
    config = tiny_config(parallel__pp=2, parallel__tp=2, parallel__schedule="Interleaved1F1B")
    fresh = rotary_table(resolve_config(config, 4).architecture, config.training.seq_len).numpy()
    for tables in ranks(4, tables_after_materialising, config, 4):
        assert len(tables) == 2 and all(np.array_equal(table, fresh) for table in tables)
        assert fresh.dtype == np.float32


def bf16_step(config, world_size: int) -> dict:
    """One update of lr 1e-4 on weights of 1 with bf16 compute: dtypes seen, and whether the weights moved."""
    resolved = resolve_config(config, world_size)
    mesh = mesh_of(resolved.layout)
    model = build_model(resolved, mesh, CPU)
    step = build_train_step(resolved, model, mesh, CPU)
    named, seen = model.named, {}
    model.parts[0].layers["0"].feed_forward.register_forward_hook(lambda m, i, o: seen.update(activation=str(o.dtype)))
    tokens = torch.randint(0, 256, (8 // resolved.layout.dp, 32), generator=torch.Generator().manual_seed(0))
    share = step.forward_backward(tokens, tokens)
    seen["gradient"] = {str(p.grad.dtype) for p in named.values()}
    seen["table"] = str(model.parts[0].rotary_table.dtype)
    step.update(*step.total_and_clip(share, stop_requested=False)[:2])
    seen["parameter"] = {str(p.dtype) for p in named.values()}
    seen["moment"] = {str(t.dtype) for p in named.values() for t in step.optimizer.state[p].values()}
    norm = whole(named["norm.weight"])
    seen["moved"] = bool((norm != 1.0).all() and (norm - 1.0).abs().max() < 2e-4)
    return seen


@pytest.mark.parametrize("overrides", [{}, dict(parallel__tp=2)], ids=["dp2", "tp2"])
def test_b20_bf16_compute_keeps_fp32_state(ranks, overrides):
    config = tiny_config(precision__compute="bfloat16", optimizer__lr=1e-4, lr_schedule__warmup_steps=0, **overrides)
    for seen in ranks(2, bf16_step, config, 2):
        assert seen["activation"] == "torch.bfloat16"
        assert seen["parameter"] == seen["gradient"] == seen["moment"] == {"torch.float32"}
        assert seen["table"] == "torch.float32"
        assert seen["moved"], "an update of 1e-4 on a weight of 1.0 was lost"


def merged(seen: list[dict], key: str) -> dict:
    """A dict that each rank holds for its own stages, for the whole model."""
    return {name: value for rank in seen for name, value in rank[key].items()}


def assert_same_state(seen: list[dict], expected: list[dict]) -> None:
    """Weights and moments bitwise equal."""
    for key in ("weights", "moments"):
        got, want = merged(seen, key), merged(expected, key)
        assert got.keys() == want.keys() and got
        for name, value in want.items():
            assert np.array_equal(got[name], value), f"{key} {name}"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_b21_a_non_finite_gradient_never_reaches_the_weights(ranks, tmp_path, value):
    layout = dict(parallel__pp=2, parallel__dp_shard=2, metrics__log_interval=10)
    two_steps = ranks(4, run_training, run_config(tmp_path / "two", training__steps=2, **layout))

    stopped = ranks(4, run_training, run_config(tmp_path / "stop", **layout), (3, 2, value))
    assert all("step 3" in rank["error"] and "from rank 2 (pp 1, dp_shard 0): layers.2." in rank["error"] for rank in stopped)
    assert all("The newest checkpoint is " in rank["error"] and rank["error"].endswith("step-00000002") for rank in stopped)
    written = json.loads((tmp_path / "stop/run/nonfinite/step-00000003.json").read_text())
    assert written["step"] == 3
    assert [(one["place"], one["loss_is_finite"], len(one["gradients_not_finite"])) for one in written["ranks"]] == [
        ("rank 2 (pp 1, dp_shard 0)", True, 1)
    ]
    assert written["ranks"][0]["gradients_not_finite"][0].startswith("layers.2.")
    assert_same_state(stopped, two_steps)
    kept = sorted(folder.name for folder in (tmp_path / "stop/run/checkpoints").iterdir())
    assert kept == ["step-00000001", "step-00000002"]

    config = run_config(tmp_path / "skip", training__nonfinite="skip", **layout)
    skipped = ranks(4, run_training, config, (3, 2, value))
    assert all(rank["finished"] for rank in skipped)
    assert all(np.isfinite(weight).all() for weight in merged(skipped, "weights").values())
    assert records(tmp_path / "skip/run")[-1]["skipped_steps"] == 1
    steps_taken = {float(step) for name, step in merged(skipped, "moments").items() if name.endswith(".step")}
    assert steps_taken == {4.0}


RESUMES = {
    "one": (1, {}),
    "dp2_tp2": (4, dict(parallel__tp=2)),
    "pp2_dp2_interleaved": (4, dict(parallel__pp=2, parallel__schedule="Interleaved1F1B")),
    "hsdp2x2": (4, dict(parallel__dp_replicate=2)),
    "tied_pp2": (2, dict(parallel__pp=2, model__tie_embeddings=True)),
    "tied_v_shaped": (2, dict(parallel__pp=2, model__tie_embeddings=True, parallel__schedule="ZBVZeroBubble")),
}


@pytest.mark.parametrize("layout", RESUMES)
def test_b26_b27_resume_twice_is_bitwise(ranks, tmp_path, layout):
    """3 + 3 + 3 steps equal 9 in one go: weights, moments, losses, norms, rates, and the records' order."""
    world_size, overrides = RESUMES[layout]
    keys = dict(checkpoint__interval=3, **overrides)
    straight = ranks(world_size, run_training, run_config(tmp_path / "straight", training__steps=9, **keys))
    for steps in (3, 6, 9):
        resumed = ranks(world_size, run_training, run_config(tmp_path / "resumed", training__steps=steps, **keys))
    assert "resuming" in resumed[0]["console"]
    assert_same_state(resumed, straight)
    got, want = records(tmp_path / "resumed/run"), records(tmp_path / "straight/run")
    assert [record["step"] for record in got] == list(range(1, 10))
    for key in ("step", "loss", "grad_norm", "lr", "tokens_seen"):
        assert [record[key] for record in got] == [record[key] for record in want], key


def test_a_checkpoint_opens_at_another_layout(ranks, tmp_path):
    keys = dict(checkpoint__interval=3)
    straight = ranks(1, run_training, run_config(tmp_path / "straight", training__steps=6, **keys))
    ranks(4, run_training, run_config(tmp_path / "moved", training__steps=3, parallel__pp=2, parallel__tp=2, **keys))
    moved = ranks(2, run_training, run_config(tmp_path / "moved", training__steps=6, **keys))
    for name, weight in merged(straight, "weights").items():
        assert np.abs(merged(moved, "weights")[name] - weight).max() < 1e-4
    losses = [[record["loss"] for record in records(tmp_path / name / "run")] for name in ("straight", "moved")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_b57_an_uneven_vocabulary_saved_at_tp_2_opens_on_one_process(ranks, tmp_path):
    keys = dict(model__vocab_size=301, checkpoint__interval=3)
    straight = ranks(1, run_training, run_config(tmp_path / "straight", training__steps=6, **keys))
    ranks(4, run_training, run_config(tmp_path / "moved", training__steps=3, parallel__tp=2, **keys))
    moved = ranks(1, run_training, run_config(tmp_path / "moved", training__steps=6, **keys))
    assert merged(moved, "weights")["output.weight"].shape == (301, 64)
    for name, weight in merged(straight, "weights").items():
        assert np.abs(merged(moved, "weights")[name] - weight).max() < 1e-4, name


def decay_alone(config, world_size: int) -> dict:
    """One update with zero gradients: name -> (weights before, after), and the sizes of the optimizer's groups."""
    resolved = resolve_config(config, world_size)
    mesh = mesh_of(resolved.layout)
    model = build_model(resolved, mesh, CPU)
    step = build_train_step(resolved, model, mesh, CPU)
    before = {name: whole(p).numpy() for name, p in model.named.items()}
    for parameter in model.named.values():
        parameter.grad = torch.zeros_like(parameter)
    step.update(torch.zeros(()), torch.zeros(()))
    return {name: (before[name], whole(p).numpy()) for name, p in model.named.items()}


@pytest.mark.parametrize(
    "overrides",
    [{}, dict(parallel__tp=2), dict(parallel__pp=2), dict(compile__enabled=True, activation_checkpoint__mode="full")],
    ids=["fsdp2", "tp2", "pp2", "compiled_and_wrapped"],
)
def test_b82_norms_and_biases_are_never_decayed(ranks, overrides):
    keys = dict(optimizer__lr=0.1, optimizer__weight_decay=0.5, model__qkv_bias=True, model__qk_norm=True)
    seen = {}
    for rank in ranks(2, decay_alone, tiny_config(**keys, **overrides), 2):
        seen |= rank
    for name, (before, after) in seen.items():
        factor = 1.0 if "norm" in name or "bias" in name else 0.95
        np.testing.assert_allclose(after, before * factor, rtol=1e-6, atol=0, err_msg=name)
    assert sum("norm" in name or "bias" in name for name in seen) == 4 * (2 + 2 + 3) + 1 and len(seen) == 29 + 4 * 7 + 2


def test_b29_a_finished_run_says_so_and_writes_nothing(ranks, tmp_path):
    config = run_config(tmp_path)
    ranks(1, run_training, config)
    files = [path for path in (tmp_path / "run").rglob("*") if path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    again = ranks(1, run_training, config)[0]
    assert "already at step 5 of 5" in again["console"] and again["finished"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"} == before


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (dict(model__n_layers=2), "model differs"),
        (dict(job__seed=1), "job.seed was 0, is 1"),
        (dict(training__global_batch_size=16), "training.global_batch_size was 8, is 16"),
        (dict(data__seed=1), "data.seed was 0, is 1"),
        (dict(data__shuffle=False), "data.shuffle was True, is False"),
        (dict(training__seq_len=16), "training.seq_len was 32, is 16"),
        (dict(checkpoint__resume="never"), "already holds a run"),
        (dict(checkpoint__resume="/nowhere"), "is not a checkpoint folder"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(ranks, tmp_path, overrides, expected):
    ranks(1, run_training, run_config(tmp_path, training__steps=1))
    assert expected in ranks(1, refused, run_config(tmp_path, training__steps=2, **overrides))[0]


def test_resuming_from_an_earlier_step_never_touches_the_later_ones(ranks, tmp_path):
    ranks(1, run_training, run_config(tmp_path, training__steps=4, checkpoint__keep_latest=0))
    earlier = tmp_path / "run/checkpoints/step-00000002"
    before = records(tmp_path / "run")
    message = ranks(1, refused, run_config(tmp_path, training__steps=6, checkpoint__resume=str(earlier)))[0]
    assert "goes on to step 4: choose another job.output_dir" in message
    assert records(tmp_path / "run") == before
    # A new folder starts from it, and goes on from its own checkpoints when the same command runs again.
    for steps in (3, 5):
        forked = run_config(tmp_path / "fork", training__steps=steps, checkpoint__resume=str(earlier))
        console = ranks(1, run_training, forked)[0]["console"]
    assert [record["step"] for record in records(tmp_path / "fork/run")] == [3, 4, 5]
    assert "fork/run/checkpoints/step-00000003" in console
    assert [r["loss"] for r in records(tmp_path / "fork/run")[:2]] == [r["loss"] for r in before[2:]]


def test_what_changed_at_a_resume_is_said(ranks, tmp_path):
    ranks(1, run_training, run_config(tmp_path, training__steps=2))
    changed = run_config(tmp_path, training__steps=3, optimizer__lr=0.02, lr_schedule__total_steps=20)
    console = ranks(1, run_training, changed)[0]["console"]
    for line in ("training.steps: 2 -> 3", "optimizer.lr: 0.01 -> 0.02", "lr_schedule.total_steps: 9 -> 20"):
        assert line in console


def test_an_incomplete_folder_in_the_way_is_replaced(ranks, tmp_path):
    (tmp_path / "run/checkpoints/step-00000002").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000002/junk").write_text("from a kill")
    ranks(1, run_training, run_config(tmp_path, training__steps=2))
    assert not (tmp_path / "run/checkpoints/step-00000002/junk").exists()
    assert (tmp_path / "run/checkpoints/step-00000002/trainer_state.json").exists()


def test_one_writer_a_folder(ranks, tmp_path):
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("w") as other_run:
        fcntl.flock(other_run, fcntl.LOCK_EX)
        for message in ranks(2, refused, run_config(tmp_path)):
            assert "another run is writing there now" in message
    assert ranks(2, run_training, run_config(tmp_path))[0]["finished"]


def test_skipped_steps_are_null_in_the_records_and_counted_over_resumes(ranks, tmp_path):
    keys = dict(training__nonfinite="skip", training__max_grad_norm=0)
    ranks(1, run_training, run_config(tmp_path, training__steps=3, **keys), (2, 0, float("nan")))
    ranks(1, run_training, run_config(tmp_path, training__steps=4, **keys))
    seen = records(tmp_path / "run")
    assert seen[1]["grad_norm"] is None and [r["skipped_steps"] for r in seen] == [0, 1, 1, 1]
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()


def test_the_written_config_leaves_nothing_open(ranks, tmp_path):
    from trainer.config_load import load_config

    ranks(2, run_training, run_config(tmp_path, lr_schedule__total_steps=9))
    written = load_config(str(tmp_path / "run/config.toml"))
    assert written.parallel.dp_shard == 2 and written.precision.compute == "float32"
    assert written.lr_schedule.total_steps == 9 and written.model.norm_eps == 1e-5


def load_into(config, folder: str) -> str:
    from pathlib import Path

    from trainer.checkpoint import Checkpointer
    from trainer.errors import UserError

    resolved = resolve_config(config, torch.distributed.get_world_size())
    mesh = mesh_of(resolved.layout)
    model = build_model(resolved, mesh, CPU)
    step = build_train_step(resolved, model, mesh, CPU)
    try:
        Checkpointer(config, model, step.optimizer, CPU).load(Path(folder))
    except UserError as error:
        return error.message()
    return "loaded"


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (dict(model__n_layers=2), "model.layers.2.attention.wq.weight has no place in the model"),
        (dict(model__n_layers=5), "model.layers.4.attention.wq.weight is missing"),
        (dict(model__ffn_dim=64), "model.layers.0.feed_forward.w1.weight has shape (128, 64), the model (64, 64)"),
        (dict(precision__param="bfloat16"), "is torch.float32, the model's torch.bfloat16"),
    ],
)
def test_b45_keys_shapes_and_dtypes_must_match(ranks, tmp_path, overrides, expected):
    ranks(2, run_training, run_config(tmp_path, training__steps=1, parallel__pp=2))
    folder = str(tmp_path / "run/checkpoints/step-00000001")
    for message in ranks(2, load_into, run_config(tmp_path, parallel__pp=2, **overrides), folder):
        assert expected in message


def test_b70_seeds_of_data_and_model_are_apart(ranks, tmp_path):
    def first_loss_and_weights(name, **overrides):
        run = ranks(1, run_training, run_config(tmp_path / name, training__steps=1, **overrides))[0]
        return records(tmp_path / name / "run")[0]["loss"], run["weights"]["output.weight"]

    loss, weights = first_loss_and_weights("a")
    same, _ = first_loss_and_weights("b")
    other_data, _ = first_loss_and_weights("c", data__seed=1)
    other_weights, changed = first_loss_and_weights("d", job__seed=1)
    assert same == loss and other_data != loss and other_weights != loss
    assert not np.array_equal(changed, weights)


@pytest.mark.parametrize(
    "world_size, overrides",
    [(1, {}), (4, dict(parallel__tp=2)), (4, dict(parallel__pp=2)), (4, {}), (4, dict(parallel__tp=4, model__n_kv_heads=4))],
    ids=["one", "dp2_tp2", "dp2_pp2", "dp4", "tp4"],
)
def test_b74_tokens_are_counted_once(ranks, tmp_path, world_size, overrides):
    ranks(world_size, run_training, run_config(tmp_path, **overrides))
    seen = records(tmp_path / "run")
    assert [record["tokens_seen"] for record in seen] == [256 * step for step in range(1, 6)]
    for record in seen:
        assert record["tokens_per_s"] * record["step_time_s"] == pytest.approx(256)
        assert record["tokens_per_s_per_device"] * world_size == pytest.approx(record["tokens_per_s"])
        assert record["mfu"] is None


