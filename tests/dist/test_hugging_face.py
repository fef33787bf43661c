"""Hugging Face directories at layouts: weights in, gradients against ``transformers``, and out again."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from models.hugging_face import hugging_face_name
from tests.dist.parity import CPU, observe_rank
from tests.dist.pool import mesh_of
from tests.dist.runs import run_training
from tests.dist.test_command import run
from tests.hugging import loss_and_gradients, make_model, save_model
from tests.tiny import TINY, make_batch, tiny_config
from trainer.build import build_model, build_train_step
from trainer.checkpoint import Checkpointer
from trainer.config import Config
from trainer.config_load import Override, load_config
from trainer.config_rules import resolve_config
from trainer.data.tokenizer import ASSETS
from trainer.errors import UserError
from trainer.hf_export import export
from trainer.hf_import import import_directory
from trainer.verify import shrink


def config_of(hf_path=None, **overrides) -> Config:
    """The tiny run, with the architecture left to the Hugging Face directory."""
    keys = {key: value for key, value in TINY.items() if not key.startswith("model.")}
    keys |= {"model.hf_path": hf_path} if hf_path else {}
    keys |= {key.replace("__", "."): value for key, value in overrides.items()}
    text = lambda value: json.dumps(value) if isinstance(value, (bool, str)) else str(value)  # noqa: E731
    return load_config(None, [Override(key, text(value)) for key, value in keys.items()])


LAYOUTS = {
    "one": (1, {}),
    "tp2_pp2": (4, dict(parallel__tp=2, parallel__pp=2)),
    "dp2_tp2_pp2_v": (8, dict(parallel__tp=2, parallel__pp=2, parallel__schedule="ZBVZeroBubble", training__micro_batch_size=1)),
    "dp4": (4, {}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama3_rope", "qwen2_tied", "qwen3"])
def test_b47_gradients_are_those_of_transformers_at_a_layout(ranks, tmp_path, name, layout):
    theirs = make_model(name)
    theirs.save_pretrained(tmp_path, max_shard_size="200KB")
    world_size, overrides = LAYOUTS[layout]
    config = config_of(str(tmp_path), **overrides)
    filled = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 256})})
    loss, gradients = loss_and_gradients(theirs, *make_batch(filled, 1, "unequal"))
    weights, names = dict(theirs.named_parameters()), set()
    for rank in ranks(world_size, observe_rank, filled, world_size, 1, "unequal"):
        assert rank.losses[0] == pytest.approx(loss, rel=1e-5)
        for ours, gradient in rank.gradients.items():
            stored = hugging_face_name(ours)
            assert torch.equal(torch.from_numpy(rank.initial[ours]), weights[stored]), ours
            want = gradients[stored]
            assert (torch.from_numpy(gradient) - want).abs().max() <= 1e-4 * want.abs().max(), ours
            names.add(stored)
    assert names == gradients.keys()


@pytest.mark.parametrize("name", ["llama3_rope", "qwen2_tied"])
def test_train_at_one_layout_export_and_open_with_transformers(ranks, tmp_path, name):
    import transformers

    save_model(name, tmp_path / "hf")
    config = config_of(
        str(tmp_path / "hf"), parallel__tp=2, parallel__pp=2, training__steps=2, job__output_dir=str(tmp_path / "run"),
        data__tokenizer="bytes", lr_schedule__warmup_steps=0,
    )  # fmt: skip
    with pytest.raises(AssertionError, match=r"has 257 ids, but the model has vocab_size = 256"):
        ranks(8, run_training, config)  # the byte tokenizer's ids do not fit the directory's embedding
    make_model(name, vocab_size=257).save_pretrained(tmp_path / "hf257")
    model = config.model.model_copy(update={"hf_path": str(tmp_path / "hf257"), "vocab_size": None})
    seen = ranks(8, run_training, config.model_copy(update={"model": model}))
    export(tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "out", None, max_shard_bytes=200_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    exported = {key: value.detach() for key, value in theirs.named_parameters()}
    trained = {}
    for rank in seen:
        trained |= {hugging_face_name(key): torch.from_numpy(value) for key, value in rank["weights"].items()}
    assert trained.keys() == exported.keys()
    assert all(torch.equal(trained[key], exported[key]) for key in trained)
    assert not torch.equal(exported["model.norm.weight"], dict(make_model(name).named_parameters())["model.norm.weight"])


def test_b44_a_new_run_takes_the_weights_alone_and_goes_on_from_its_own(ranks, tmp_path):
    """The architecture comes with the weights; once the run has a checkpoint of its own, they may go."""
    make_model("qwen2", vocab_size=257).save_pretrained(tmp_path / "hf")
    import_directory(str(tmp_path / "hf"), tmp_path / "seed")
    keys = dict(training__steps=2, job__output_dir=str(tmp_path / "run"), checkpoint__init_from=str(tmp_path / "seed"))
    first = ranks(2, run_training, config_of(None, **keys))[0]
    assert f"weights     {tmp_path / 'seed'}" in first["console"] and "step 2/2" in first["console"]
    shutil.rmtree(tmp_path / "seed")
    keys["training__steps"] = 3
    second = ranks(2, run_training, config_of(None, **keys))[0]
    assert "resuming" in second["console"] and "weights    " not in second["console"] and "step 3/3" in second["console"]
    from_directory = config_of(str(tmp_path / "hf"), job__output_dir=str(tmp_path / "other"), training__steps=2, data__tokenizer="bytes")
    same = ranks(2, run_training, from_directory)[0]
    assert all((first["weights"][key] == same["weights"][key]).all() for key in same["weights"])


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (dict(model__n_heads=8), "model.n_heads = 8, but the weights in"),
        (dict(model__tie_embeddings=True), "model.tie_embeddings = True, but the weights in"),
        (dict(model__norm_eps=1e-3), "are of a model with 1e-06: leave it out"),
    ],
)
@pytest.mark.parametrize("source", ["model.hf_path", "checkpoint.init_from"])
def test_keys_may_not_contradict_the_weights(tmp_path, source, overrides, expected):
    save_model("llama", tmp_path / "hf")
    import_directory(str(tmp_path / "hf"), tmp_path / "seed")
    folder = str(tmp_path / ("hf" if source == "model.hf_path" else "seed"))
    with pytest.raises(UserError, match=expected):
        resolve_config(config_of(None, **{source.replace(".", "__"): folder}, **overrides), 1)
    longer = config_of(None, **{source.replace(".", "__"): folder}, model__rope_theta=1e6, model__n_heads=4)
    assert resolve_config(longer, 1).architecture.rope_theta == 1e6


def test_a_moved_directory_and_tokenizer_are_the_same_run(ranks, tmp_path):
    save_tokenized(tmp_path / "hf")
    keys = dict(job__output_dir=str(tmp_path / "run"), training__steps=2, training__seq_len=16)
    ranks(2, run_training, config_of(str(tmp_path / "hf"), **keys))
    (tmp_path / "hf").rename(tmp_path / "moved")
    keys["training__steps"] = 3
    assert "step 3/3" in ranks(2, run_training, config_of(str(tmp_path / "moved"), **keys))[0]["console"]
    with pytest.raises(AssertionError, match="is not the one that the run in"):
        ranks(2, run_training, config_of(str(tmp_path / "moved"), data__tokenizer="bytes", **keys | {"training__steps": 4}))


def save_tokenized(folder) -> None:
    """A tiny Llama whose directory has a real tokenizer, and facts beside the architecture."""
    make_model("llama", vocab_size=49_152, num_hidden_layers=2, eos_token_id=[2, 7], bos_token_id=1).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ASSETS / "smollm2" / name, folder / name)


def save_after_the_tokenizer_is_gone(config) -> str:
    """On each rank: a checkpoint is written although the tokenizer's file has vanished since the start."""
    resolved = resolve_config(config, torch.distributed.get_world_size())
    mesh = mesh_of(resolved.layout)
    model = build_model(resolved, mesh, CPU)
    step = build_train_step(resolved, model, mesh, CPU)
    checkpointer = Checkpointer(config, model, step.optimizer, CPU)
    torch.distributed.barrier()
    Path(config.data.tokenizer).unlink(missing_ok=True)
    torch.distributed.barrier()
    checkpointer.save(1, None, {"skipped_steps": 0})
    return str(Path(config.job.output_dir) / "checkpoints" / "step-00000001")


