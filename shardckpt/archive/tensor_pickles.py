"""The pickles inside ``torch.save`` archives: how they describe tensors, and our functions that rebuild them.

torch's own functions trust the shapes and strides of a pickle. Ours check first that the tensor lies in its storage.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.archive.dtypes import STORAGE_DTYPES
from shardckpt.archive.pickle_policy import FunctionProxy, OpaqueClass, describe
from shardckpt.archive.unpickle import load_object
from shardckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


#: The most copies of a storage that lazy views need: one with ``conj``, one with ``neg``, one with both.
_LAZY_VIEWS = 3


class _StorageType(OpaqueClass):
    """A storage class that a pickle names, and its dtype; None for an untyped storage."""

    __slots__ = ("dtype",)

    def __init__(self, name: str, dtype: torch.dtype | None) -> None:
        super().__init__(name)
        self.dtype = dtype


class Storage(NamedTuple):
    """A storage that a pickle refers to, by its name below ``data/``; its size in bytes is as the pickle claims it.

    It has no dtype if it is untyped.
    """

    dtype: torch.dtype | None
    name: str
    nbytes: int


class Geometry(NamedTuple):
    """A tensor's layout in its storage, checked to lie inside it.

    Attributes:
        stride: Its strides, in elements.
        first: Index of its first element in the storage.
        lazy: The lazy view bits that are set: ``conj``, ``neg``.
    """

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    lazy: frozenset[str] = frozenset()


def unpickle(
    pickled: bytes,
    source: str,
    torch_global: Callable[[str, str], Any],
    allow_globals: Iterable[Any] = (),
    decode: Callable[[Any], Storage] | None = None,
) -> Any:
    """Return the object of an archive's pickle; ``torch_global`` is as for :func:`load_object`.

    The functions that it returns get a storage as a :class:`Storage`, which ``decode`` makes of its persistent id.
    """

    def find_global(module: str, name: str) -> Any:
        if (module, name) in STORAGE_DTYPES:
            return _StorageType(f"{module}.{name}", STORAGE_DTYPES[module, name])
        return torch_global(module, name)

    return load_object(pickled, source, find_global, decode or decode_storage, allow_globals)


def decode_storage(pid: Any) -> Storage:
    """Decode a persistent id as torch.save writes it: ("storage", storage class, name, device, number of elements)."""
    kind, storage_type, name, _, numel = pid
    if kind != "storage" or not isinstance(storage_type, _StorageType) or type(numel) is not int or numel < 0:
        raise CorruptCheckpointError(f"its pickle refers to something that is not a storage: {describe(pid)}")
    return Storage(storage_type.dtype, str(name), numel * (storage_type.dtype.itemsize if storage_type.dtype else 1))


@functools.lru_cache(4096)  # tensors of the same dtype and shape have the same pickle
def describe_one_tensor(pickled: bytes) -> Geometry:
    """Return how the tensor of a one-tensor archive is described in its pickle."""
    found = unpickle(pickled, "the tensor's pickle", _tensor_global)
    if not isinstance(found, Geometry):
        raise CorruptCheckpointError(f"it holds a {type(found).__name__}, not a tensor")
    return found


class TensorRebuilder:
    """Checked replacements for the functions that torch's pickles call to rebuild tensors.

    ``nested`` loads an archive that the pickle holds as bytes.
    """

    def __init__(self, memory: Callable[[Storage], torch.UntypedStorage], nested: Callable[[bytes], Any]) -> None:
        self._memory = memory
        self._nested = nested
        #: How many storages the pickle refers to outside of tensors.
        self.loose_storages = 0
        self._resolved_storages: dict[str, dict[tuple[torch.dtype, frozenset[str]], torch.UntypedStorage]] = {}

    def decode(self, pid: Any) -> Storage:
        """Return a storage, which a tensor will be made of."""
        self.loose_storages += 1
        return decode_storage(pid)

    def torch_global(self, module: str, name: str) -> Any:
        """Return the replacement for a global of torch, or None if there is none."""
        functions: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild_tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
            ("torch.storage", "_load_from_bytes"): self._nested,
            ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
        }
        if (module, name) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter")):
            return OpaqueClass(f"{module}.{name}")
        function = functions.get((module, name))
        return function and FunctionProxy(function, copies=name == "_load_from_bytes")

    def _rebuild_tensor(
        self, storage: Storage, first: Any, shape: Any, stride: Any, grad: Any, hooks: Any, *more: Any
    ) -> Any:
        self.loose_storages -= 1
        found = checked_geometry(storage, first, shape, stride, grad, hooks, *more)
        memory = self._resolved(found) if found.lazy else self._memory(storage)
        tensor = torch.empty(0, dtype=found.dtype, device="cpu").set_(memory, found.first, found.shape, found.stride)
        return tensor.requires_grad_(bool(grad)) if tensor.is_floating_point() or tensor.is_complex() else tensor

    def _resolved(self, found: Geometry) -> torch.UntypedStorage:
        """Return the storage with the conjugate or negated values of a lazy view."""
        # Computed once for the storage, not for each view: a pickle may describe any number of views, each with any
        # number of elements (by a stride of 0), and their values could fill the memory.
        made = self._resolved_storages.setdefault(found.storage.name, {})
        key = found.dtype, found.lazy
        if key not in made:
            if len(made) == _LAZY_VIEWS:
                raise CorruptCheckpointError(f"storage {found.storage.name!r} has too many kinds of lazy views")
            memory = self._memory(found.storage)
            shape = (memory.nbytes() // found.dtype.itemsize,)
            values = torch.empty(0, dtype=found.dtype, device="cpu").set_(memory, 0, shape, (1,))
            made[key] = resolve_lazy_view(values, found.lazy).untyped_storage()
        return made[key]


def call_rebuild(function: Any, args: Any, *kinds: type[Any]) -> Any:
    """Return a tensor that one of torch's functions makes of its parts; it must be of one of these classes."""
    if not isinstance(function, FunctionProxy) or type(args) is not tuple:
        raise CorruptCheckpointError(
            f"a tensor is rebuilt by {describe(function)}, which is not one of torch's functions"
        )
    made = function(*args)
    if not isinstance(made, kinds):
        raise CorruptCheckpointError(f"the pickle rebuilds a {type(made).__name__} where a tensor should be")
    return made


