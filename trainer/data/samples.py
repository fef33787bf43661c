"""The samples of a run in order: source by source, each in its own shuffle."""

import functools
import json
import zlib

import torch
from torch.utils.data import Dataset

from trainer.config import Config
from trainer.data.mixture import Mixture, mixture_of
from trainer.data.order import RowOrder
from trainer.data.packing import rows_of
from trainer.data.rows import Rows
from trainer.data.sources import Place, open_stream, places_of, validation_places
from trainer.data.tokenizer import load_tokenizer_for

_ORDER = 2  # of the rules by which seed and sample number give a row: a run keeps the one that it began with


class Samples(Dataset):
    """Sample number k (0 is the run's first) is a pure function of the data, its seed and k: the same rows at any layout,
    any number of workers, and after any resume. It costs the same at any k."""

    def __init__(self, rows: dict[str, Rows], mixture: Mixture, seed: int, shuffle: bool, warnings: list[str] = ()):
        """``rows``: by source, in the mixture's order; "" for the only one."""
        self.rows, self.mixture, self.warnings = rows, mixture, list(warnings)
        self._names = list(rows)
        self._orders = [RowOrder(len(of_source), seed, shuffle, name) for name, of_source in rows.items()]

    def place(self, sample: int) -> tuple[str, int]:
        """The source and the row in it of a sample."""
        source, index = self.mixture.place(sample)
        return self._names[source], self._orders[source].row(index)

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        source, row = self.place(sample)
        return self.rows[source][row]

    @property
    def n_rows(self) -> int:
        return sum(len(rows) for rows in self.rows.values())

    @property
    def seq_len(self) -> int:
        return next(iter(self.rows.values())).seq_len

    def tokens_by_source(self, n_samples: int) -> dict[str, int]:
        """Tokens of each source in the first ``n_samples``; {} if there is only one source."""
        if "" in self.rows:
            return {}
        return {name: int(n) * self.seq_len for name, n in zip(self._names, self.mixture.taken(n_samples))}

    def samples_in(self, epochs: int, most: int) -> int:
        """How many samples there are, ``most`` at most, before a source would be read more than ``epochs`` times."""
        limits = [epochs * len(rows) for rows in self.rows.values()]
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = all(n <= limit for n, limit in zip(self.mixture.taken(middle), limits))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    @functools.cached_property
    def identity(self) -> dict[str, int]:
        """What tells these data from others: tokens, a checksum, and the version of the order."""
        each = {name: rows.identity for name, rows in self.rows.items()}
        tokens = sum(identity["tokens"] for identity in each.values())
        crc32 = each[""]["crc32"] if "" in each else zlib.crc32(json.dumps(each, sort_keys=True).encode())
        return {"tokens": tokens, "crc32": crc32, "order": _ORDER}


def load_samples(config: Config, vocab_size: int) -> Samples:
    """The training data of a config. Raises ``UserError`` for what the user can mend."""
    rows, warnings = _load(places_of(config), config, vocab_size)
    n_rows = {name: len(of_source) for name, of_source in rows.items()}
    mixture = mixture_of(config.data, config.training.global_batch_size, n_rows)
    return Samples(rows, mixture, config.data.seed, config.data.shuffle, warnings)


def load_validation_rows(config: Config, vocab_size: int) -> dict[str, Rows]:
    """The rows of each validation set by name; "" is the training text, where the config names none."""
    return _load(validation_places(config), config, vocab_size)[0]


def _load(places: dict[str, Place], config: Config, vocab_size: int) -> tuple[dict[str, Rows], list[str]]:
    tokenizer = load_tokenizer_for(config.data.tokenizer, vocab_size)
    rows, warnings = {}, []
    for name, place in places.items():
        stream, said = open_stream(place, config.data.tokenizer, tokenizer, vocab_size)
        rows[name] = rows_of(config.data, stream, config.training.seq_len, place.key)
        warnings += [*said, *rows[name].warnings]
    return rows, warnings
