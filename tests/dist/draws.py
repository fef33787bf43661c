"""Random compositions: everything the config rules accept must equal one process."""

import random
from typing import get_args

from tests.tiny import tiny_config
from trainer.config import TorchSchedule
from trainer.config_rules import resolve_config
from trainer.errors import UserError

_FACTORS = {2: [(2,)], 4: [(4,), (2, 2)], 8: [(2, 2, 2), (4, 2)]}
_AXES = ("pp", "tp", "dp_shard", "dp_replicate")
SCHEDULES = get_args(TorchSchedule)


def draw(seed: int) -> tuple[int, str, dict]:
    """Number of processes, label mask and overrides of the tiny config of draw ``seed``: always an accepted config."""
    rng = random.Random(seed)
    # Axes and schedule are kept, or those that are often refused would be rare.
    world_size, degrees = _draw_axes(rng)
    schedule = rng.choice(SCHEDULES)
    while True:
        overrides = _draw_rest(rng, degrees, schedule)
        try:
            resolve_config(tiny_config(**overrides), world_size)
        except UserError:
            continue
        return world_size, rng.choice(["none", "none", "unequal", "empty_rows"]), overrides


def _draw_axes(rng: random.Random) -> tuple[int, dict[str, int]]:
    world_size = rng.choice([2, 4, 4, 8])
    factors = rng.choice(_FACTORS[world_size])
    axes = rng.sample(_AXES, len(factors))
    if rng.random() < 0.4 and "pp" not in axes:
        axes[0] = "pp"
    return world_size, dict.fromkeys(_AXES, 1) | dict(zip(axes, factors))


def _draw_rest(rng: random.Random, degrees: dict[str, int], schedule: str) -> dict:
    n_heads, n_kv_heads = rng.choice([(4, 4), (4, 2), (4, 1), (8, 2), (8, 4)])
    dp, micro_batch_size = degrees["dp_shard"] * degrees["dp_replicate"], rng.choice([1, 1, 2])
    n_microbatches = rng.choice([1, 2, 3, 4, 4, 8])
    overrides = {
        **{f"parallel__{axis}": degree for axis, degree in degrees.items()},
        "model__n_heads": n_heads,
        "model__n_kv_heads": n_kv_heads,
        "model__head_dim": rng.choice([8, 16]),
        "model__n_layers": rng.randint(2, 9),
        "model__vocab_size": rng.randint(250, 300),
        "model__tie_embeddings": rng.random() < 0.4,
        "model__qkv_bias": rng.random() < 0.3,
        "model__wo_bias": rng.random() < 0.2,
        "model__qk_norm": rng.random() < 0.3,
        "training__seq_len": rng.choice([16, 24, 31]),
        "training__micro_batch_size": micro_batch_size,
        "training__global_batch_size": dp * micro_batch_size * n_microbatches,
        "training__max_grad_norm": rng.choice([0, 0.1, 1]),
        "activation_checkpoint__mode": rng.choice(["none", "none", "selective", "full"]),
        "compile__enabled": rng.random() < 0.06,
        "compile__backend": "aot_eager",
        "parallel__reshard_after_forward": rng.choice(["auto", "auto", "always", "never"]),
    }
    if degrees["tp"] > 1:
        overrides["parallel__sequence_parallel"] = rng.random() < 0.7
        overrides["parallel__loss_parallel"] = rng.random() < 0.7
        overrides["parallel__replicate_kv_heads"] = rng.random() < 0.5
    if degrees["pp"] > 1:
        overrides["parallel__schedule"] = schedule
        if schedule in ("Interleaved1F1B", "LoopedBFS") and rng.random() < 0.3:
            overrides["parallel__virtual_stages"] = 3
        if n_microbatches % 2 == 0 and rng.random() < 0.3:
            overrides["parallel__schedule_microbatches"] = n_microbatches // 2
    return overrides


def describe(world_size: int, mask: str, overrides: dict) -> dict[str, str]:
    """The draw in the columns of docs/parity.md."""
    get = lambda key, default="": overrides.get(key, default)  # noqa: E731
    layout = " ".join(f"{axis}{get(f'parallel__{axis}')}" for axis in _AXES if get(f"parallel__{axis}") > 1)
    schedule = get("parallel__schedule")
    virtual = get("parallel__virtual_stages")
    flags = [name for name in ("tie_embeddings", "qkv_bias", "wo_bias", "qk_norm") if get(f"model__{name}")]
    flags += [f"no {name}" for name in ("sequence_parallel", "loss_parallel") if get(f"parallel__{name}", True) is False]
    if get("parallel__replicate_kv_heads", False) and get("parallel__tp") > get("model__n_kv_heads"):
        flags.append("replicate_kv_heads")
    if get("activation_checkpoint__mode") != "none":
        flags.append(f"{get('activation_checkpoint__mode')} recompute")
    if get("compile__enabled"):
        flags.append("compile")
    dp = get("parallel__dp_shard") * get("parallel__dp_replicate")
    micro_batches = get("training__global_batch_size") // (dp * get("training__micro_batch_size"))
    runs = micro_batches // get("parallel__schedule_microbatches", micro_batches)
    return {
        "layout": layout,
        "schedule": f"{schedule}{f' x{virtual}' if virtual else ''}{f' in {runs} runs' if runs > 1 else ''}",
        "layers": str(get("model__n_layers")),
        "heads": f"{get('model__n_heads')}/{get('model__n_kv_heads')}",
        "vocab": str(get("model__vocab_size")),
        "micro-batches": f"{micro_batches} x {get('training__micro_batch_size')}",
        "labels": mask,
        "also": ", ".join(flags),
    }
