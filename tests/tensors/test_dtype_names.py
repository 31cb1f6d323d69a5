from __future__ import annotations

import json

import torch
from safetensors.torch import save

from shardckpt.tensors import KNOWN_DTYPES


def _name_in_file(dtype: torch.dtype) -> str:
    """The name that safetensors gives a dtype in a header; ``""`` if it cannot hold it."""
    try:
        data = save({"x": torch.empty(0, dtype=torch.uint8).view(dtype)})
    except (KeyError, RuntimeError, ValueError):
        return ""
    return str(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"])


def test_what_safetensors_holds_is_known() -> None:
    """Each dtype of this torch that the installed safetensors writes is in the table, under the name in its files."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {dtype: name for dtype in dtypes if (name := _name_in_file(dtype))}
    known = {known.torch_name: known.safetensors_name for known in KNOWN_DTYPES}
    assert len(names) > 15
    assert {dtype: known.get(str(dtype).removeprefix("torch.")) for dtype in names} == names


def test_the_sizes_are_those_of_torch() -> None:
    """An element of each dtype in the table has as many bytes as torch says."""
    found = {
        known: getattr(torch, known.torch_name).itemsize for known in KNOWN_DTYPES if hasattr(torch, known.torch_name)
    }
    assert found == {known: known.itemsize for known in found}
    assert len({known.torch_name for known in KNOWN_DTYPES}) == len(KNOWN_DTYPES)
