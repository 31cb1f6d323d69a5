"""Tell the keys of an optimizer's state from those of a model's parameters."""

from __future__ import annotations

import re

#: The begin of a key of an optimizer's state, which is its first or second part: in torch's and Megatron's state dicts,
#: torchtitan's, Lightning's and Accelerate's; several are numbered.
_OPTIMIZERS = re.compile(
    r"([^.]*\.)?(optim|optimizer|optimizers|optim_state|optimizer_states?|optimizer_state_dict)(_\d+)?(\.|\Z)"
)


def is_optimizer_key(key: str) -> bool:
    """Return whether a key belongs to an optimizer's state, by the names that trainers use."""
    return _OPTIMIZERS.match(key) is not None


#: Parts of the keys of an optimizer's own weights, in float32: Megatron's name, and Transformer Engine's.
_WEIGHTS = frozenset({"fp32_param", "master_param"})


def is_moment_key(key: str) -> bool:
    """Return whether a key belongs to an optimizer's state other than its own weights: such state begins as zeros."""
    return is_optimizer_key(key) and _WEIGHTS.isdisjoint(key.split("."))


#: Names of the states of random generators as a part of a key: ``rng``, ``rng_states``, ``cuda_rng_state``.
_RANDOM = re.compile(r"(.*_)?rng(_.*)?|random_states?(_\d+)?")


def is_parameter_key(key: str) -> bool:
    """Return whether a key belongs to a parameter or a buffer, not to an optimizer or a random generator."""
    # most of 100,000 keys have neither word, and to split all of them takes as long as to list them
    is_random = ("rng" in key or "random" in key) and any(map(_RANDOM.fullmatch, re.split(r"[./]", key)))
    return not is_optimizer_key(key) and not is_random
