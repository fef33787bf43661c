"""Text to token ids.

A document becomes ``[BOS] tokens EOS``. BOS only where the tokenizer itself puts one before a text, as Llama 3's does and
Qwen's does not; EOS always: a tokenizer without one is refused. What looks like a special token in a text is text.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trainer.errors import UserError

ASSETS = Path(__file__).resolve().parent.parent.parent / "assets"


class Tokenizer(Protocol):
    """``n_ids``: ids are 0 ... n_ids - 1. ``bos_ids``, ``eos_id``: put before and after each document.
    ``special_ids``: of special tokens, by name."""

    n_ids: int
    bos_ids: list[int]
    eos_id: int
    special_ids: dict[str, int]

    def encode(self, text: str) -> np.ndarray:
        """Token ids of ``text``, int32 [n], without special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """``encode`` of each, on as many threads as the library takes."""

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of ``text`` with the special tokens that the tokenizer puts before a text, if any."""

    def encode_with_special(self, text: str) -> list[int]:
        """Token ids of ``text`` in which special tokens are what they look like."""

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """``encode`` of each, and the characters [first, last) that each token is made of: int64 [n, 2]."""

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, without special tokens."""

    def show(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens by name, for a reader."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, and 256 for the end of a document. Needs no file."""

    n_ids = 257
    bos_ids: list[int] = []
    eos_id = 256
    special_ids = {"<end>": 256}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text).tolist()

    def encode_with_special(self, text: str) -> list[int]:
        first, *others = text.split("<end>")
        return [*self.encode(first).tolist(), *(i for text in others for i in (256, *self.encode(text).tolist()))]

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encoded = []
        for text in texts:
            place = np.repeat(np.arange(len(text)), [len(character.encode("utf-8")) for character in text])
            encoded.append((self.encode(text), np.stack((place, place + 1), axis=1)))
        return encoded

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def show(self, ids: list[int]) -> str:
        return b"".join(bytes([i]) if i < 256 else b"<end>" for i in ids).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, and the end-of-text token that ``tokenizer_config.json`` beside it names."""

    def __init__(self, path: Path):
        # Said aloud, the library does not warn of loader workers that fork later, and use no tokenizer.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"data.tokenizer: {path} is not a tokenizer.json that can be read: {error}") from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.n_ids = max(vocabulary.values()) + 1
        name = self._eos_name(path.parent / "tokenizer_config.json", vocabulary)
        if name not in vocabulary:
            raise UserError(
                f"data.tokenizer: {path} names no end-of-text token; "
                'put {"eos_token": "..."} into a tokenizer_config.json beside it'
            )
        self.eos_id = vocabulary[name]
        self.bos_ids = self._put_before(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: number for number, token in added.items() if token.special}

    @staticmethod
    def _put_before(tokenizer) -> list[int]:
        """The special tokens that the tokenizer puts before a text; what it puts after one is EOS's business."""
        plain, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
        n_before = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0) if plain else 0
        return whole[:n_before]

    @staticmethod
    def _eos_name(config: Path, vocabulary: dict[str, int]) -> str | None:
        token = None
        if config.is_file():
            try:
                token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise UserError(f"data.tokenizer: {config} is not a JSON object: {error}") from None
        if isinstance(token, dict):
            token = token.get("content")
        usual = ("<|end_of_text|>", "<|endoftext|>", "</s>")
        return token or next((name for name in usual if name in vocabulary), None)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        self._tokenizer.encode_special_tokens = True  # a text that spells "<|endoftext|>" has not ended
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False  # a prompt may be a chat template's
        return self._tokenizer.encode(text).ids

    def encode_with_special(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        self._tokenizer.encode_special_tokens = True
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(encoding.ids, dtype=np.int32), _places(encoding.offsets)) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def show(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _places(offsets: list[tuple[int, int]]) -> np.ndarray:
    """A token begins at the latest where the one before ends: the library leaves leading spaces out."""
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    places[1:, 0] = np.minimum(places[1:, 0], places[:-1, 1])
    places[:1, 0] = 0
    return places


def tokenizer_file(name_or_path: str) -> Path | None:
    """Where "smollm2", a ``tokenizer.json`` or a folder that holds one lies; None for "bytes". Raises ``UserError``."""
    if name_or_path == "bytes":
        return None
    path = ASSETS / "smollm2" if name_or_path == "smollm2" else Path(name_or_path)
    missing = "no such file"
    if path.is_dir():
        path, missing = (
            path / "tokenizer.json",
            "no tokenizer.json in it (the default of data.tokenizer is model.hf_path)",
        )
    if not path.is_file():
        raise UserError(f'data.tokenizer = "{name_or_path}": {missing}; use "bytes", "smollm2" or a tokenizer.json')
    return path


def digest_of(name_or_path: str) -> str:
    """What identifies a tokenizer wherever its file lies: "bytes", or a digest of the file. Raises ``UserError``."""
    path = tokenizer_file(name_or_path)
    return "bytes" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def load_tokenizer_for(name_or_path: str, vocab_size: int) -> Tokenizer:
    """A tokenizer whose ids fit a model. Raises ``UserError``."""
    tokenizer = load_tokenizer(name_or_path)
    if tokenizer.n_ids > vocab_size:
        raise UserError(
            f'data.tokenizer = "{name_or_path}" has {tokenizer.n_ids} ids, but the model has vocab_size = {vocab_size}: '
            f"set model.vocab_size to at least {tokenizer.n_ids}, or use another tokenizer"
        )
    return tokenizer


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer of ``tokenizer_file``, ready to use. Raises ``UserError``."""
    path = tokenizer_file(name_or_path)
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)
