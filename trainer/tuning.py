"""Which parameters are trained, at which rate, and which get adapters: globs of the config over names. Loads no torch.

A glob names a parameter (layers.0.attention.wq.weight) or a module that holds it (layers.0), and ``*`` also stands for dots.
"""

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from models.names import is_adapter
from trainer.config import Config
from trainer.config_training import Lora, OptimizerGroup


def is_lora(config: Config) -> bool:
    return config.training.method == "lora"


def lora_scale(lora: Lora) -> float:
    """By which an adapter's output is multiplied."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs names this parameter or module, or one that holds it."""
    parts = name.split(".")
    holders = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(holder, glob) for glob in globs for holder in holders)


def is_frozen(config: Config, name: str) -> bool:
    """Whether the parameter ``name`` keeps its initial value."""
    return (is_lora(config) and not is_adapter(name)) or matches(name, config.training.freeze)


def group_of(config: Config, name: str) -> OptimizerGroup | None:
    """The table of ``optimizer.groups`` that a parameter is in, if any."""
    return next((group for group in config.optimizer.groups if matches(name, group.match)), None)


def glob_problems(
    config: Config, trained: Sequence[str], frozen: Sequence[str], adaptable: Sequence[str]
) -> Iterator[str]:
    """What is wrong with the globs. ``trained``, ``frozen``: the parameters of the whole model, adapters included."""
    unmatched = list(_unmatched("lora.targets", config.lora.targets, adaptable)) if is_lora(config) else []
    unmatched += _unmatched("training.freeze", config.training.freeze, [*trained, *frozen])
    yield from unmatched
    if not trained:
        if not unmatched:
            yield f"training.freeze = {list(config.training.freeze)} leaves nothing to train"
        return
    taken: dict[str, int] = {}
    for number, group in enumerate(config.optimizer.groups, 1):
        key = f"optimizer.groups, table {number}: match"
        problems = list(_unmatched(key, group.match, [*trained, *frozen]))
        yield from problems
        mine = [name for name in trained if matches(name, group.match)]
        if not mine and not problems:
            yield f"{key} = {list(group.match)}: all that it matches is frozen"
        for name in mine:
            if (other := taken.setdefault(name, number)) != number:
                yield f"optimizer.groups: {name} is matched by table {other} and by table {number}: keep one"
                break


def _unmatched(key: str, globs: Iterable[str], names: Sequence[str]) -> Iterator[str]:
    for glob in globs:
        if not any(matches(name, [glob]) for name in names):
            known = {
                ".".join(parts[:n])
                for parts in (_any_layer(name).split(".") for name in names)
                for n in range(1, len(parts) + 1)
            }
            # Near to one of the names, or to the end of one.
            ends = {end: name for name in sorted(known, reverse=True) for end in (name, name.rpartition(".")[2])}
            near = difflib.get_close_matches(_any_layer(glob).strip("*."), list(ends), n=1, cutoff=0.5)
            hint = (
                f"did you mean {ends[near[0]]}?"
                if near
                else f"there are {', '.join(sorted({_any_layer(n) for n in names}))}"
            )
            yield f'{key}: "{glob}" matches nothing in the model; {hint}'


def _any_layer(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)
