"""Encode an object as a payload by the simplest codec that holds it, and decode payloads."""

from __future__ import annotations

from typing import Any

from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt_safetensors.objects.decoder import decode_tree
from shardckpt_safetensors.objects.encoder import encode_tree
from shardckpt_safetensors.objects.json_text import dump_padded, parse_json
from shardckpt_safetensors.objects.tensor_file import pack_file, parse_file

_RAW, _JSON, _SAFETENSORS = "raw", "json", "safetensors"


def encode_object(value: Any, what: str) -> tuple[str, bytes]:
    """Encode a value by the simplest codec that holds it; return the name of the codec, and the payload.

    It may have plain values, containers of them, tensors, numpy's arrays and scalars, argparse and simple namespaces,
    and instances of classes with a codec (:func:`register_codec`). ``what`` is its name for errors: ``"object 'rng'"``.
    A value that cannot be represented, or that a load would refuse, is a ShardingError that names the place, the class,
    and the remedy.
    """
    if type(value) is bytes:
        return _RAW, value
    tree, tensors = encode_tree(value, what)
    if tensors:
        return _SAFETENSORS, pack_file(tree, tensors, what)
    return _JSON, dump_padded(tree).encode()


def decode_object(codec: str, data: bytes | bytearray | memoryview, what: str) -> Any:
    """Decode a payload of :func:`encode_object`. It may be a stranger's: nothing in it is run.

    Tensors and arrays have memory of their own, on the CPU. Damage is a CorruptCheckpointError; an unknown codec, or a
    value that needs a registered codec, numpy, or a dtype that is not here, is a CheckpointingException.
    """
    if codec == _RAW:
        return bytes(data)
    if codec == _SAFETENSORS:
        return decode_tree_file(data, what)
    if codec != _JSON:
        raise CheckpointingException(
            f"{what} has the codec {codec!r:.300}, and this release reads raw, json and safetensors: load it with the "
            "release or the program that wrote it"
        )
    try:
        tree = parse_json(data)
    except ValueError as exc:
        raise CorruptCheckpointError(f"{what} is damaged: {exc}") from exc
    return decode_tree(tree, {}, what)


def encode_tree_file(value: Any, what: str) -> bytes:
    """Encode a value by the codec ``safetensors``, also if it has no tensors; ``what`` is its name for errors."""
    return pack_file(*encode_tree(value, what), what)


def decode_tree_file(data: bytes | bytearray | memoryview, what: str) -> Any:
    """Decode a file of :func:`encode_tree_file`, from anyone; value and errors as of :func:`decode_object`."""
    tree, tensors = parse_file(memoryview(data).cast("B").toreadonly(), what)
    return decode_tree(tree, tensors, what)