def _rebuild_from_type(function: Any, _type: Any, args: Any, _state: Any) -> torch.Tensor:
    """Rebuild a tensor with attributes, or of a subclass, as a plain tensor."""
    return call_rebuild(function, args, torch.Tensor)  # type: ignore[no-any-return]


def _rebuild_parameter(data: torch.Tensor, requires_grad: bool, _hooks: Any, _state: Any = None) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _tensor_global(module: str, name: str) -> Any:
    if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return FunctionProxy(checked_geometry)
    return None


def resolve_lazy_view(tensor: torch.Tensor, lazy: frozenset[str]) -> torch.Tensor:
    """Compute the values of a lazy view with bits ``conj``, ``neg`` or both; the result has none."""
    tensor = tensor.conj_physical() if "conj" in lazy else tensor
    return tensor.neg() if "neg" in lazy else tensor


def checked_geometry(
    storage: Storage, first: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, *more: Any
) -> Geometry:
    """Return how a tensor lies in its storage, after a check that it does; the arguments are ``_rebuild_tensor_v2``'s.

    In ``more`` are a dict of the lazy view bits that are set and, from ``_rebuild_tensor_v3``, the dtype.
    """
    if not isinstance(shape, (tuple, list)) or not isinstance(stride, (tuple, list)) or type(first) is not int:
        raise CorruptCheckpointError(
            f"a tensor of shape {describe(shape)} with strides {describe(stride)} does not exist"
        )
    # by type: the functions differ in which of these they have, and in what place
    dtype = storage.dtype or next((value for value in more if isinstance(value, torch.dtype)), torch.uint8)
    # Negative strides do not exist in torch, and would reach in front of the storage.
    shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    if len(shape) != len(stride) or first < 0 or any(value < 0 for value in (*shape, *stride)):
        raise CorruptCheckpointError(f"a tensor of shape {shape} with strides {stride} at {first} does not exist")
    last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and (last + 1) * dtype.itemsize > storage.nbytes:
        raise CorruptCheckpointError(f"a tensor of shape {shape} and {dtype} does not fit its storage")
    bits = next((value for value in more if isinstance(value, dict)), {})
    return Geometry(storage, dtype, shape, stride, first, frozenset(bit for bit in ("conj", "neg") if bits.get(bit)))
