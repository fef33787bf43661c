"""Documents to token ids: text, or conversations by their template. Loads no torch."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from trainer.data.chat_template import ChatTemplate, Rendered, Template
from trainer.data.conversations import conversation_of
from trainer.data.documents import BadLines, Part, Piece, read_documents
from trainer.data.indexed import dtype_for
from trainer.data.tokenizer import Tokenizer

_BATCH_CHARACTERS = 1 << 20  # handed to the tokenizer at once
_CONVERSATIONS = 256  # likewise


@dataclass(frozen=True)
class Reader:
    """read: the documents of a part. encode: pieces of their ids, and whether a document ends with them. dtype: that holds them."""

    read: Callable[[Part, BadLines], Iterator[Piece]]
    encode: Callable[[Iterator[Piece]], Iterator[tuple[list[np.ndarray], bool]]]
    dtype: np.dtype


def reader_of(tokenizer: Tokenizer, text_field: str, template: Template | None) -> Reader:
    """``template``: of conversations; None for text."""
    if template is None:
        read = functools.partial(read_documents, text_field=text_field)
        return Reader(read, lambda documents: tokenize(documents, tokenizer), dtype_for(tokenizer.n_ids))
    chat = ChatTemplate(template, tokenizer)

    def convert(record) -> Rendered:
        try:
            return chat.render(conversation_of(record))
        except RecursionError:
            raise ValueError("nested too deeply") from None

    def encode(conversations: Iterator[Piece]) -> Iterator[tuple[list[np.ndarray], bool]]:
        while some := [rendered for rendered, _ in itertools.islice(conversations, _CONVERSATIONS)]:
            yield from (([ids], True) for ids in chat.encode(some))

    return Reader(functools.partial(read_documents, convert=convert), encode, np.dtype(np.int32))  # with a sign


def tokenize(documents: Iterator[tuple[str, bool]], tokenizer: Tokenizer) -> Iterator[tuple[list[np.ndarray], bool]]:
    """Token ids, BOS and EOS included, of each piece of a document, and whether the document ends with it.

    Texts go to the tokenizer in batches.
    """
    texts: list[str] = []
    ends: list[bool] = []
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    bos = [np.array(tokenizer.bos_ids, dtype=np.int32)] if tokenizer.bos_ids else []
    begin = bos

    def flush():
        nonlocal begin
        for ids, is_last in zip(tokenizer.encode_batch(texts), ends):
            yield [*begin, ids, eos] if is_last else [*begin, ids], is_last
            begin = bos if is_last else []
        texts.clear()
        ends.clear()

    n_characters = 0
    for text, is_last in documents:
        texts.append(text)
        ends.append(is_last)
        n_characters += len(text)
        if n_characters >= _BATCH_CHARACTERS:
            yield from flush()
            n_characters = 0
    yield from flush()
