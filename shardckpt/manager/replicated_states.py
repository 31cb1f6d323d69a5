"""Several objects that always have equal states, such as the schedulers of the optimizers of pipeline stages."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException
from shardckpt.state_dict import are_equal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.manager.per_rank import Stateful


class ReplicatedStates:
    """A list of objects with equal states: one state is stored, and each of them loads it, as torchtitan does it.

    So another number of them can load it: the ranks may have different numbers of stages. Errors say ``name``.
    """

    def __init__(self, name: str, states: Sequence[Stateful]) -> None:
        self._name = name
        self._states = states

    def state_dict(self) -> Any:
        """Return the state that all of them have; states that are not equal are an error."""
        first, *others = (state.state_dict() for state in self._states)
        if not all(are_equal(first, other) for other in others):
            raise CheckpointingException(
                f"the state {self._name!r} is a list of {len(self._states)} whose states are not equal, and one state "
                "is stored for all of them: give each as a state of its own, under a name of its own"
            )
        return first

    def load_state_dict(self, state_dict: Any) -> None:
        """Set each to the state."""
        for state in self._states:
            state.load_state_dict(copy.deepcopy(state_dict))
