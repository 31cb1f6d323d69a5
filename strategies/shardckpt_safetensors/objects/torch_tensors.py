"""Tensors of objects, to tensors of a safetensors file and back, and torch's dtypes by name."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.tensors import ORDINARY, QUANTIZED_DTYPES, movable, plain_cpu, tensor_bytes
from shardckpt_safetensors.dtype_names import DTYPES, HEADER_BYTES
from shardckpt_safetensors.objects.json_text import show
from shardckpt_safetensors.objects.tensor_file import FileTensor, is_shape

#: The names of dtypes in files. Tensors of any other dtype are declared as U8; the tree has torch's name of the dtype.
_KINDS = {getattr(torch, DTYPES[kind].torch_name): kind for kind in HEADER_BYTES}
_DTYPES = {kind: dtype for dtype, kind in _KINDS.items()}
_FIELDS = frozenset(("name", "dtype", "shape", "requires_grad"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def find_dtype(name: Any) -> torch.dtype:
    """Return the dtype of torch's name; ValueError if it is no name, CheckpointingException if this torch lacks it."""
    if type(name) is not str or not name.isidentifier() or not name.isascii():
        raise ValueError(f"{show(name)} is not the name of a dtype")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise CheckpointingException(f"torch {torch.__version__} has no dtype {name!r:.100}")
    return dtype


def tensor_view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key, equal for two tensors that are the same view of the same memory.

    If the tensor cannot be stored, the ValueError says why and how to change it.
    """
    refusal = _refusal(tensor)
    if refusal:
        raise ValueError(refusal)
    if not tensor.numel():
        return (id(tensor),)
    bits = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad
    return type(tensor), tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *bits


def encode_tensor(tensor: torch.Tensor, name: str) -> tuple[FileTensor, Any]:
    """Return a tensor for a file, which has its memory, and how the tree refers to it; after :func:`tensor_view`."""
    try:
        plain = plain_cpu(tensor)
    except ShardingError as exc:
        raise ValueError(str(exc)) from exc
    kind, shape = _KINDS.get(plain.dtype), list(plain.shape)
    fields: dict[str, Any] = {"name": name}
    if kind is None:
        fields |= {"dtype": dtype_name(plain.dtype), "shape": shape}
    if tensor.requires_grad:
        fields["requires_grad"] = True
    file_tensor = FileTensor(kind or "U8", shape if kind else [plain.nbytes], tensor_bytes(plain))
    return file_tensor, fields if len(fields) > 1 else name


def decode_tensor(reference: dict[str, Any], stored: FileTensor, *, parameter: bool) -> torch.Tensor:
    """Return a tensor of a file as a new CPU tensor; ``reference`` is how the tree refers to it, with its name.

    A malformed reference, or one that does not fit the tensor, is a ValueError.
    """
    if not reference.keys() <= _FIELDS or type(reference.get("requires_grad", False)) is not bool:
        raise ValueError(f"a malformed tensor: {sorted(reference)}")
    dtype, shape = referred_type(reference, stored)
    torch_dtype = _DTYPES[stored.kind] if dtype is None else find_dtype(dtype)
    if dtype is not None and (torch_dtype in _KINDS or torch_dtype in QUANTIZED_DTYPES):
        raise ValueError(f"a tensor of {torch_dtype} that is declared as U8")
    if math.prod(shape) * torch_dtype.itemsize != len(stored.data):
        raise ValueError(f"{len(stored.data)} bytes for a tensor of {torch_dtype} and shape {shape}")
    try:
        tensor = torch.empty(shape, dtype=torch_dtype, device="cpu")
        tensor_bytes(movable(tensor))[:] = stored.data
        requires_grad = reference.get("requires_grad", False)
        if parameter:
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.requires_grad_(requires_grad)
    except (RuntimeError, TypeError) as exc:  # a size that torch cannot count, gradients of integers
        raise ValueError(f"a tensor of {torch_dtype} and shape {shape}: {exc}") from exc


def referred_type(reference: dict[str, Any], stored: FileTensor) -> tuple[Any, list[int]]:
    """Return the dtype and shape that a tree gives a tensor; without them None, and the shape in the file."""
    if "dtype" not in reference and "shape" not in reference:
        return None, list(stored.shape)
    dtype, shape = reference.get("dtype"), reference.get("shape")
    if dtype is None or shape is None or not is_shape(shape) or stored.kind != "U8":
        raise ValueError(f"a malformed reference to a tensor of {stored.kind}: {sorted(reference)}")
    return dtype, shape


def _refusal(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be stored, and how to change it, or nothing."""
    if type(tensor) not in ORDINARY:
        return (
            "whose values are not plain: give its values as a plain tensor (full_tensor() of a DTensor, dequantize() "
            "of a quantized one), or make it a ShardedTensor"
        )
    if tensor.is_meta:
        return "on the meta device, without values: materialize it, or leave it out"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"of layout {tensor.layout}: give it dense, or its parts (indices and values) as tensors of their own"
    if tensor.dtype in QUANTIZED_DTYPES:
        return f"of {tensor.dtype}: give its int_repr(), scales and zero points"
    if vars(tensor):
        return f"with the attributes {', '.join(map(repr, vars(tensor)))[:200]}, which are not stored: detach() it"
    return ""
