"""Locate the tensors of an archive with many, without their values: plain tensors, and local tensors of DTensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.archive.pickle_policy import FunctionProxy, OpaqueClass, describe
from shardckpt.archive.tensor_pickles import call_rebuild, checked_geometry
from shardckpt.errors import CorruptCheckpointError
from shardckpt.stubs.stub import Stub, make_stub_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.archive.payload import StoredPayload
    from shardckpt.archive.tensor_pickles import Geometry
    from shardckpt.planning.boxes import Ints

_TENSOR = "torch.distributed.tensor"
#: The classes of torch that describe how a DTensor is cut; each becomes an inert stub.
_SPEC_CLASSES = {
    f"{_TENSOR}._dtensor_spec": ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
    f"{_TENSOR}.placement_types": ("Shard", "Replicate", "_StridedShard", "Partial"),
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed._mesh_layout": ("_MeshLayout", "_FlatLayout"),
    "torch.serialization": ("_get_layout",),
}


@dataclass(frozen=True, eq=False)  # two tensors of one storage are two items of a set
class LazyTensor:
    """A tensor in an archive, not read: a plain one, or the local tensor of a DTensor.

    Of a DTensor there are ``global_shape``, its shape, and ``spec``, the stub of its ``DTensorSpec``, which says how it
    is cut. Both are None for a plain tensor.
    """

    payload: StoredPayload
    global_shape: Ints | None = None
    spec: Stub | None = None


class TensorDescriber:
    """Stands in for the functions that torch's pickles call to rebuild tensors: each returns a :class:`LazyTensor`."""

    def __init__(self, locate: Callable[[Geometry], StoredPayload]) -> None:
        self._locate = locate

    def torch_global(self, module: str, name: str) -> Any:
        """Return the stand-in for a global of torch, or None if there is none."""
        if (module, name) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), (_TENSOR, "DTensor")):
            return OpaqueClass(f"{module}.{name}")
        if name in _SPEC_CLASSES.get(module, ()):
            return make_stub_class(module, name)
        functions: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._describe,
            ("torch._utils", "_rebuild_tensor_v3"): self._describe,
            ("torch._utils", "_rebuild_parameter"): _take_data,
            ("torch._utils", "_rebuild_parameter_with_state"): _take_data,
            ("torch._utils", "_rebuild_wrapper_subclass"): _take_shape,
            ("torch._tensor", "_rebuild_from_type_v2"): _describe_from_type,
        }
        function = functions.get((module, name))
        return function and FunctionProxy(function)

    def _describe(
        self, storage: Any, first: Any, shape: Any, stride: Any, grad: Any, hooks: Any, *more: Any
    ) -> LazyTensor:
        return LazyTensor(self._locate(checked_geometry(storage, first, shape, stride, grad, hooks, *more)))


@dataclass(frozen=True)
class _WrapperShape:
    """The shape of a tensor subclass whose values are in other tensors."""

    shape: Ints


def _take_data(data: Any, *_: Any) -> Any:
    return data


def _take_shape(_class: Any, _dtype: Any, shape: Any, *_: Any) -> _WrapperShape:
    if not isinstance(shape, tuple) or any(type(size) is not int or size < 0 for size in shape):
        raise CorruptCheckpointError(f"a tensor of shape {describe(shape)} does not exist")
    return _WrapperShape(tuple(shape))


def _describe_from_type(function: Any, _type: Any, args: Any, state: Any) -> LazyTensor:
    """Describe a tensor with attributes or of a subclass: a DTensor by its local tensor, any other as a plain one."""
    made: LazyTensor | _WrapperShape = call_rebuild(function, args, LazyTensor, _WrapperShape)
    if isinstance(made, LazyTensor):
        return made
    attributes = state[-1] if type(state) is tuple and state else state
    attributes = attributes if isinstance(attributes, dict) else {}
    local, spec = attributes.get("_local_tensor"), attributes.get("_spec")
    if not isinstance(local, LazyTensor) or not isinstance(spec, Stub):
        raise CorruptCheckpointError("a DTensor has no local tensor, or no description of its mesh")
    return LazyTensor(local.payload, made.shape, spec)
