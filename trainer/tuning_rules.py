"""Rules for fine-tuning: of ``config_rules``, which calls them."""

from collections.abc import Iterator

from models.decoder_config import DecoderConfig
from trainer.config import Config
from trainer.config_training import Lora
from trainer.errors import UserError
from trainer.tuning import matches


def tuning_problems(config: Config, architecture: DecoderConfig | None) -> Iterator[str]:
    """What is wrong with ``[lora]``, ``training.freeze`` and ``optimizer.groups``."""
    training, lora = config.training, config.lora
    if training.method != "lora" and lora != Lora():
        yield f'[lora] is set, but training.method = "{training.method}": use "lora", or leave the table out'
    if training.method == "lora" and config.float8.recipe != "none":
        yield (
            f'float8.recipe = "{config.float8.recipe}" with training.method = "lora": torchao\'s projections have no place for adapters; '
            'use float8.recipe = "none"'
        )
    if lora.dropout:
        yield (
            f"lora.dropout = {lora.dropout}: ranks would draw masks of their own, so that the run depended on its layout; use 0 "
            "(weight_decay or a smaller rank regularise as well)"
        )
    if architecture is not None and (training.freeze or config.optimizer.groups or training.method == "lora"):
        from trainer.build import check_tuning  # loads torch

        yield from check_tuning(config, architecture)


def check_first_stage(config: Config, architecture: DecoderConfig, n_layers: int) -> None:
    """Raise ``UserError`` if the first stage, the embedding and ``n_layers`` layers, has nothing to train.

    Torch's split backward of a stage starts from the gradient of its input, and finds no weights where there is none.
    """
    from trainer.build import trained_names

    own = {"tok_embeddings", *(f"layers.{layer}" for layer in range(n_layers))}
    if not any(matches(name, own) for name in trained_names(config, architecture)):
        raise UserError(
            f"parallel.schedule = {config.parallel.schedule} splits the backward, which torch cannot do behind a first stage with nothing "
            f"to train (the embedding and {n_layers} layer(s) are frozen): use 1F1B, GPipe or Interleaved1F1B, or train something there"
        )
