"""Which keys are those of an optimizer's state."""

from __future__ import annotations

import re

#: What an optimizer's state is called, as the first or second part of a key: in torch's and Megatron's state dicts,
#: torchtitan's, Lightning's and Accelerate's; several are numbered.
_OPTIMIZERS = re.compile(r"(optim|optimizer|optimizers|optim_state|optimizer_states?|optimizer_state_dict)(_\d+)?")


def is_optimizer_key(key: str) -> bool:
    """Return whether a key is that of an optimizer's state, by the names that trainers give it."""
    return any(_OPTIMIZERS.fullmatch(part) for part in key.split(".", 2)[:2])
