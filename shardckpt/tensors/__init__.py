"""A tensor's memory and values: bytes, copies, quantized classes, torch's private names."""

from shardckpt.tensors.copier import Copier
from shardckpt.tensors.deferred import DeferredTensor
from shardckpt.tensors.memory import (
    LARGE,
    ORDINARY,
    PAGE,
    has_values_on_host,
    is_ordinary,
    is_plain,
    page_offset,
    plain_cpu,
    synchronize_devices,
    tensor_bytes,
    unfilled_bytes,
)
from shardckpt.tensors.raw_memory import pack_bytes, view_tensor
from shardckpt.tensors.torch_private import (
    copy_each,
    empty_sharded_tensor_like,
    group_store,
    group_timeout,
    is_sharded_tensor,
    move_placement,
    split_factor,
    step_without_hooks,
)
from shardckpt.tensors.wrappers import (
    check_outward_dtype,
    copy_values,
    dequantize,
    fill,
    inner_tensors,
    is_quantized,
    kind,
    movable,
)

__all__ = [
    "LARGE",
    "ORDINARY",
    "PAGE",
    "Copier",
    "DeferredTensor",
    "check_outward_dtype",
    "copy_each",
    "copy_values",
    "dequantize",
    "empty_sharded_tensor_like",
    "fill",
    "group_store",
    "group_timeout",
    "has_values_on_host",
    "inner_tensors",
    "is_ordinary",
    "is_plain",
    "is_quantized",
    "is_sharded_tensor",
    "kind",
    "movable",
    "move_placement",
    "pack_bytes",
    "page_offset",
    "plain_cpu",
    "split_factor",
    "step_without_hooks",
    "synchronize_devices",
    "tensor_bytes",
    "unfilled_bytes",
    "view_tensor",
]
