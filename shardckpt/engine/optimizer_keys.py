"""Tell the keys of an optimizer's state from those of a model's parameters."""

from __future__ import annotations

import re

#: What an optimizer's state is called, as the first or second part of a key: in torch's and Megatron's state dicts,
#: torchtitan's, Lightning's and Accelerate's; several are numbered.
_OPTIMIZERS = re.compile(r"(optim|optimizer|optimizers|optim_state|optimizer_states?|optimizer_state_dict)(_\d+)?")


def is_optimizer_key(key: str) -> bool:
    """Return whether a key is that of an optimizer's state, by the names that trainers give it."""
    return any(_OPTIMIZERS.fullmatch(part) for part in key.split(".", 2)[:2])


#: What the states of random generators are called, as a part of a key: ``rng``, ``rng_states``, ``cuda_rng_state``.
_RANDOM = re.compile(r"(.*_)?rng(_.*)?|random_states?(_\d+)?")


def is_parameter_key(key: str) -> bool:
    """Return whether a key is that of parameters or a buffer: no optimizer's or random generator's state."""
    return not is_optimizer_key(key) and not any(map(_RANDOM.fullmatch, re.split(r"[./]", key)))
