"""The states of the random number generators of a process, as plain data."""

from __future__ import annotations

import logging
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.manager.per_rank import PerRank

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

#: The name of the state. A checkpoint without it can be loaded.
RNG = "rng"
#: The bit generator of NumPy's legacy generator, unless the program sets another.
_USUAL = "MT19937"


class RandomState:
    """Python's, torch's and the current accelerator's generators, and NumPy's legacy one if NumPy is imported."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators by library or device; NumPy's as bytes, torch's as uint8 tensors."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        device = _device_type()
        if device is not None:
            state[device] = torch.get_device_module(device).get_rng_state()
        if "numpy" in sys.modules:
            state["numpy"] = _read_numpy()
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
            _set_numpy(state["numpy"])


def _read_numpy() -> Any:
    """Return the state of NumPy's legacy generator, with its arrays as bytes: arrays could not be read without NumPy.

    It is a tuple, as of ``numpy.random.get_state()``, or a dict after ``set_bit_generator`` with another than MT19937.
    """
    numpy = sys.modules["numpy"]
    found = numpy.random.get_state(legacy=False)
    if found["bit_generator"] == _USUAL:  # older releases read no dict
        return (_USUAL, found["state"]["key"].tobytes(), found["state"]["pos"], found["has_gauss"], found["gauss"])
    return _to_bytes(found, numpy.ndarray)


def _set_numpy(state: Any) -> None:
    """Set NumPy's legacy generator to a state; a warning says if it is another generator here, which stays."""
    numpy = sys.modules["numpy"]
    live = numpy.random.get_state(legacy=False)
    kind = state["bit_generator"] if isinstance(state, dict) else state[0]
    if kind != live["bit_generator"]:
        logger.warning(
            "NumPy's random numbers are not those of the saved training: its generator is a %s here, and the state is "
            "that of a %s; call numpy.random.set_bit_generator before the load, as that training did",
            live["bit_generator"],
            kind,
        )
    elif isinstance(state, dict):
        numpy.random.set_state(_to_arrays(state, live, numpy))
    else:
        numpy.random.set_state((kind, numpy.frombuffer(state[1], numpy.uint32), *state[2:]))


def _to_bytes(value: Any, array: type[Any]) -> Any:
    if isinstance(value, dict):
        return {name: _to_bytes(part, array) for name, part in value.items()}
    return value.tobytes() if isinstance(value, array) else value


def _to_arrays(value: Any, live: Any, numpy: Any) -> Any:
    """Return a state with arrays in the place of bytes; ``live`` is one of the same generator, for their dtypes."""
    if isinstance(value, dict):
        return {name: _to_arrays(part, live[name], numpy) for name, part in value.items()}
    return numpy.frombuffer(value, live.dtype) if isinstance(value, bytes) else value


def add_random_state(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states with the random generators' state, as ``rng``, unless the user has a state of that name."""
    return dict(states) if RNG in states else {**states, RNG: PerRank(RandomState(), reshard_random_state)}


def reshard_random_state(states: list[Any], rank: int, _: int) -> Any:
    """Return the state of the same rank after a change of the number of ranks; an empty one for a new rank."""
    return states[rank] if rank < len(states) else {}


def _device_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type