def test_a_save_does_not_need_the_tokenizer(ranks, tmp_path):
    shutil.copyfile(ASSETS / "smollm2" / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "run").mkdir()
    config = tiny_config(data__tokenizer=json.dumps(str(tmp_path / "tokenizer.json")), job__output_dir=str(tmp_path / "run"))
    for folder in ranks(2, save_after_the_tokenizer_is_gone, config):
        assert (Path(folder) / "trainer_state.json").is_file()


@pytest.mark.parametrize("tokenizer, eos", [(None, [2, 7]), ("smollm2", 2), ("bytes", [2, 7])])
def test_an_export_says_what_the_original_directory_said(ranks, tmp_path, tokenizer, eos):
    import transformers

    save_tokenized(tmp_path / "hf")
    keys = dict(job__output_dir=str(tmp_path / "run"), training__steps=1, training__seq_len=16)
    keys |= {"data__tokenizer": tokenizer} if tokenizer else {}
    ranks(1, run_training, config_of(str(tmp_path / "hf"), **keys))
    shutil.rmtree(tmp_path / "hf")
    export(tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "out", "bfloat16")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.max_position_embeddings == 256 and config.eos_token_id == eos and config.bos_token_id == 1
    assert (tmp_path / "out" / "tokenizer.json").is_file() == (tokenizer == "smollm2")


