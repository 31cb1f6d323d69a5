"""Tensors of a state dict that are one: weights tied to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


def find_ties(state_dict: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For every name whose tensor another name before it has, too: that other name.

    The same are tensors that have the same memory, shape and strides; views that merely overlap are not.
    """
    first: dict[Hashable, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in state_dict.items():
        other = first.setdefault(_identity(tensor), name)
        if other != name:
            ties[name] = other
    return ties


def _identity(tensor: Any) -> Hashable:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return id(tensor)
    lazy = tensor.is_conj(), tensor.is_neg()
    place = tensor.data_ptr() if tensor.numel() else id(tensor)
    return tensor.device, place, tensor.dtype, tuple(tensor.shape), tensor.stride(), lazy


__all__ = ["find_ties"]
