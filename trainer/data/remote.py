"""Files behind URLs, such as s3://bucket/corpus.jsonl.zst, through fsspec (extra ``remote``). Loads no torch."""

import hashlib
import os
from pathlib import Path

from trainer.errors import UserError


def is_remote(path: str) -> bool:
    return "://" in path


def open_remote(path: str):
    """The bytes of a remote file, to be read. Raises ``UserError``."""
    system, name = _locate(path)
    try:
        return system.open(name, "rb")
    except Exception as error:  # each file system has its own
        raise UserError(f"{path}: cannot be read: {error}") from None


def expand_remote(pattern: str) -> list[str]:
    """The URLs that a pattern matches, sorted; the name of one file matches itself."""
    system, name = _locate(pattern)
    try:
        if system.isfile(name):  # whatever stands in its name
            return [pattern]
        return sorted(system.unstrip_protocol(found) for found in system.glob(name))
    except Exception as error:
        raise UserError(f"{pattern}: cannot be listed: {error}") from None


def state_of_remote(path: str) -> str:
    """What changes when the file does: its size, and what the file system calls its version."""
    system, name = _locate(path)
    try:
        return f"{system.info(name)['size']}/{system.ukey(name)}"
    except Exception as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def remote_size(path: str) -> int:
    return int(state_of_remote(path).split("/")[0])


def is_remote_folder(path: str) -> bool:
    system, name = _locate(path)
    try:
        return system.isdir(name)
    except Exception as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def fetch(paths: list[str], cache: Path) -> list[Path]:
    """Local copies of files that are to be memory-mapped, made once. Complete, or not there."""
    key = hashlib.sha256("\n".join(f"{path} {state_of_remote(path)}" for path in paths).encode()).hexdigest()[:16]
    folder, found = cache / f"remote-{key}", []
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        local = folder / path.rsplit("/", 1)[1]
        if not local.exists():
            partial = local.with_name(f"{local.name}.{os.getpid()}.tmp")
            system, name = _locate(path)
            try:
                system.get_file(name, str(partial))
            except Exception as error:
                raise UserError(f"{path}: cannot be fetched: {error}") from None
            os.replace(partial, local)
        found.append(local)
    return found


def _locate(path: str):
    try:
        import fsspec
    except ImportError:
        raise UserError(f"{path}: a URL needs the extra remote: pip install 'meshloom[remote]'") from None
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