def test_verify_with_a_directory_draws_weights_of_its_own(tmp_path):
    config = config_of(save_model("qwen3", tmp_path), parallel__tp=2)
    small = shrink(resolve_config(config, 2))
    assert small.model.hf_path is None and small.model.qk_norm
    assert dataclasses.replace(resolve_config(small, 2).architecture, n_layers=4) == resolve_config(config, 2).architecture


def test_the_commands(tmp_path):
    """Front door to back: train from a directory with an export at the end, evaluate, sample, import, export."""
    make_model("qwen2", vocab_size=320).save_pretrained(tmp_path / "hf")
    common = [f"--model.hf_path={tmp_path / 'hf'}", "--data.tokenizer=bytes", "--training.seq_len=32", "--training.global_batch_size=4"]
    front_door = [
        *common, "--config=debug.toml", "--training.steps=2", "--parallel.tp=2", f"--job.output_dir={tmp_path / 'run'}",
        f"--checkpoint.export_dir={tmp_path / 'exported'}",
    ]  # fmt: skip
    trained = run(tmp_path, *front_door)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "exported" / "model.safetensors").is_file() and "exported" in trained.stdout
    first_export = (tmp_path / "exported" / "model.safetensors").read_bytes()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"

    def evaluate(*arguments):
        result = run(tmp_path, "evaluate", *common, "--batches=3", "--json", *arguments, module="trainer")
        assert result.returncode == 0 and result.stderr == "", result.stderr
        return json.loads(result.stdout)

    before, after = evaluate(), evaluate(f"--checkpoint={checkpoint}", "--parallel.pp=2")
    assert before["n_tokens"] == after["n_tokens"] == 3 * 4 * 32
    assert after["loss"] < before["loss"]
    exported = evaluate(f"--model.hf_path={tmp_path / 'exported'}")  # in bfloat16
    assert exported["loss"] == pytest.approx(after["loss"], rel=1e-2)
    sampled = run(tmp_path, "sample", f"--checkpoint={checkpoint}", "--prompt=It is", "--tokens=8", module="trainer")
    assert sampled.returncode == 0 and sampled.stdout.startswith("It is"), sampled.stderr
    again = run(tmp_path, *front_door)
    assert again.returncode == 0 and "(before)" in again.stdout, again.stderr
    longer = run(tmp_path, *front_door, "--training.steps=3")
    assert longer.returncode == 0 and json.loads((tmp_path / "exported" / "meshloom_export.json").read_text())["step"] == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    refused = run(tmp_path, *front_door, f"--checkpoint.export_dir={tmp_path / 'mine'}")
    assert refused.returncode == 2 and "holds something else than an export of this run" in refused.stderr
    written = run(tmp_path, "export-hf", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'again'}", "--dtype=bfloat16", module="trainer")
    assert written.returncode == 0, written.stderr
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == first_export


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["train", "--model.hf_path=nowhere"], "nowhere has no config.json in it"),
        (["evaluate", "--batches=0"], "--batches 0: at least 1"),
        (["evaluate", "--checkpoint=nowhere"], "nowhere is not a checkpoint folder"),
        (["sample", "--prompt=x"], "needs one of --checkpoint STEP_DIR and --hf DIR"),
        (["sample", "--prompt=x", "--hf=nowhere"], "nowhere has no config.json in it"),
        (["sample", "--prompt=x", "--hf=nowhere", "--model.dim=3"], "takes no configuration keys"),
        (["export-hf", "--out=x"], "export-hf needs --checkpoint STEP_DIR, or --config C"),
        (["export-hf", "--out=x", "--config=debug"], "holds no checkpoint"),
        (["export-hf", "--out=x", "--checkpoint=nowhere"], "nowhere is not a checkpoint folder"),
        (["import-hf", "--out=x", "--hf=nowhere"], "nowhere has no config.json in it"),
        (["train", "--checkpoint.init_from=nowhere"], "is not a checkpoint folder"),
    ],
)
def test_bad_usage(tmp_path, arguments, expected):
    result = run(tmp_path, *arguments, module="trainer")
    assert result.returncode == 2 and expected in result.stderr and "Traceback" not in result.stderr, result.stderr
