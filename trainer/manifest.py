"""Sizes and checksums of a checkpoint's files: a flipped byte is found and named, not trained on.

DCP has neither. A file is read once more after it is written, and once more before it is loaded; ranks share the
work.
"""

import zlib
from pathlib import Path

import torch.distributed as dist

_CHUNK = 1 << 24

Manifest = dict[str, list[int]]  # file name -> [bytes, CRC-32]


def manifest_of(folder: Path, files: list[str]) -> Manifest:
    """Sizes and checksums of ``files`` in ``folder``."""
    return {name: list(_size_and_crc(folder / name)) for name in files}


def data_files(folder: Path) -> list[str]:
    """The files of a checkpoint that DCP wrote."""
    return sorted(path.name for path in folder.iterdir() if path.name == ".metadata" or path.suffix == ".distcp")


def part_of_manifest(folder: Path) -> Manifest:
    """This rank's part of the manifest of a whole checkpoint, whose files the ranks share out."""
    return manifest_of(folder, _share(data_files(folder)))


def shared_manifest(folder: Path, files: list[str]) -> Manifest:
    """``manifest_of`` of files that the ranks share out. Called by all ranks together."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, manifest_of(folder, _share(files)))
    return {name: entry for part in parts for name, entry in sorted(part.items())}


def find_damage(folder: Path, manifest: Manifest) -> list[str]:
    """What differs from the manifest, a line a file; each rank reads a part. Called by all ranks together."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, differences(folder, manifest, _share(sorted(manifest))))
    return sorted(line for part in parts for line in part)


def differences(folder: Path, manifest: Manifest, files: list[str]) -> list[str]:
    """What differs from the manifest in some files, as seen by this process alone."""
    found = []
    for name in files:
        path, (n_bytes, crc) = folder / name, manifest[name]
        try:
            if not path.is_file():
                found.append(f"{path} is missing")
            elif path.stat().st_size != n_bytes:
                found.append(f"{path} has {path.stat().st_size} bytes instead of {n_bytes}")
            elif _size_and_crc(path) != (n_bytes, crc):
                found.append(f"{path} has been changed since it was written (its checksum differs)")
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror}")
    return found


def _share(names: list[str]) -> list[str]:
    return names[dist.get_rank() :: dist.get_world_size()]


def _size_and_crc(path: Path) -> tuple[int, int]:
    crc = n_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc, n_bytes = zlib.crc32(chunk, crc), n_bytes + len(chunk)
    return n_bytes, crc
