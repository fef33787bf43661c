"""Tiny random models of ``transformers``, the oracle of the Hugging Face tests."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F

VOCAB = 256
SHAPE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCAB, max_position_embeddings=256,
)  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama_biases": ("Llama", dict(attention_bias=True)),
    "llama3_rope": ("Llama", dict(rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5)),
    "llama_head_dim": ("Llama", dict(head_dim=32, rms_norm_eps=1e-3)),
    "llama_mha": ("Llama", dict(num_key_value_heads=4)),
    "qwen2": ("Qwen2", dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen2_tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3_tied": ("Qwen3", dict(head_dim=32, tie_word_embeddings=True)),
    "qwen3_biases": ("Qwen3", dict(head_dim=32, attention_bias=True)),
}


def make_model(name: str, **overrides):
    """A random model of ``VARIANTS`` in fp32, with biases and norms that are not zero and one."""
    import transformers

    family, settings = VARIANTS[name]
    config = getattr(transformers, f"{family}Config")(**(SHAPE | settings | overrides))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" in key:
                parameter.normal_(mean=1.0, std=0.3)
            else:
                parameter.normal_(std=0.1)
    return model


def save_model(name: str, folder, **save_options) -> str:
    make_model(name).save_pretrained(folder, **save_options)
    return str(folder)


def loss_and_gradients(model, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over the labels that count, and gradients by Hugging Face name."""
    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}
