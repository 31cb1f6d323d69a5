"""The states of the random number generators of a process, as plain data."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.manager.per_rank import PerRank

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The name of the state. A checkpoint without it can be loaded.
RNG = "rng"


class RandomState:
    """Python's, torch's and the current accelerator's generators, and NumPy's legacy one if NumPy is imported."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators by library or device; NumPy's as bytes, torch's as uint8 tensors."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        device = _device_type()
        if device is not None:
            state[device] = torch.get_device_module(device).get_rng_state()
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state()
            state["numpy"] = (kind, keys.tobytes(), *rest)  # bytes: an array could not be read without NumPy
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to their states; generators without an entry in ``state`` are not changed."""
        if not state:  # of a rank that the saving job did not have: see `reshard_random_state`
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


def add_random_state(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states with the random generators' state, as ``rng``, unless the user has a state of that name."""
    return dict(states) if RNG in states else {**states, RNG: PerRank(RandomState(), reshard_random_state)}


def reshard_random_state(states: list[Any], rank: int, _: int) -> Any:
    """Return the state of the same rank after a change of the number of ranks; an empty one for a new rank."""
    return states[rank] if rank < len(states) else {}


def _device_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type
