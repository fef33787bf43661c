"""``inspect-data``: the samples of a step as the model sees them, with the borders of documents and what is not trained."""

import argparse
from collections.abc import Iterator

from trainer.auto_layout import without_layout
from trainer.config import Config
from trainer.config_rules import architecture_of, resolve_config
from trainer.data.rows import IGNORED
from trainer.data.samples import Samples, load_samples
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.launch import check_files


def main(options: argparse.Namespace, config: Config) -> int:
    """Print the samples of a step. Raises ``UserError``."""
    if options.step < 1:
        raise UserError(f"--step {options.step}: the first step is 1")
    if options.samples is not None and options.samples < 1:
        raise UserError(f"--samples {options.samples}: at least 1 is needed")
    resolve_config(without_layout(config), 1)
    check_files(config)
    samples = load_samples(config, architecture_of(config).vocab_size)
    batch, epochs = config.training.global_batch_size, config.data.epochs
    if epochs and samples.samples_in(epochs, options.step * batch) < options.step * batch:
        raise UserError(f"--step {options.step}: with data.epochs = {epochs} the data ends before")
    tokenizer = load_tokenizer(config.data.tokenizer)
    first = (options.step - 1) * batch
    print(f"step {options.step}: samples {first:,} to {first + batch - 1:,}, of {samples.seq_len} tokens each")
    for sample in range(first, first + min(batch, options.samples or batch)):
        print()
        print("\n".join(describe(samples, sample, tokenizer)))
    return 0


def describe(samples: Samples, sample: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines that show one sample: a head, then each document's part of it, with ``[[ ]]`` around what is not trained."""
    source, row = samples.place(sample)
    rows = samples.rows[source]
    entry = rows[row]
    tokens, labels = entry["tokens"].tolist(), entry["labels"].tolist()
    n_trained = sum(label != IGNORED for label in labels)
    of_source = f"{source}, " if source else ""
    yield f"sample {sample:,}: {of_source}row {row:,} of {len(rows):,}; {n_trained} of {len(labels)} labels count"
    documents = [*rows.documents(row), (len(tokens), None)]
    for (first, document), (last, _) in zip(documents, documents[1:]):
        if last > first:
            what = "padding" if document < 0 else f"document {document:,}"
            yield f"--- {what}, tokens {first} to {last - 1} of the row"
            masked = rows.stream.masked
            # A token is trained where it is the label before it; a row's first token is nobody's label.
            trained = [labels[place - 1] == tokens[place] if place else not masked for place in range(first, last)]
            shown = tokens[first:last]
            if masked and labels[last - 1] != IGNORED:  # what ends a conversation is a label alone
                shown, trained = [*shown, labels[last - 1]], [*trained, True]
            yield _text(shown, trained, tokenizer)


def _text(tokens: list[int], trained: list[bool], tokenizer: Tokenizer) -> str:
    """The text of tokens, special ones by name, in runs of trained and not trained ones."""
    shown, start = "", 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or trained[place] != trained[start]:
            text = tokenizer.show(tokens[start:place])
            shown += text if trained[start] else f"[[{text}]]"
            start = place
    return shown
