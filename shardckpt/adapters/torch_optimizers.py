"""The state that torch's optimizers use, by class: they accept the state of another class, and ignore it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

_MOMENTS = {"exp_avg", "exp_avg_sq"}
_MOMENTUM = {"momentum_buffer"}
#: Names of a parameter's state that a class uses in any case, without ``step``, which most have. LBFGS has none of
#: each parameter. A derived class may use others.
_USED: dict[type, set[str]] = {
    torch.optim.SGD: _MOMENTUM,
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
    torch.optim.NAdam: _MOMENTS,
    torch.optim.RAdam: _MOMENTS,
    torch.optim.SparseAdam: _MOMENTS,
    torch.optim.Adamax: {"exp_avg", "exp_inf"},
    torch.optim.Adagrad: {"sum"},
    torch.optim.Adadelta: {"square_avg", "acc_delta"},
    torch.optim.RMSprop: {"square_avg"},
    torch.optim.Rprop: {"prev", "step_size"},
    torch.optim.ASGD: {"ax", "eta", "mu"},
    torch.optim.Adafactor: {"row_var", "variance"},
    torch.optim.Muon: _MOMENTUM,
}


def check_classes_of_state(
    optimizers: Sequence[torch.optim.Optimizer], names: Sequence[Iterable[str]], states: Mapping[str, Any]
) -> None:
    """Warn if the class of an optimizer uses nothing of its parameters' loaded state; raise if it cannot even load it.

    ``names`` are those of the parameters of each optimizer, and ``states`` the loaded state by them.
    """
    for number, (optimizer, own) in enumerate(zip(optimizers, names, strict=True)):
        loaded = {entry for name in own if isinstance(state := states.get(name), dict) for entry in state}
        _check_class(number, optimizer, loaded)


def _check_class(number: int, optimizer: torch.optim.Optimizer, loaded: set[Any]) -> None:
    used = _USED.get(type(optimizer))
    if used is None or not loaded - {"step"} or loaded & used:
        return
    what = f"optimizer {number}, of the class {type(optimizer).__name__},"
    why = f"the loaded state ({listed(sorted(map(str, loaded)))}): it was saved by an optimizer of another class"
    if "step" not in loaded and used != _MOMENTUM:  # a KeyError of torch
        raise CheckpointingException(f"{what} cannot load {why}; to begin with new state load the model alone")
    logger.warning(
        "%s does not use %s, as were lr and its other options; to begin with new ones load the model alone", what, why
    )
