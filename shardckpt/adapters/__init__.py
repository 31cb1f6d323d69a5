"""From torch's modules, optimizers and distributed tensors to the vocabulary, and back."""

from shardckpt.adapters.dtensor import describe_dtensor, sharded_tensor_from_dtensor, splits_of
from shardckpt.adapters.state import load_into, to_sharded_state_dict
from shardckpt.adapters.torch_sharded import describe_torch_sharded

__all__ = [
    "describe_dtensor",
    "describe_torch_sharded",
    "load_into",
    "sharded_tensor_from_dtensor",
    "splits_of",
    "to_sharded_state_dict",
]
