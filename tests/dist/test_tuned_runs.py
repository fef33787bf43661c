"""Whole fine-tuning runs: alike at any layout, killed and gone on with, and read by PEFT and transformers afterwards."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.runs import StopAt, records, run_config, run_training
from tests.dist.test_hugging_face import config_of
from tests.hugging import make_model
from tests.tiny import tiny_config
from trainer.adapters import with_weights_of
from trainer.build import trained_names
from trainer.checkpoint_files import stored_tensors
from trainer.checkpoint_folder import read_state
from trainer.config_load import load_config
from trainer.config_rules import resolve_config
from trainer.errors import UserError
from trainer.hf_export import export

EIGHT = dict(parallel__tp=2, parallel__pp=2, parallel__dp_shard=2)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture
def chat(tmp_path):
    """Keys of a small chat data set for the byte tokenizer."""
    lines = [{"prompt": f"{a} and {b}", "completion": str(a + b) * (1 + a % 3)} for a in range(9) for b in range(9)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return dict(data__path=str(tmp_path / "chat.jsonl"), data__chat_template=str(tmp_path / "chat.jinja"), training__seq_len=64)


def losses(folder) -> list[float]:
    return [record["loss"] for record in records(Path(folder))]


@pytest.mark.parametrize("method", ["sft", "lora"])
def test_a_run_is_the_same_at_eight_ranks_and_through_kills(ranks, tmp_path, chat, method):
    keys = chat | dict(training__method=method, model__vocab_size=258)

    def at(name, **overrides):
        return run_config(tmp_path, job__output_dir=str(tmp_path / name), **(keys | overrides))

    (alone,) = ranks(1, run_training, at("one"))
    together = ranks(8, run_training, at("eight", **EIGHT))
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "eight")), torch.tensor(losses(tmp_path / "one")), rtol=2e-5, atol=0)
    for name, got in {name: w for rank in together for name, w in rank["weights"].items()}.items():
        want = torch.from_numpy(alone["weights"][name])
        assert (torch.from_numpy(got) - want).norm() <= 1e-3 * want.norm(), name
    # Killed in the middle, gone on at another layout, killed again.
    ranks(8, run_training, at("killed", **EIGHT), None, StopAt(2))
    ranks(2, run_training, at("killed", parallel__dp_shard=2), None, StopAt(2))
    ranks(4, run_training, at("killed", parallel__pp=2, parallel__tp=2))
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "killed")), torch.tensor(losses(tmp_path / "one")), rtol=2e-5, atol=0)
    # And bitwise on the same layout.
    ranks(2, run_training, at("straight", parallel__dp_shard=2))
    ranks(2, run_training, at("again", parallel__dp_shard=2), None, StopAt(3))
    ranks(2, run_training, at("again", parallel__dp_shard=2))
    assert losses(tmp_path / "straight") == losses(tmp_path / "again")
    stored = stored_tensors(tmp_path / "one/checkpoints/step-00000005")
    names = {name for name in stored if name.startswith("model.")}
    assert all("lora_" in name for name in names) == (method == "lora")
    config = (tmp_path / "one/config.toml").read_text()
    assert 'packing = "best_fit"' in config and "isolate_documents = true" in config


def lora_config(tmp_path, hf, **overrides):
    keys = dict(
        training__method="lora", lora__rank=4, lora__alpha=8.0, lora__rslora=True, training__steps=3, checkpoint__interval=1,
        job__output_dir=str(tmp_path / "run"), data__tokenizer="bytes", lr_schedule__warmup_steps=0, metrics__tensorboard=False,
        data__packing="concatenate", data__isolate_documents=False,
    )  # fmt: skip
    return config_of(str(hf), **(keys | overrides))


@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_adapters_are_read_by_peft_and_merged_by_transformers(ranks, tmp_path, name):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    make_model(name, vocab_size=257).save_pretrained(tmp_path / "hf")
    targets = {} if name == "qwen2" else dict(lora__targets=["layers.[12].attention.wq", "layers.*.feed_forward.w2"])
    config = lora_config(tmp_path, tmp_path / "hf", **EIGHT) if not targets else lora_config_with(tmp_path, targets)
    together = ranks(8, run_training, config)
    step = tmp_path / "run/checkpoints/step-00000003"
    export(step, tmp_path / "adapters", None)
    export(step, tmp_path / "merged", None, merge=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    n_adapted = sum("lora_A" in key for key, _ in adapted.named_parameters())
    assert n_adapted == (28 if name == "qwen2" else 6)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokens = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        of_peft, of_merged, of_plain = adapted(tokens).logits, merged(tokens).logits, plain(tokens).logits
    assert (of_peft - of_plain).abs().max() > 1e-2  # something was learnt
    assert (of_peft - of_merged).abs().max() < 1e-4
    names = {key for rank in together for key in rank["weights"]}
    assert {key for key in names if "lora_" in key} == {key.removeprefix("model.") for key in stored_tensors(step) if key.startswith("model.")}


def lora_config_with(tmp_path, targets):
    section = lora_config(tmp_path, tmp_path / "hf", **EIGHT)
    return section.model_copy(update={"lora": section.lora.model_copy(update={"targets": tuple(targets["lora__targets"])})})


def test_the_base_of_adapters_must_be_the_same(ranks, tmp_path):
    make_model("llama", vocab_size=257).save_pretrained(tmp_path / "hf")
    config = lora_config(tmp_path, tmp_path / "hf", training__steps=2)
    ranks(1, run_training, config)
    step = tmp_path / "run/checkpoints/step-00000002"
    assert read_state(step)["base"]["files"].keys() == {"model.safetensors"}
    further = config.model_copy(update={"training": config.training.model_copy(update={"steps": 3})})
    shutil.move(tmp_path / "hf", tmp_path / "moved")
    moved = further.model_copy(update={"model": further.model.model_copy(update={"hf_path": str(tmp_path / "moved")})})
    ranks(2, run_training, moved.model_copy(update={"parallel": moved.parallel.model_copy(update={"tp": 2})}))
    weights = tmp_path / "moved/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    longer = moved.model_copy(update={"training": config.training.model_copy(update={"steps": 4})})
    with pytest.raises(AssertionError, match="is not the same, file model.safetensors: name that base"):
        ranks(1, run_training, longer)
    for call in (
        lambda: export(step, tmp_path / "out", None, merge=True),
        lambda: resolve_config(tiny_config(checkpoint__init_from=str(step)), 1),
    ):
        with pytest.raises(UserError):
            call()
    again = with_weights_of(load_config(None), str(step))
    assert again.training.method == "lora" and again.lora == config.lora and again.checkpoint.resume == str(step)


def test_frozen_adapters_are_in_no_checkpoint_and_asked_of_none(ranks, tmp_path, chat):
    keys = chat | dict(training__method="lora", training__freeze=["layers.0"], model__vocab_size=258, training__steps=2)
    ranks(1, run_training, run_config(tmp_path, **keys))
    step = next((tmp_path / "run/checkpoints").glob("step-*2"))
    again = with_weights_of(load_config(None), str(step))
    wanted = trained_names(again, resolve_config(again, 1).architecture)
    assert sorted(wanted) == sorted(key.removeprefix("model.") for key in stored_tensors(step) if key.startswith("model."))
    for command in (["sample", "--prompt", "a"], ["evaluate", "--batches", "1"]):
        done = subprocess.run([sys.executable, "-m", "trainer", *command, "--checkpoint", str(step)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr


def test_adapters_are_merged_with_the_base_as_the_run_kept_it(ranks, tmp_path, chat):
    keys = chat | dict(training__method="lora", precision__frozen="bfloat16", model__vocab_size=258, training__steps=2)
    (run,) = ranks(1, run_training, run_config(tmp_path, **keys))
    step = next((tmp_path / "run/checkpoints").glob("step-*2"))
    export(step, tmp_path / "merged", "float32", merge=True)
    merged, weights = load_file(tmp_path / "merged/model.safetensors"), run["weights"]
    for theirs, name in (("embed_tokens", "tok_embeddings"), ("layers.0.self_attn.q_proj", "layers.0.attention.wq")):
        want = torch.from_numpy(weights[f"{name}.weight"]).float()
        if f"{name}.lora_a" in weights:
            scale = 2.0  # alpha 32 / rank 16
            want = want + scale * torch.from_numpy(weights[f"{name}.lora_b"]) @ torch.from_numpy(weights[f"{name}.lora_a"])
        torch.testing.assert_close(merged[f"model.{theirs}.weight"], want, rtol=1e-6, atol=1e-8)
