"""Files of ``torch.save``, read without running what they say: tensors and plain values only."""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError
from shardckpt.storage.filesystem import naming

if TYPE_CHECKING:
    from pathlib import Path

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_REFUSAL = re.compile(r"WeightsUnpickler error: .*|.*[Uu]nsupported.*")


def read_torch_file(path: Path) -> dict[Any, Any]:
    """The state dict in a file; its tensors' bytes are read when they are used, where the file's format allows.

    Raises:
        UnsafePickleError: it needs more than tensors and plain values.
        CorruptCheckpointError: it is not such a file.
        CheckpointingException: it holds no dict.
    """
    kind = _first_bytes(path)
    if kind != _ZIP and not kind.startswith(_PICKLE):
        raise CorruptCheckpointError(f"{path} is not a file of torch.save: it begins with {kind!r}")
    try:
        # only the format since torch 1.6 can be mapped
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=kind == _ZIP)
    except pickle.UnpicklingError as exc:
        raise UnsafePickleError(
            f"{path} is damaged, or holds more than tensors and plain values, which is not loaded because it could run "
            f"code ({_reason(exc)}): if you trust it, read it by other means, and save what that gives"
        ) from exc
    except (RuntimeError, EOFError, KeyError, ValueError) as exc:
        raise CorruptCheckpointError(f"{path} is damaged: {exc}") from exc
    if not isinstance(found, dict):
        raise CheckpointingException(f"{path} holds a {type(found).__name__}, not a state dict")
    return found


def _first_bytes(path: Path) -> bytes:
    with naming("open", path), path.open("rb") as file:
        return file.read(len(_ZIP))


def _reason(error: Exception) -> str:
    """What torch says of a refusal, without its advice to load the file all the same."""
    found = _REFUSAL.search(str(error))
    return found[0].strip()[:300] if found else type(error).__name__


__all__ = ["read_torch_file"]
