"""A checkpoint's tensors on disk, in PyTorch's distributed format (DCP). Nothing read here can run code.

DCP reads tensors with ``weights_only``, but unpickles its ``.metadata`` with plain ``pickle``, which calls whatever the
file names: ``Reader`` lets it name DCP's own records and nothing else.
"""

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint_folder import damaged_error, read_state
from trainer.errors import UserError
from trainer.manifest import find_damage
from trainer.rank import on_main_rank

_RECORDS = "torch.distributed.checkpoint.metadata"  # the module also holds dataclass, os, ...: by name alone
_ALLOWED = {
    *((_RECORDS, name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    )),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")


class Reader(dcp.FileSystemReader):
    """torch's reader, but for the unpickling of ``.metadata``."""

    def read_metadata(self, *args, **kwargs):
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        for name, entry in metadata.state_dict_metadata.items():
            if type(entry) is not dcp.metadata.TensorStorageMetadata:  # torch would unpickle it without restraint
                raise pickle.UnpicklingError(f"{name} is not a tensor")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _TensorsOnly(dcp.DefaultLoadPlanner):
    """torch's planner, but for entries that are no tensors, which it would unpickle without restraint."""

    def load_bytes(self, read_item, value):
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is not a tensor")


class Writer(dcp.FileSystemWriter):
    """torch's writer, which waits for the disk, but for what it says where a write fails.

    One thread: with more, torch 2.13 loses the error of all but one, and calls half a checkpoint a whole one.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, thread_count=1)
        torch.serialization.set_crc32_options(False)  # the manifest has one checksum a file; one a tensor costs more

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None  # torch.save's complaint over its archive would hide the system's


def stored_tensors(folder: Path) -> dict:
    """Name -> size and dtype of every tensor in a checkpoint."""
    try:
        return Reader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a damaged file raises
        raise damaged_error(folder, error) from None


@contextlib.contextmanager
def _on_this_process_alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors of a checkpoint from this process alone."""
    with _on_this_process_alone():
        dcp.save(tensors, storage_writer=Writer(folder), no_dist=True)


def read_tensors(folder: Path, tensors: dict[str, torch.Tensor], alone: bool = True) -> None:
    """Fill ``tensors``, by name in the checkpoint, on this process alone or on all ranks. dtypes are converted."""
    try:
        with _on_this_process_alone() if alone else contextlib.nullcontext():
            dcp.load(tensors, storage_reader=Reader(str(folder)), planner=_TensorsOnly(), no_dist=alone)
    except CheckpointException as error:  # of any rank, on all ranks
        raise damaged_error(folder, next(iter(error.failures.values()))[0]) from None


def damage_in(folder: Path) -> list[str]:
    """What is wrong with a checkpoint's files, a line each, by checksum. Called by all ranks together."""
    try:
        state = on_main_rank(read_state, folder)
    except UserError as error:
        return list(error.problems)
    return find_damage(folder, state["files"])
