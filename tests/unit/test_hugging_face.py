"""Hugging Face directories, read and written, against ``transformers``."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models import FAMILIES
from models.decoder import Decoder
from models.hugging_face import architecture_from, config_json, hugging_face_name
from tests.hugging import LLAMA3_ROPE, SHAPE, VARIANTS, VOCAB, loss_and_gradients, make_model, save_model
from trainer.build import parameter_shapes
from trainer.errors import UserError
from trainer.hf_directory import INDEX, HfWeights, read_architecture
from trainer.hf_export import export
from trainer.hf_import import import_directory


def our_model(folder: str, n_positions: int = 64) -> Decoder:
    architecture = read_architecture(folder)
    model, weights, shapes = Decoder(architecture, n_positions), HfWeights(folder), parameter_shapes(architecture)
    weights.check(shapes, architecture.tie_embeddings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name, shapes[name], (0,) * parameter.dim(), shapes[name]))
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_b47_b48_b51_b52_b54_logits_loss_and_gradients_are_those_of_transformers(tmp_path, name):
    theirs = make_model(name)
    theirs.save_pretrained(tmp_path)
    ours = our_model(str(tmp_path))
    tokens = torch.randint(0, VOCAB, (2, 65), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (ours(tokens[:, :-1]) - theirs(tokens[:, :-1]).logits).abs().max()
    assert difference < 1e-4, difference
    loss, gradients = loss_and_gradients(theirs, tokens[:, :-1], tokens[:, 1:])
    ours_loss = F.cross_entropy(ours(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    ours_loss.backward()
    assert ours_loss.item() == pytest.approx(loss, rel=1e-5)
    named = dict(ours.named_parameters())
    assert {hugging_face_name(name) for name in named} == gradients.keys()
    for name, parameter in named.items():
        want = gradients[hugging_face_name(name)]
        assert (parameter.grad - want).abs().max() <= 1e-4 * want.abs().max(), name


def test_b48_rotary_to_16k_positions_does_not_depend_on_the_training_length(tmp_path):
    theirs = make_model("llama3_rope", max_position_embeddings=32_768, num_hidden_layers=1)
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, VOCAB, (1, 16_384), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        short, whole = our_model(str(tmp_path), 128), our_model(str(tmp_path), 16_384)
        assert torch.equal(short.rotary_table, whole.rotary_table[:, :128])
        # Only the last positions: the logits of all would be 16 MB, and attention grows with the square.
        assert (whole(tokens[:, :2048]) - theirs(tokens[:, :2048]).logits).abs().max() < 1e-4
        cosines, sines = theirs.model.rotary_emb(torch.zeros(1, 1, 64), torch.arange(16_384)[None])
    half = whole.rotary_table.shape[-1]
    assert (whole.rotary_table[0] - cosines[0, :, :half]).abs().max() < 1e-5
    assert (whole.rotary_table[1] - sines[0, :, :half]).abs().max() < 1e-5


@pytest.mark.parametrize("eps, expected", [(1e-5, 0.3015), (1e-6, 0.7071)])
def test_b54_norm_epsilon_comes_from_config_json(tmp_path, eps, expected):
    fields = SHAPE | {"model_type": "qwen3", "rms_norm_eps": eps, "head_dim": 16}
    model = Decoder(architecture_from(fields), 8)
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)):
        out = norm(torch.full(norm.normalized_shape, 1e-3))
        assert out[0].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family, size", [(family, size) for family in FAMILIES for size in FAMILIES[family]])
def test_config_json_of_every_size_is_read_back(family, size):
    architecture = FAMILIES[family][size]
    fields = config_json(architecture, "bfloat16", {"eos_token_id": 0})
    assert architecture_from(json.loads(json.dumps(fields))) == architecture
    for key in ("rope_parameters", "rope_scaling"):
        assert architecture_from({name: value for name, value in fields.items() if name != key}) == architecture


PLAIN = SHAPE | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "_name_or_path": "x",
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"model_type": "mixtral"}, "model_type = 'mixtral': only llama, qwen2, qwen3 are known"),
        ({"model_type": None}, "model_type = None"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear': only default and llama3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"rope_parameters": LLAMA3_ROPE | {"beta": 1}}, "rope parameters {'beta': 1}"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu' can be computed"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: only full_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"logit_scale": 0.1}, "logit_scale = 0.1: an unknown field, which may change the result"),
        ({"hidden_size": "64"}, "hidden_size = '64': expected a whole number above 0"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rope_scaling": {"type": "llama3"} | {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"},
          "rope_parameters": {"rope_type": "default"}}, "disagree: keep one"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads = '2': expected a whole number above 0"),
        ({"head_dim": True}, "head_dim = True: expected a whole number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6': expected a number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': expected true or false"),
        ({"layer_types": 3}, "layer_types = 3: expected a list"),
        ({"rope_scaling": [1]}, "rope_scaling = [1]: expected a table"),
        ({"rope_scaling": {"type": None}}, "rope_type = None"),
        ({"model_type": ["llama"]}, "model_type = ['llama']"),
        ({"use_mrope": True}, "use_mrope = True"),
        ({"output_scale": 2.0}, "output_scale = 2.0: an unknown field"),
        ({"num_key_value_heads": 3}, "n_heads = 4 is not a multiple of n_kv_heads = 3"),
    ],
)  # fmt: skip
def test_what_the_decoder_is_not_is_refused(tmp_path, fields, expected):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | fields))
    with pytest.raises(UserError) as error:
        read_architecture(str(tmp_path))
    assert expected in error.value.message() and str(tmp_path) in error.value.message()


def test_harmless_fields_are_let_through():
    fields = {
        "use_cache": True,
        "bos_token_id": 1,
        "transformers_version": "4.1",
        "sliding_window": 4096,
        "head_dim": None,
    }
    fields |= {
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "use_mrope": False,
    }
    fields |= {"eos_token_id": [1, 2], "temperature": 0.6, "max_window_layers": 28}
    assert architecture_from(PLAIN | fields) == architecture_from(PLAIN)


def test_switches_without_a_hugging_face_model_are_refused():
    architecture = type(FAMILIES["llama"]["debug"])(**{**vars(FAMILIES["llama"]["debug"]), "wo_bias": True})
    with pytest.raises(ValueError, match="no Hugging Face model has qkv_bias = False, wo_bias = True"):
        config_json(architecture, "float32", {})


def damaged(folder, damage: str) -> None:
    file, index = folder / "model-00002-of-00003.safetensors", folder / INDEX
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "layers" in name)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "garbage":
        file.write_bytes(b"not a safetensors file")
    elif damage == "file missing":
        file.unlink()
    elif damage == "index":
        index.write_text("{")
    elif damage == "no weights":
        index.unlink()
    else:
        content = json.loads(index.read_text())
        if damage == "tensor missing":
            del content["weight_map"][name]
        elif damage == "not in its file":
            del tensors[name]
        elif damage == "surplus":
            tensors["model.extra.weight"] = torch.zeros(1)
            content["weight_map"]["model.extra.weight"] = file.name
        elif damage == "shape":
            tensors[name] = tensors[name][..., :3].contiguous()
        elif damage == "integers":
            tensors[name] = tensors[name].to(torch.int8)
        index.write_text(json.dumps(content))
        save_file(tensors, file)


@pytest.mark.parametrize(
    "damage, expected",
    [
        ("truncated", "model-00002-of-00003.safetensors cannot be read"),
        ("garbage", "model-00002-of-00003.safetensors cannot be read"),
        ("file missing", "names model-00002-of-00003.safetensors, which is not there"),
        ("index", "model.safetensors.index.json cannot be read"),
        ("no weights", "has neither model.safetensors nor model.safetensors.index.json"),
        ("tensor missing", "model.layers."),
        ("not in its file", "should be in model-00002-of-00003.safetensors, which does not have it"),
        ("surplus", "model.extra.weight has no place in the model"),
        ("shape", "has shape ["),
        ("integers", "is stored as I8"),
    ],
)
def test_damaged_directories_are_refused_with_tensor_and_file(tmp_path, damage, expected):
    save_model("qwen2", tmp_path, max_shard_size="250KB")
    assert (tmp_path / "model-00003-of-00003.safetensors").is_file()
    damaged(tmp_path, damage)
    with pytest.raises(UserError) as error:
        our_model(str(tmp_path))
    assert expected in error.value.message() and str(tmp_path) in error.value.message()


def all_tensors(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "llama3_rope", "qwen2_tied", "qwen3_biases"])
def test_b47_import_then_export_is_the_identity(tmp_path, name, dtype):
    import transformers

    make_model(name).to(dtype).save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    import_directory(str(tmp_path / "hf"), tmp_path / "step-00000000")
    export(tmp_path / "step-00000000", tmp_path / "out", dtype=None, max_shard_bytes=300_000)
    before, after = all_tensors(tmp_path / "hf"), all_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(
        before[key].dtype == after[key].dtype == dtype and torch.equal(before[key], after[key]) for key in before
    )
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    original = make_model(name).config
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"):
        assert getattr(theirs.config, key) == getattr(original, key), key


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("max_shard_bytes", [150_000, 10**9])
def test_b49_b50_index_and_files_agree(tmp_path, name, max_shard_bytes):
    save_model(name, tmp_path / "hf")
    import_directory(str(tmp_path / "hf"), tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "out", "bfloat16", max_shard_bytes)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    stored = {}
    for file in files:
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            stored |= dict.fromkeys(opened.keys(), file)
    assert ("lm_head.weight" in stored) == (name == "llama")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == (name == "llama_tied")
    if max_shard_bytes > 10**6:
        assert files == ["model.safetensors"] and not (tmp_path / "out" / INDEX).exists()
        return
    assert len(files) >= 3
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in all_tensors(tmp_path / "out").values())


def test_b49_a_stored_head_of_a_tied_model_is_not_read(tmp_path):
    save_model("llama_tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    model = our_model(str(tmp_path))
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model.output.weight, tensors["model.embed_tokens.weight"])


def test_export_does_not_touch_what_exists(tmp_path):
    save_model("llama", tmp_path / "hf")
    import_directory(str(tmp_path / "hf"), tmp_path / "checkpoint")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(UserError, match="exists: name a new directory"):
        export(tmp_path / "checkpoint", tmp_path / "out", None)
    with pytest.raises(UserError, match="exists"):
        import_directory(str(tmp_path / "hf"), tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    export(tmp_path / "checkpoint", tmp_path / "out", None)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "checkpoint", "out"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 256
