"""Read files of ``torch.save`` without running code in them: tensors and plain values only."""

from __future__ import annotations

import mmap
import pickle
import re
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive.opcodes import check_pickle
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError
from shardckpt.storage.filesystem import wrap_os_errors

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.storage.reader import CheckpointReader

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
#: A file of before torch 1.6 begins with the pickle of this number, behind the two bytes of the pickle's protocol.
_LEGACY, _LEGACY_AT = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", 2
#: Pickles in a file of before torch 1.6: magic number, protocol, system, state dict, names of storages.
_OLD_PICKLES = 5
#: Lengths of name and extra field in the header of a zip member, and the bytes of the header without them.
_NAME_LENGTHS, _HEADER_BYTES = struct.Struct("<26xHH"), 30
_REFUSAL = re.compile(r"WeightsUnpickler error: .*|.*[Uu]nsupported.*")


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins like a file of ``torch.save``: any zip archive, or a file of before torch 1.6."""
    with wrap_os_errors("open", path), path.open("rb") as file:
        first = file.read(_LEGACY_AT + len(_LEGACY))
    return first.startswith(_ZIP) or first[_LEGACY_AT:] == _LEGACY


def is_archive(reader: CheckpointReader, file: str) -> bool:
    """Return whether a file of ``torch.save`` has the format since torch 1.6."""
    return reader.read_range(file, 0, min(reader.size(file), len(_ZIP)), file) == _ZIP


def read_torch_file(path: Path) -> dict[Any, Any]:
    """Return the state dict in a file, on the CPU; tensors are memory-mapped if the file's format allows.

    A file that needs more than tensors and plain values is an UnsafePickleError.
    """
    with wrap_os_errors("open", path), path.open("rb") as file:
        kind = file.read(len(_ZIP))
    if kind != _ZIP and not kind.startswith(_PICKLE):
        raise CorruptCheckpointError(f"{path} is not a file of torch.save: it begins with {kind!r}")
    _check_cost(path, kind)
    try:
        # only the format since torch 1.6 can be mapped
        state_dict = torch.load(path, map_location="cpu", weights_only=True, mmap=kind == _ZIP)
    except pickle.UnpicklingError as exc:
        # torch's reason without its advice, which is to load the file with weights_only=False
        found = _REFUSAL.search(str(exc))
        reason = found[0].strip()[:300] if found else type(exc).__name__
        raise UnsafePickleError(
            f"{path} is damaged, or holds more than tensors and plain values, which could run code "
            f"({reason}): if you trust it, read it by other means, and save the state dict that you get"
        ) from exc
    except (RuntimeError, EOFError, KeyError, ValueError) as exc:
        raise CorruptCheckpointError(f"{path} is damaged: {exc}") from exc
    if not isinstance(state_dict, dict):
        raise CheckpointingException(f"{path} holds a {type(state_dict).__name__}, not a state dict")
    return state_dict


def _check_cost(path: Path, kind: bytes) -> None:
    """Raise for pickles that would take excessive memory or time or crash torch's reader, and for zip bombs."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if kind != _ZIP:
            end = 0
            for _ in range(_OLD_PICKLES):
                end = check_pickle(data, str(path), plain=True, start=end)
                if end == len(data):
                    break
            return
        try:
            members = zipfile.ZipFile(file).infolist()
        except (zipfile.BadZipFile, ValueError) as exc:
            raise CorruptCheckpointError(f"{path} is damaged: {exc}") from exc
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED:
                raise CorruptCheckpointError(
                    f"{path}: its member {member.filename!r:.80} is compressed, which torch.save never does"
                )
            if member.filename.lower().endswith("data.pkl"):  # torch ignores case here
                check_pickle(_content(data, member, path), f"{path}: {member.filename}", plain=True)


def _content(data: mmap.mmap, member: zipfile.ZipInfo, path: Path) -> bytes:
    """Return the bytes of a member that is not compressed."""
    # not by ZipFile.read, which checks the checksum: torch may leave it out
    start = member.header_offset
    if start + _HEADER_BYTES > len(data):
        raise CorruptCheckpointError(f"{path} is damaged: its member {member.filename!r:.80} is out of bounds")
    start += _HEADER_BYTES + sum(_NAME_LENGTHS.unpack_from(data, start))
    return data[start : start + member.file_size]
