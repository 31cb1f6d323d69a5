"""Compressed chunks. Megatron wrote none; a tool that copied its arrays may have. They need the numcodecs package."""

from __future__ import annotations

import importlib
from typing import Any

from shardckpt.errors import CheckpointingException, CorruptCheckpointError

#: Compressors whose chunks begin with the size of the values, so that it is known before memory is taken; where in
#: the chunk it is. A zstd frame is measured by numcodecs itself.
_SIZES = {"blosc": slice(4, 8), "lz4": slice(0, 4), "zstd": None}
#: Where blosc has the size of the whole chunk: its decompressor trusts it.
_BLOSC_CHUNK = slice(12, 16)
#: Largest chunk of all three, in bytes.
_LARGEST = (1 << 31) - 1


def check_compressor(name: str, nbytes: int, source: str) -> None:
    """Raise an error, which begins with ``source``, if chunks of a compressor and a size cannot be read."""
    if name not in _SIZES:
        raise CheckpointingException(
            f"{source} has the compressor {name!r}: read are {', '.join(_SIZES)} and none at all, as Megatron wrote; "
            "convert the array with the zarr package"
        )
    if nbytes > _LARGEST:
        raise CorruptCheckpointError(f"{source} has chunks of {nbytes:,} bytes, and {name} none above {_LARGEST:,}")


def decompress(data: bytes, name: str, nbytes: int, source: str) -> bytearray:
    """Return the values of a compressed chunk as bytes, in memory of their own.

    ``nbytes`` is how many its values must have; ``source`` is for errors. Without the numcodecs package, it is a
    CheckpointingException.
    """
    try:
        numcodecs: Any = importlib.import_module("numcodecs")  # it has no types
    except ImportError as exc:
        raise CheckpointingException(
            f"{source} is compressed with {name!r}, which needs numcodecs: `pip install 'shardckpt[zarr]'`"
        ) from exc
    place = _SIZES[name]
    if place is not None and int.from_bytes(data[place], "little") != nbytes:
        raise CorruptCheckpointError(f"{source} is damaged: its values do not have {nbytes:,} bytes")
    if name == "blosc" and int.from_bytes(data[_BLOSC_CHUNK], "little") != len(data):
        raise CorruptCheckpointError(f"{source} is damaged: it does not have the size that is written in it")
    values = bytearray(nbytes)
    codec: Any = numcodecs.get_codec({"id": name})
    try:
        codec.decode(data, values)
    except (RuntimeError, ValueError, TypeError) as exc:
        raise CorruptCheckpointError(f"{source} is damaged: {exc}") from exc
    return values
