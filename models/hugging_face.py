"""The names and config.json of Hugging Face checkpoints. Both use half-split rotary pairs, so no weight is permuted.

Covers the model types llama, qwen2 and qwen3 (dense). A field of config.json that is neither read here nor known to
leave the result alone is an error: what is ignored can make fluent nonsense.
"""

import math
import re

from models.decoder_config import DecoderConfig

# Ours -> theirs, below "model.layers.N." for a layer.
_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
}
# Fields that must have this value, where they are there: with another the model computes something else.
_ONLY = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_sliding_window": (False, None),
    "use_mrope": (False, None),
    "quantization_config": (None,),
    "auto_map": (None,),
}
_READ = {
    *_SIZES, "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias",
    "rope_theta", "rope_scaling", "rope_parameters", "layer_types",
}  # fmt: skip
# Fields without an effect on logits. (sliding_window and max_window_layers only count with use_sliding_window.)
_HARMLESS = re.compile(
    r"_.*|.*_token_id|.*_version|(torch_)?dtype|architectures|initializer_range|max_position_embeddings|use_cache"
    r"|sliding_window|max_window_layers|is_llama_config|transformers\.js_config|problem_type|name_or_path|torchscript"
    r"|output_(attentions|hidden_states|router_logits)|return_dict|id2label|label2id|num_labels|finetuning_task"
    r"|task_specific_params|tokenizer_class|keys_to_ignore_at_inference|pruned_heads|is_decoder|is_encoder_decoder"
    r"|tie_encoder_decoder|add_cross_attention|do_sample|temperature|top_[kp]|max_length|min_length|num_beams"
    r"|repetition_penalty|unsloth_fixed|chunk_size_feed_forward"
)
_LLAMA3_ROPE = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_positions",
}


def hugging_face_name(name: str) -> str:
    """ "layers.0.attention.wq.weight" -> "model.layers.0.self_attn.q_proj.weight"."""
    module, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", module):
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def architecture_from(fields: dict) -> DecoderConfig:
    """The architecture that a config.json describes. Raises ``ValueError`` for whatever this decoder is not."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise ValueError(f"model_type = {model_type!r}: only {', '.join(_ARCHITECTURES)} are known")
    problems = [
        f"{name} = {fields[name]!r}: only {allowed[0]!r} can be computed"
        for name, allowed in _ONLY.items()
        if name in fields and fields[name] not in allowed
    ]
    if any(kind != "full_attention" for kind in _typed(fields, "layer_types", list, None, problems) or ()):
        problems.append("layer_types: only full_attention can be computed")
    problems += [
        f"{name} = {value!r}: an unknown field, which may change the result; take it out if it does not"
        for name, value in fields.items()
        if name not in _READ and name not in _ONLY and not _HARMLESS.fullmatch(name)
    ]
    shape = {ours: _typed(fields, theirs, int, _REQUIRED, problems) for theirs, ours in _SIZES.items()}
    shape["n_kv_heads"] = _typed(fields, "num_key_value_heads", int, shape["n_heads"], problems)
    shape["head_dim"] = _typed(fields, "head_dim", int, 128 if model_type == "qwen3" else None, problems)
    shape["norm_eps"] = _typed(fields, "rms_norm_eps", float, 1e-6, problems)
    shape["tie_embeddings"] = _typed(fields, "tie_word_embeddings", bool, False, problems)
    biases = _typed(fields, "attention_bias", bool, False, problems)
    shape |= {"qkv_bias": True} if model_type == "qwen2" else {"qkv_bias": biases, "wo_bias": biases}
    shape |= _rope_from(fields, problems)
    if problems:
        raise ValueError("; ".join(problems))
    return DecoderConfig(**shape, qk_norm=model_type == "qwen3")


_REQUIRED = object()


def _typed(fields: dict, name: str, kind: type, default, problems: list[str]):
    """A field of a type: numbers are above 0; missing or null means the default."""
    value = fields.get(name)
    if value is None:
        if default is _REQUIRED:
            problems.append(f"{name} is missing")
        return None if default is _REQUIRED else default
    kinds = (int, float) if kind is float else kind
    good = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
    if not good or (kind in (int, float) and not 0 < value < math.inf):
        words = {
            int: "a whole number above 0",
            float: "a number above 0",
            bool: "true or false",
            list: "a list",
            dict: "a table",
        }
        problems.append(f"{name} = {value!r}: expected {words[kind]}")
        return None
    return value


def _rope_from(fields: dict, problems: list[str]) -> dict:
    """Rotary fields, from the new key (``rope_parameters``) or the old ones (``rope_theta``, ``rope_scaling``)."""
    new, old = (dict(_typed(fields, name, dict, {}, problems) or {}) for name in ("rope_parameters", "rope_scaling"))
    for parameters in (new, old):
        if "type" in parameters:  # its name before rope_type
            parameters.setdefault("rope_type", parameters.pop("type"))
    if new and old and any(new.get(key, value) != value for key, value in old.items()):
        problems.append(f"rope_parameters {new} and rope_scaling {old} disagree: keep one")
    parameters = old | new
    theta = _typed(fields, "rope_theta", float, 10_000.0, problems)
    rope = {"rope_theta": _typed(parameters, "rope_theta", float, theta, problems)}
    kind = parameters.pop("rope_type", "default")
    parameters.pop("rope_theta", None)
    if kind == "llama3":
        for theirs, ours in _LLAMA3_ROPE.items():
            rope[ours] = _typed(parameters, theirs, float, _REQUIRED, problems)
            parameters.pop(theirs, None)
    elif kind != "default":
        problems.append(f"rope_type = {kind!r}: only default and llama3 can be computed")
        return rope
    if parameters.pop("partial_rotary_factor", 1) != 1 or parameters:
        problems.append(f"rope parameters {parameters or 'partial_rotary_factor'}: unknown, and may change the result")
    return rope


def config_json(config: DecoderConfig, dtype: str, beside: dict) -> dict:
    """The config.json of an architecture, with old and new rope keys. ``beside``: more fields, such as eos_token_id.

    Raises ``ValueError`` where no Hugging Face model type has this combination of switches.
    """
    model_type = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not config.wo_bias else "llama"
    if model_type != "qwen2" and config.qkv_bias != config.wo_bias:
        raise ValueError(
            f"no Hugging Face model has qkv_bias = {config.qkv_bias}, wo_bias = {config.wo_bias}, "
            f"qk_norm = {config.qk_norm} together"
        )
    rope = {"rope_type": "default"}
    if config.rope_factor != 1:
        rope = {"rope_type": "llama3"} | {theirs: getattr(config, ours) for theirs, ours in _LLAMA3_ROPE.items()}
    fields = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_factor == 1 else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "dtype": dtype,
        "torch_dtype": dtype,
        **beside,
    }
    if model_type != "qwen2":
        fields["attention_bias"] = config.qkv_bias
    if model_type == "llama":
        fields["mlp_bias"] = False
    return fields
