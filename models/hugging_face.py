"""The names and config.json of Hugging Face checkpoints. Both use half-split rotary pairs, so no weight is permuted.

Covers the model types llama, qwen2 and qwen3 (dense). A field of config.json that is neither read here nor known to
leave the result alone is an error: what is ignored can make fluent nonsense.
"""

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
    r"|sliding_window|max_window_layers|is_llama_config|transformers\.js_config|output_.*|return_dict|problem_type"
    r"|id2label|label2id|num_labels|task_specific_params|finetuning_task|tokenizer_class|keys_to_ignore_at_inference"
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
    if model_type not in _ARCHITECTURES:
        raise ValueError(f"model_type = {model_type!r}: only {', '.join(_ARCHITECTURES)} are known")
    problems = [
        f"{name} = {fields[name]!r}: only {allowed[0]!r} can be computed"
        for name, allowed in _ONLY.items()
        if name in fields and fields[name] not in allowed
    ]
    if any(kind != "full_attention" for kind in fields.get("layer_types") or ()):
        problems.append("layer_types: only full_attention can be computed")
    problems += [f"{name} is missing" for name in _SIZES if not isinstance(fields.get(name), int)]
    problems += [
        f"{name} = {value!r}: an unknown field, which may change the result; take it out if it does not"
        for name, value in fields.items()
        if name not in _READ and name not in _ONLY and not _HARMLESS.fullmatch(name)
    ]
    shape = {ours: fields.get(theirs) for theirs, ours in _SIZES.items()}
    biases = bool(fields.get("attention_bias", False))
    if model_type == "qwen2":
        shape |= {"qkv_bias": True}
    else:
        shape |= {"qkv_bias": biases, "wo_bias": biases}
    try:
        rope = _rope_from(fields)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    return DecoderConfig(
        **shape,
        **rope,
        n_kv_heads=fields.get("num_key_value_heads") or fields["num_attention_heads"],
        head_dim=fields.get("head_dim") or (128 if model_type == "qwen3" else None),
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qk_norm=model_type == "qwen3",
    )


def _rope_from(fields: dict) -> dict:
    """Rotary fields, from the new key (``rope_parameters``) or the old ones (``rope_theta``, ``rope_scaling``)."""
    parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or fields.get("rope_theta") or 10_000.0
    kinds = {parameters.pop(key) for key in ("rope_type", "type") if key in parameters} or {"default"}
    rope = {"rope_theta": float(theta)}
    if kinds == {"llama3"}:
        missing = [key for key in _LLAMA3_ROPE if key not in parameters]
        if missing:
            raise ValueError(f"the llama3 rope lacks {', '.join(missing)}")
        rope |= {ours: parameters.pop(theirs) for theirs, ours in _LLAMA3_ROPE.items()}
    elif kinds != {"default"}:
        raise ValueError(f"rope_type = {' and '.join(sorted(kinds))!r}: only default and llama3 can be computed")
    if parameters.pop("partial_rotary_factor", 1) != 1 or parameters:
        raise ValueError(f"rope parameters {parameters or 'partial_rotary_factor'}: unknown, and may change the result")
    return rope


def config_json(config: DecoderConfig, max_position_embeddings: int, dtype: str, token_ids: dict) -> dict:
    """The config.json of an architecture, with old and new rope keys. ``token_ids``: bos_token_id and the like.

    Raises ``ValueError`` where no Hugging Face model type has this combination of switches.
    """
    model_type = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not config.wo_bias else "llama"
    biases = {"llama": config.qkv_bias, "qwen3": config.qkv_bias}.get(model_type)
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
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_factor == 1 else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "dtype": dtype,
        "torch_dtype": dtype,
        **token_ids,
    }
    if biases is not None:
        fields["attention_bias"] = biases
    if model_type == "llama":
        fields["mlp_bias"] = False
    return fields
