"""Find tied tensors: several names of one tensor in a state dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


def find_ties(state_dict: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Find names that share their tensor with an earlier name.

    Tensors are tied if they have the same memory, dtype, shape and strides; views that only overlap are not.

    Args:
        state_dict: Tensors by name.

    Returns:
        ``{name: the first name of the same tensor}``.
    """
    first: dict[Hashable, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in state_dict.items():
        other = first.setdefault(_memory_key(tensor), name)
        if other != name:
            ties[name] = other
    return ties


def _memory_key(tensor: Any) -> Hashable:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return id(tensor)
    # a conjugate or negative view has the same memory but other values
    lazy = tensor.is_conj(), tensor.is_neg()
    # empty tensors may all have address 0
    address = tensor.data_ptr() if tensor.numel() else id(tensor)
    return tensor.device, address, tensor.dtype, tuple(tensor.shape), tensor.stride(), lazy


__all__ = ["find_ties"]
