"""The tiny model of the cases, its batches, and the reference: one process, no trainer, no parallelism."""

import fnmatch
import functools

import torch
import torch.nn.functional as F

from models.decoder import Decoder
from models.initialize import draw_slice, initial_std
from models.lora import adaptable, add_adapters
from trainer.config import Config
from trainer.config_load import Override, load_config
from trainer.config_rules import Resolved, resolve_config
from trainer.config_training import OptimizerGroup
from trainer.data.packing import positions_after
from trainer.data.rows import IGNORED
from trainer.observe import Observed
from trainer.tuning import lora_scale

TINY = {
    "model.dim": 64, "model.n_layers": 4, "model.n_heads": 4, "model.n_kv_heads": 2, "model.head_dim": 16,
    "model.ffn_dim": 128, "model.vocab_size": 256, "training.seq_len": 32, "training.global_batch_size": 8,
    "training.micro_batch_size": 2, "training.max_grad_norm": 0.5, "optimizer.lr": 0.01,
    "metrics.tensorboard": False,
}  # fmt: skip


def tiny_config(**overrides) -> Config:
    """The tiny configuration; keys are given with ``__`` for the dot: ``parallel__tp=2``."""
    keys = TINY | {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, [Override(key, _toml(value)) for key, value in keys.items()])


def _toml(value, inside: bool = False) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(entry, True)}" for key, entry in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(entry, True) for entry in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if inside and isinstance(value, str) else str(value)


def make_batch(config: Config, step: int, mask: str = "none") -> tuple[torch.Tensor, ...]:
    """The global batch of a step: tokens and labels int64 [global batch, S], and positions of isolated documents.

    mask: "none"; "unequal" ignores a different, large share of each sequence; "empty_rows" also all labels of
    the first half of the batch; "all" every label.
    """
    training, vocab = config.training, config.model.vocab_size
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (training.global_batch_size, training.seq_len + 1)
    tokens = torch.randint(0, vocab, shape, generator=generator)
    tokens[:, 0] = vocab - 1  # the last id is an input and a label
    tokens[:, -1] = vocab - 1
    labels = tokens[:, 1:].clone()
    if mask in ("unequal", "empty_rows"):
        kept = torch.rand(labels.shape, generator=generator) < torch.linspace(0.05, 1, shape[0])[:, None] ** 2
        labels[~kept] = IGNORED
    if mask == "empty_rows":
        labels[: shape[0] // 2] = IGNORED
    if mask == "all":
        labels[:] = IGNORED
    if not config.data.isolate_documents:
        return tokens[:, :-1], labels
    is_start = torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.5, shape[0])[:, None]
    labels[:, :-1][is_start[:, 1:]] = IGNORED
    return tokens[:, :-1], labels, torch.stack([positions_after(row) for row in is_start])


def reference_model(resolved: Resolved) -> Decoder:
    architecture, config = resolved.architecture, resolved.config
    model = Decoder(architecture, config.training.seq_len)
    if config.training.method == "lora":
        add_adapters(
            model,
            [name for name in adaptable(model) if _named(name, config.lora.targets)],
            config.lora.rank,
            lora_scale(config.lora),
        )
    for name, parameter in model.named_parameters():
        base_of_lora = config.training.method == "lora" and not name.endswith(("lora_a", "lora_b"))
        parameter.requires_grad_(not base_of_lora and not _named(name, config.training.freeze))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            start = (0,) * len(shape)
            parameter.copy_(draw_slice(config.job.seed, name, initial_std(architecture, name), shape, start, shape))
    return model


def _named(name: str, globs) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, f"{glob}.*") for glob in globs)


@functools.lru_cache(maxsize=32)
def reference(
    config: Config, n_steps: int, mask: str = "none", build=reference_model, loss=F.cross_entropy, betas=None
) -> Observed:
    """Train in this process with nothing but torch: one forward of the whole global batch a step."""
    summed_loss = functools.partial(loss, reduction="sum", ignore_index=IGNORED)
    resolved = resolve_config(config, 1)
    model, seen = build(resolved), Observed()
    named = dict(model.named_parameters())
    seen.initial = {name: parameter.detach().clone() for name, parameter in named.items()}
    frozen = {name: p for name, p in named.items() if not p.requires_grad}
    named = {name: p for name, p in named.items() if p.requires_grad}
    section, groups = config.optimizer, []
    for name, p in named.items():
        own = next((group for group in section.groups if _named(name, group.match)), OptimizerGroup(match=("*",)))
        decay = section.weight_decay if p.dim() >= 2 else 0.0
        groups.append(
            {
                "params": [p],
                "lr": section.lr * own.lr_scale,
                "weight_decay": decay if own.weight_decay is None else own.weight_decay,
            }
        )
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=betas or section.betas, eps=section.eps)
    for step in range(1, n_steps + 1):
        tokens, labels, *positions = make_batch(config, step, mask)
        n_valid = int((labels != IGNORED).sum())
        loss = summed_loss(model(tokens, *positions).flatten(0, 1), labels.flatten()) / max(n_valid, 1)
        loss.backward()
        if step == 1:
            seen.gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in named.values()]))
        if config.training.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(named.values(), config.training.max_grad_norm)
        if step == 1:
            seen.clipped = {name: parameter.grad.clone() for name, parameter in named.items()}
        optimizer.step()
        optimizer.zero_grad()
        seen.losses.append(loss.item())
        seen.grad_norms.append(norm.item())
    seen.final = {name: parameter.detach().clone() for name, parameter in (frozen | named).items()}
    return seen
