"""Documents of a Hugging Face data set (extra ``hf``): ``hf://NAME?split=train``, or a folder from ``save_to_disk``.

What stands behind the question mark goes to ``datasets.load_dataset``: ``split`` (default train), ``name``, ``revision``,
``data_files``, and ``streaming=true``. A stream cannot be read from its middle, so it is never trained from as it runs: it is
read once, to its end or for ``take=N`` documents, into prepared shards, from which every step is at hand. Loads no torch.
"""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl

from trainer.errors import UserError

_KEYS = ("split", "name", "revision", "data_files", "streaming", "take")


def entries(path: str, text_field: str | None) -> Iterator[dict]:
    """Each entry; ``text_field``: a column that it must have. Raises ``UserError``."""
    name, keys = _parse(path)
    take = keys.pop("take", None)
    data = _call(path, "load_dataset", name, **keys) if keys else _from_disk(path)
    columns = data.column_names
    if columns is not None and text_field is not None and text_field not in columns:
        raise UserError(f"{path}: no column {text_field!r} (it has {', '.join(columns)})")
    for number, entry in enumerate(data):
        if take is not None and number >= int(take):
            return
        yield entry


def state_of_dataset(path: str) -> str:
    """What changes when the data set does, as ``datasets`` tells."""
    name, keys = _parse(path)
    if not keys:
        return str(_from_disk(path)._fingerprint)
    named = {key: value for key, value in keys.items() if key not in ("split", "streaming", "take")}
    builder = _call(path, "load_dataset_builder", name, **named)
    return f"{builder.config_id}/{builder.hash}/{keys.get('split')}/{keys.get('take')}"


def _from_disk(path: str):
    data = _call(path, "load_from_disk", path)
    if isinstance(data, dict):
        raise UserError(
            f"{path} has the splits {', '.join(data)}: name the folder of one, {Path(path) / next(iter(data))}"
        )
    return data


def _parse(path: str) -> tuple[str, dict]:
    """(name, arguments of ``load_dataset``); no arguments for a folder."""
    if not path.startswith("hf://"):
        if not Path(path).is_dir():
            raise UserError(f"{path}: no such folder; a data set of the hub is hf://NAME")
        return path, {}
    name, _, query = path.removeprefix("hf://").partition("?")
    keys = {"split": "train"} | dict(parse_qsl(query))
    for key in keys:
        if key not in _KEYS:
            raise UserError(f"{path}: unknown {key!r}; it takes {', '.join(_KEYS)}")
    if not keys.get("take", "1").isdigit():
        raise UserError(f"{path}: take={keys['take']} is not a number of documents")
    if "streaming" in keys:
        keys["streaming"] = keys["streaming"].lower() in ("1", "true")
    return name, keys


def _call(path: str, function: str, *arguments, **keys):
    try:
        import datasets
    except ImportError:
        raise UserError(f"{path}: a Hugging Face data set needs the extra hf: pip install 'meshloom[hf]'") from None
    try:
        return getattr(datasets, function)(*arguments, **keys)
    except Exception as error:  # the library, its loaders and its file systems raise whatever they like
        raise UserError(f"{path}: {type(error).__name__}: {error}") from None
