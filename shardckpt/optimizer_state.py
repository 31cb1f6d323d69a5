"""Optimizer state loaded by the model's state dict alone, before there is an optimizer."""

from __future__ import annotations

from typing import Any

from shardckpt.adapters.optimizer_loading import load_sharded_optimizer_state_dict

#: Names of torch's module that other code imports with the function.
HELPERS = (
    "STATE_DICT_2D_LAYOUT",
    "_ReaderWithOffset",
    "_alloc_tensor",
    "_create_colwise_spec",
    "_gen_rank_device",
    "_get_state_dict_2d_layout",
    "_is_nested_tensor",
)


def __getattr__(name: str) -> Any:
    if name in HELPERS:
        # `from module import name` shows the text of an ImportError, but not of an AttributeError
        raise ImportError(f"{__name__} has no {name}: import it from shardckpt.compat.torch_optimizer", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["load_sharded_optimizer_state_dict"]
