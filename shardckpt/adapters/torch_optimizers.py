"""The state that torch's optimizers need, by class: they take over that of another class, and fail at their next step.

SGD, Muon and LBFGS ignore it. An error before the load, or a warning, says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
#: The names of a parameter's state that a class looks up at a step, once there is a state; of Adafactor, those of a
#: matrix or of a vector. Classes that are derived from these may need others.
NEEDED: dict[type, tuple[set[str], ...]] = {
    torch.optim.Adam: (_ADAM,),
    torch.optim.AdamW: (_ADAM,),
    torch.optim.NAdam: ({*_ADAM, "mu_product"},),
    torch.optim.RAdam: (_ADAM,),
    torch.optim.SparseAdam: (_ADAM,),
    torch.optim.Adamax: ({"step", "exp_avg", "exp_inf"},),
    torch.optim.Adagrad: ({"step", "sum"},),
    torch.optim.Adadelta: ({"step", "square_avg", "acc_delta"},),
    torch.optim.RMSprop: ({"step", "square_avg"},),
    torch.optim.Rprop: ({"step", "prev", "step_size"},),
    torch.optim.ASGD: ({"step", "eta", "mu", "ax"},),
    torch.optim.Adafactor: ({"step", "row_var", "col_var"}, {"step", "variance"}),
}
#: The names that the other classes use; they need none of them.
OPTIONAL: dict[type, set[str]] = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.Muon: {"momentum_buffer"},
    torch.optim.LBFGS: {"n_iter", "prev_flat_grad"},
}
#: All these names. A state with one besides ``step``, which others have, too, is that of a class of torch.
_KNOWN: set[str] = set().union(*(names for each in NEEDED.values() for names in each), *OPTIONAL.values())


def check_classes_of_state(
    optimizers: Sequence[torch.optim.Optimizer], names: Sequence[Iterable[str]], states: Mapping[str, Any]
) -> None:
    """Raise if an optimizer cannot step with a parameter's loaded state; warn if it ignores the state of all.

    ``names`` are those of the parameters of each optimizer, and ``states`` the loaded state by them. Entries that no
    class of torch has are the user's, and decide nothing.
    """
    for number, (optimizer, own) in enumerate(zip(optimizers, names, strict=True)):
        loaded = {name: state.keys() & _KNOWN for name in own if isinstance(state := states.get(name), dict)}
        if type(optimizer) in NEEDED:
            for name, stored in loaded.items():
                _check_needed(number, optimizer, name, stored)
        elif type(optimizer) in OPTIONAL:
            found = set().union(*loaded.values()) - {"step"}
            if found and not found & OPTIONAL[type(optimizer)]:
                logger.warning(
                    "optimizer %d, of the class %s, ignores the loaded state (%s), which an optimizer of another class "
                    "has saved; to begin with new state, load the model alone",
                    number,
                    type(optimizer).__name__,
                    listed(sorted(found)),
                )


def _check_needed(number: int, optimizer: torch.optim.Optimizer, name: str, stored: set[str]) -> None:
    """Raise if a parameter's state of these names is of another class, and lacks one that the optimizer looks up."""
    own = NEEDED[type(optimizer)]
    missing = min((needed - stored for needed in own), key=len)
    if not missing or not stored - {"step"}:
        return
    # else a part of the state of this class, which comes back as it is
    if stored - set().union(*own) or any(stored == names for each in NEEDED.values() for names in each):
        raise CheckpointingException(
            f"optimizer {number}, of the class {type(optimizer).__name__}, cannot use the loaded state of {name!r}, "
            f"which an optimizer of another class saved: it has {listed(sorted(stored))}, and lacks "
            f"{listed(sorted(missing))}; to begin with new state, load the model alone"
        )
