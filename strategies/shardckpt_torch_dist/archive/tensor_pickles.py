"""The pickles inside ``torch.save`` archives: what they say of tensors, and our own functions that rebuild them.

Torch's functions trust a pickle's shapes and strides; here a tensor lies inside its storage, or it is not made.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt_torch_dist.archive.dtypes import storage_dtype
from shardckpt_torch_dist.archive.pickle_policy import Marker, Shield, brief, shielded
from shardckpt_torch_dist.archive.unpickle import load_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


#: Copies of a storage that lazy views may need: ``conj``, ``neg`` and both.
_LAZY_VIEWS = 3


class _StorageType(NamedTuple):
    """Stands for a storage class that a pickle names: its dtype, or None for bytes."""

    dtype: torch.dtype | None


class Storage(NamedTuple):
    """A storage that a pickle refers to: its dtype (None: bytes), its name in the archive, and its bytes."""

    dtype: torch.dtype | None
    name: str
    nbytes: int


class Geometry(NamedTuple):
    """A tensor that a pickle describes, known to lie inside its storage."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    lazy: frozenset[str] = frozenset()


def unpickle(
    pickled: bytes, source: str, torch_global: Callable[[str, str], Any], allow_globals: Iterable[Any] = ()
) -> Any:
    """What an archive's pickle says, with its storages as :class:`Storage` and tensors made by ``torch_global``."""

    def known(module: str, name: str) -> Any:
        dtype = storage_dtype(module, name)
        return torch_global(module, name) if dtype is False else _StorageType(dtype or None)

    return load_object(pickled, source, known, _storage, allow_globals)


def _storage(pid: Any) -> Storage:
    """The storage of a persistent id, as torch.save writes them."""
    kind, storage_type, name, _, numel = pid
    if kind != "storage" or not isinstance(storage_type, _StorageType) or type(numel) is not int or numel < 0:
        raise CorruptCheckpointError(f"its pickle refers to something that is no storage: {brief(pid)}")
    return Storage(storage_type.dtype, str(name), numel * (storage_type.dtype.itemsize if storage_type.dtype else 1))


@functools.lru_cache(4096)
def one_tensor(pickled: bytes) -> Geometry:
    """What the pickle of an archive of one tensor says; the same for all tensors of a dtype and shape."""
    found = unpickle(pickled, "the tensor's pickle", _tensor_global)
    if not isinstance(found, Geometry):
        raise CorruptCheckpointError(f"it holds a {type(found).__name__}, not a tensor")
    return found


class TensorRebuilder:
    """Our own versions of the functions that torch's pickles call to rebuild tensors: bounds are checked.

    Args:
        memory: Gives the bytes of a storage.
        nested: Loads an archive that a pickle holds as bytes.
    """

    def __init__(self, memory: Callable[[Storage], torch.UntypedStorage], nested: Callable[[bytes], Any]) -> None:
        self._memory = memory
        self._nested = nested
        self._made: dict[str, dict[tuple[torch.dtype, frozenset[str]], torch.UntypedStorage]] = {}

    def torch_global(self, module: str, name: str) -> Any:
        """The function for a global of torch, or None."""
        functions: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
            ("torch.storage", "_load_from_bytes"): self._nested,
            ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
        }
        if (module, name) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter")):
            return Marker(f"{module}.{name}")
        function = functions.get((module, name))
        return function and shielded(function, copies=name == "_load_from_bytes")

    def _tensor(self, storage: Storage, first: Any, shape: Any, stride: Any, grad: Any, _hooks: Any, *more: Any) -> Any:
        found = _geometry(storage, first, shape, stride, more)
        memory = self._resolved(found) if found.lazy else self._memory(storage)
        tensor = torch.empty(0, dtype=found.dtype, device="cpu").set_(memory, found.first, found.shape, found.stride)
        return tensor.requires_grad_(bool(grad)) if tensor.is_floating_point() or tensor.is_complex() else tensor

    def _resolved(self, found: Geometry) -> torch.UntypedStorage:
        """The storage of a conjugate or negated view with its values: the view may have any number of elements."""
        made = self._made.setdefault(found.storage.name, {})
        key = found.dtype, found.lazy
        if key not in made:
            if len(made) == _LAZY_VIEWS:
                raise CorruptCheckpointError(f"storage {found.storage.name!r} has too many kinds of lazy views")
            memory = self._memory(found.storage)
            shape = (memory.nbytes() // found.dtype.itemsize,)
            values = torch.empty(0, dtype=found.dtype, device="cpu").set_(memory, 0, shape, (1,))
            made[key] = resolved(values, found.lazy).untyped_storage()
        return made[key]


def _of_type(function: Any, _type: Any, args: Any, _state: Any) -> torch.Tensor:
    """A tensor with attributes or of a subclass: the tensor alone."""
    if not isinstance(function, Shield) or type(args) is not tuple:
        raise CorruptCheckpointError(f"a tensor is rebuilt by {brief(function)}, which is none of torch's functions")
    tensor = function(*args)
    if not isinstance(tensor, torch.Tensor):
        raise CorruptCheckpointError(f"what is rebuilt as a tensor is a {type(tensor).__name__}")
    return tensor


def _parameter(data: torch.Tensor, requires_grad: bool, _hooks: Any, _state: Any = None) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _tensor_global(module: str, name: str) -> Any:
    if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return shielded(_described)
    return None


def _described(storage: Storage, first: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, *more: Any) -> Geometry:
    return _geometry(storage, first, shape, stride, more)


def lazy_bits(more: tuple[Any, ...]) -> frozenset[str]:
    """The bits that torch.save notes of a view: ``conj``, ``neg``."""
    said = next((value for value in more if isinstance(value, dict)), {})
    return frozenset(name for name in ("conj", "neg") if said.get(name))


def resolved(tensor: torch.Tensor, lazy: frozenset[str]) -> torch.Tensor:
    """The values that a view with those bits has."""
    tensor = tensor.conj_physical() if "conj" in lazy else tensor
    return tensor.neg() if "neg" in lazy else tensor


def _geometry(storage: Storage, first: int, shape: Any, stride: Any, more: tuple[Any, ...]) -> Geometry:
    """How the tensor lies in its storage, once it is known to lie inside it."""
    if not isinstance(shape, (tuple, list)) or not isinstance(stride, (tuple, list)) or type(first) is not int:
        raise CorruptCheckpointError(f"a tensor of shape {brief(shape)} with strides {brief(stride)} does not exist")
    dtype = storage.dtype or next((value for value in more if isinstance(value, torch.dtype)), torch.uint8)
    shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    if len(shape) != len(stride) or first < 0 or any(value < 0 for value in (*shape, *stride)):
        raise CorruptCheckpointError(f"a tensor of shape {shape} with strides {stride} at {first} does not exist")
    last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and (last + 1) * dtype.itemsize > storage.nbytes:
        raise CorruptCheckpointError(f"a tensor of shape {shape} and {dtype} does not fit its storage")
    return Geometry(storage, dtype, shape, stride, first, lazy_bits(more))


__all__ = ["Geometry", "Storage", "TensorRebuilder", "one_tensor", "unpickle"]
