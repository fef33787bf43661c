"""Checkpoint folders by name and state, without their tensors. Loads no torch."""

import contextlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from models.decoder_config import DecoderConfig
from trainer.config import Config, Data
from trainer.config_load import with_rows_of_method
from trainer.data.mixture import weights_by_step
from trainer.data.tokenizer import digest_of
from trainer.errors import UserError

STATE_FILE = "trainer_state.json"
# What makes it the same run. The layout, the machine and the length may change at a resume.
_IDENTITY = (
    "job.seed", "model", "data.seed", "data.shuffle", "data.packing", "data.isolate_documents",
    "data.too_long", "training.seq_len", "training.global_batch_size", "training.method", "training.freeze",
    "lora.rank", "lora.alpha", "lora.rslora", "lora.targets",
)  # fmt: skip


EXPORT_MARKER = "meshloom_export.json"  # in an exported directory: the run and step that it is of
_STATE_KEYS = ("step", "skipped_steps", "config", "files", "tokenizer", "origin")
_LATER_STATE_KEYS = (
    "validation_loss",
    "nonfinite_in_a_row",
    "data",
    "base",
)  # None where an earlier version did not write them


def step_of(folder: Path) -> int | None:
    match = re.fullmatch(r"step-(\d{8})", folder.name)
    return int(match[1]) if match else None


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints below ``root``, oldest first."""
    found = [
        folder for folder in root.glob("step-*") if step_of(folder) is not None and (folder / STATE_FILE).is_file()
    ]
    return sorted(found, key=step_of)


def choose_resume(config: Config, damaged: Sequence[Path] = ()) -> Path | None:
    """The checkpoint that the config asks to start from, None for a fresh start. Raises ``UserError``.

    ``damaged``: the run's own checkpoints that are known to be; they do not count.

    A run's own newest checkpoint always comes first, so that the command that started from another folder
    goes on after a kill.
    """
    root, resume = checkpoint_root(config), config.checkpoint.resume
    own = [folder for folder in complete_checkpoints(root) if folder not in damaged]
    if resume == "auto":
        return own[-1] if own else None
    if resume == "never":
        if own:
            raise UserError(
                f'checkpoint.resume = "never", but job.output_dir = "{config.job.output_dir}" already holds a run '
                f"(checkpoint of step {step_of(own[-1])}): choose another job.output_dir, or remove that folder"
            )
        return None
    folder = Path(resume)
    if not (folder / STATE_FILE).is_file() and _were_started_from(resume, own):
        return own[-1]  # it has gone since, and is not needed any more
    if not (folder / STATE_FILE).is_file():
        raise UserError(
            f'checkpoint.resume = "{resume}" is not a checkpoint folder; use "auto", "never" or .../step-00000100'
        )
    if own and folder.resolve().parent == root.resolve() and folder.resolve() != own[-1].resolve():
        raise UserError(
            f'checkpoint.resume = "{resume}", but job.output_dir = "{config.job.output_dir}" goes on to step '
            f"{step_of(own[-1])}: choose another job.output_dir, or remove the later checkpoints"
        )
    return own[-1] if own else folder


def _were_started_from(resume: str, folders: Sequence[Path]) -> bool:
    """Whether these checkpoints are of a run with that ``checkpoint.resume``."""
    for folder in folders:
        with contextlib.suppress(UserError):  # damaged
            if read_state(folder)["config"]["checkpoint"]["resume"] == resume:
                return True
    return False


def checkpoint_root(config: Config) -> Path:
    return Path(config.job.output_dir) / "checkpoints"


def read_state(folder: Path) -> dict:
    """The checkpoint's ``trainer_state.json``. Raises ``UserError`` if it is damaged, or the folder is none.

    step, skipped_steps; config: as resolved; files: their manifest; tokenizer: digest of its file; origin: what a
    Hugging Face directory said beside the architecture; validation_loss: None where it was not measured at that step; data:
    ``Samples.identity``; base: of adapters, what they stand beside, as from ``adapters.base_of``.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a checkpoint folder, such as outputs/debug/checkpoints/step-00000100")
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state.pop("crc32") != _crc_of(state):
            raise ValueError("it has been changed since it was written: its checksum differs")
        return {key: state[key] for key in _STATE_KEYS} | {key: state.get(key) for key in _LATER_STATE_KEYS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_error(folder, error) from None


def write_state(folder: Path, **state) -> None:
    """Write ``trainer_state.json``: the folder's tensors are complete."""
    with (folder / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump(state | {"crc32": _crc_of(state)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())  # DCP does the same with its files


def _crc_of(state: dict) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, if it is there: first its name, so that a kill leaves nothing that looks like one."""
    removed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, removed)
    if removed.is_symlink():  # moved to another disk: the link goes, what it leads to is the user's
        removed.unlink()
    shutil.rmtree(removed, ignore_errors=True)


def remove_left_overs(root: Path) -> None:
    """Delete what a killed run was writing, or removing."""
    for pattern in ("step-*.partial", "step-*.removed"):
        for left_over in root.glob(pattern):
            shutil.rmtree(left_over, ignore_errors=True)


def damaged_error(folder: Path, error: BaseException) -> UserError:
    earlier = [other for other in complete_checkpoints(folder.parent) if step_of(other) < (step_of(folder) or 0)]
    hint = f"to go on from {earlier[-1]} instead, move it away" if earlier else "to start over, move it away"
    reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[-1:]])
    return UserError(f"checkpoint {folder} cannot be read ({reason}): {hint}")


def architecture_in(folder: Path) -> DecoderConfig:
    """The architecture of the model in a checkpoint. Raises ``UserError``."""
    model = read_state(folder)["config"]["model"]
    return DecoderConfig(**{key: model[key] for key in DecoderConfig.__dataclass_fields__})


def holds_adapters(state: dict) -> bool:
    """Whether a checkpoint, by its ``trainer_state.json``, is of adapters alone."""
    return state["config"]["training"].get("method") == "lora"


def best_checkpoint(folders: Sequence[Path]) -> tuple[Path, float] | None:
    """The checkpoint with the lowest validation loss, the first of equals, and that loss. None if none has one.

    Only losses over the same validation sets and batches as the newest of ``folders`` are compared. Raises ``UserError``
    if one cannot be read.
    """
    found = []
    for folder in folders:
        state = read_state(folder)
        validation = {key: value for key, value in state["config"]["validation"].items() if key != "interval"}
        found.append((state["validation_loss"], step_of(folder), folder, validation))
    alike = [entry for entry in found if entry[3] == found[-1][3] and entry[0] is not None and math.isfinite(entry[0])]
    return (min(alike)[2], min(alike)[0]) if alike else None


def set_aside(folder: Path) -> Path:
    """Take a damaged checkpoint out of the row, so that it never counts as one that is kept. Returns where it is now."""
    aside = folder.with_name(f"{folder.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def newest_checkpoint(output_dir: str) -> Path:
    """The newest checkpoint of a run. Raises ``UserError`` if it has none."""
    found = complete_checkpoints(Path(output_dir) / "checkpoints")
    if not found:
        raise UserError(f'job.output_dir = "{output_dir}" holds no checkpoint')
    return found[-1]


def changed_since(state: dict, config: Config) -> list[str]:
    """What else differs from the config that a checkpoint was written with, as "key: before -> after"."""
    now = json.loads(config.model_dump_json())
    sections = ("training", "optimizer", "lr_schedule", "parallel", "precision", "validation")
    return [
        f"{section}.{key}: {before} -> {now[section].get(key)}"
        for section in sections
        for key, before in state["config"].get(section, {}).items()
        if now[section].get(key) != before
    ]


def check_same_run(folder: Path, config: Config, data: dict[str, int]) -> None:
    """Raise ``UserError`` if the checkpoint is of another run: other model, data, seed or batch.

    ``data``: ``Samples.identity`` of what the config reads now; where it lies does not matter.
    """
    state = read_state(folder)
    saved, saved_tokenizer = state["config"], state["tokenizer"]
    now = json.loads(config.model_dump_json())
    for section, keys in with_rows_of_method(Config()).model_dump(mode="json").items():
        saved[section] = keys | saved.get(section, {})  # an earlier version did not have every key
    for tables in (saved, now):
        tables["model"].pop("hf_path", None)  # read at the start alone: the directory may have moved
    problems = []
    for key in _IDENTITY:
        section, _, name = key.partition(".")
        before, after = (tables[section][name] if name else tables[section] for tables in (saved, now))
        if before != after:
            shown = f"was {before!r}, is {after!r}" if name else "differs"
            problems.append(
                f"{key} {shown}, but the run in {folder} must keep it: change it back, or choose another job.output_dir"
            )
    if saved_tokenizer != digest_of(config.data.tokenizer):
        problems.append(
            f"data.tokenizer = {config.data.tokenizer!r} is not the one that the run in {folder} was started with "
            f"({saved['data']['tokenizer']!r}): name that one, or choose another job.output_dir"
        )
    problems += _order_problems(state, config, data)
    before = state["data"] and {key: value for key, value in state["data"].items() if key != "order"}
    now_read = {key: value for key, value in data.items() if key != "order"}
    if before is not None and before != now_read and saved_tokenizer == digest_of(config.data.tokenizer):
        problems.append(
            f"data.path = {config.data.path!r} holds {data['tokens']:,} tokens that are not those the run in {folder} was "
            f"started with ({before['tokens']:,}, data.path = {saved['data']['path']!r}): its batches would be others. Bring "
            "that text back, or choose another job.output_dir"
        )
    if problems:
        raise UserError(*problems)


def _order_problems(state: dict, config: Config, data: dict[str, int]) -> Iterator[str]:
    """Of the sources' shares up to the saved step, and of the rules of the shuffle: both say which samples were seen."""
    saved, step, other = state["config"]["data"], state["step"], "or choose another job.output_dir"
    if saved.get("sources") or config.data.sources:
        keys = {"sources": saved.get("sources", {}), "curriculum": saved.get("curriculum", [])}
        before = Data.model_validate_json(json.dumps(keys))
        was, now = ([stage for stage in weights_by_step(data) if stage[0] <= step] for data in (before, config.data))
        if was != now:
            yield (
                f"data.sources: up to step {step} the weights from step {was[-1][0]} on were {was[-1][1]}, and would be {now[-1][1]}, "
                f"from step {now[-1][0]} on: change them from a later step on, in data.curriculum, {other}"
            )
    if state["data"] is not None and config.data.shuffle and state["data"].get("order", 1) != data["order"]:
        yield f"the checkpoint is of a version that shuffled in another way: go on with that version, {other}"
