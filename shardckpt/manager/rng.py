"""The states of the random generators of a process, as plain data."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.manager.per_rank import PerRank

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The name of their state; a checkpoint without it is no reason for an error.
RNG = "rng"


class RandomState:
    """Python's, torch's, the current accelerator's and, where it is imported, NumPy's legacy generator."""

    def state_dict(self) -> dict[str, Any]:
        """Their states now."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        device = _device_type()
        if device is not None:
            state[device] = torch.get_device_module(device).get_rng_state()
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state()
            state["numpy"] = (kind, keys.tobytes(), *rest)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them; those that the state lacks stay as they are."""
        if not state:
            return
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        device = _device_type()
        if device in state:
            torch.get_device_module(device).set_rng_state(state[device])
        if "numpy" in sys.modules and "numpy" in state:
            numpy = sys.modules["numpy"]
            kind, keys, *rest = state["numpy"]
            numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


def with_random_state(states: Mapping[str, Any]) -> dict[str, Any]:
    """The states and, as ``rng``, those of the random generators, unless the user has a state of that name."""
    return dict(states) if RNG in states else {**states, RNG: PerRank(RandomState(), own_or_none)}


def own_or_none(states: list[Any], rank: int, _: int) -> Any:
    """After a change of the number of ranks: what the rank of this number had; a new rank keeps its own seed."""
    return states[rank] if rank < len(states) else {}


def _device_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


__all__ = ["RNG", "RandomState", "with_random_state"]
