"""The sections that say how a model is trained: ``[training]``, ``[lora]``, ``[optimizer]``, ``[lr_schedule]``."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config_types import Count, CountOrOff, Fraction, Glob, Length, Positive, Section


class Training(Section):
    method: Literal["pretrain", "sft", "lora"] = Field(
        "pretrain",
        description="learn all of a text; or the assistant's part of conversations (sft); or either, in low-rank adapters "
        "beside frozen weights (lora)",
    )
    freeze: tuple[Glob, ...] = Field(
        (),
        description="parameters that are not trained: globs over names such as layers.0.attention.wq.weight, or over the modules "
        'that hold them ("tok_embeddings", "layers.[0-3]")',
    )
    steps: Count = Field(100, description="optimizer steps of the whole run")
    seq_len: Length = Field(128, description="tokens per sequence")
    global_batch_size: Length = Field(16, description="sequences per optimizer step, over all ranks")
    micro_batch_size: Length = Field(2, description="sequences per forward on one data rank")
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="clip the gradient to this global 2-norm; 0: off"
    )
    loss_chunk_tokens: CountOrOff = Field(
        1024,
        description="tokens whose logits exist at once, where seq_len is above it: the loss and its gradients are the same, "
        "with a large vocabulary in less memory; 0: all of a micro-batch",
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="on a loss or gradient that is inf or nan, whose update is never applied: stop, or go on"
    )
    nonfinite_limit: Count = Field(10, description='with nonfinite = "skip": stop after so many such steps in a row')


class Lora(Section):
    """Hu et al. 2021: ``W x + scale B (A x)``, of which A and B are trained."""

    rank: Count = Field(16, description="rows of A, columns of B")
    alpha: Positive = Field(32.0, description="the adapter's output is scaled by alpha / rank")
    rslora: bool = Field(False, description="by alpha / sqrt(rank) instead (Kalajdzievski 2023)")
    dropout: Fraction = Field(0.0, description="only 0: masks drawn on ranks would depend on the layout")
    targets: tuple[Glob, ...] = Field(
        ("layers.*.attention.w[qkvo]", "layers.*.feed_forward.w[123]"),
        min_length=1,
        description="globs over the projections that get an adapter",
    )


class OptimizerGroup(Section):
    match: tuple[Glob, ...] = Field(
        min_length=1, description="globs as of training.freeze: the parameters of the group"
    )
    lr_scale: Annotated[float, Field(ge=0)] = Field(1.0, description="of the learning rate")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        None, description="of all of them, vectors too (default: optimizer.weight_decay, of matrices)"
    )


class Optimizer(Section):
    lr: Positive = Field(1e-3, description="peak learning rate of AdamW")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), strict=False, description="decay of the two moments"
    )
    eps: Positive = Field(1e-8, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.1, description="of matrices; norms and biases are never decayed"
    )
    groups: tuple[OptimizerGroup, ...] = Field(
        (),
        description="tables [[optimizer.groups]] with match, lr_scale and weight_decay; a parameter is in one at most",
    )


class LrSchedule(Section):
    warmup_steps: CountOrOff = Field(
        10, description="steps n of n / (warmup_steps + 1) of the peak; 0: start at the peak"
    )
    decay: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description='shape after the warm-up; "wsd": constant, then linear over the last decay_steps'
    )
    min_lr_ratio: Fraction = Field(0.1, description="the decay's target, as a share of the peak")
    decay_steps: Count | None = Field(None, description='length of the "wsd" decay (default: a tenth of total_steps)')
    total_steps: Count | None = Field(None, description="where the decay would end (default: training.steps)")
