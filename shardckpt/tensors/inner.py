"""The tensors inside a tensor of another class, by torch's protocol ``__tensor_flatten__``, and their roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CheckpointingException, show_given
from shardckpt.tensors.memory import ORDINARY
from shardckpt.tensors.torch_private import is_sharded_tensor

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import TypeGuard

#: The part of a key before the name of a tensor inside: of one that is a part of the elements, and of one that all
#: elements share. No name of a value has parentheses.
INNER, SHARED = "(inner)", "(shared)"


class InnerNames(NamedTuple):
    """The names of the tensors inside those of a class that are no parts of the elements.

    Attributes:
        shared: Tensors that all elements share: a table from codes to values.
        values: The tensor that has the values as they are; empty if there is none.
    """

    shared: frozenset[str] = frozenset()
    values: str = ""


#: By the full names of the classes: those of other libraries are not imported for it.
_KNOWN = {
    f"torchao.{name}": InnerNames(frozenset(shared), values)
    for name, shared, values in (
        ("optim.subclass_4bit.OptimState4bit", ["qmap"], ""),
        ("optim.subclass_8bit.OptimState8bit", ["qmap"], ""),
        ("quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor", ["nf4", "scaler_mean"], ""),
        ("float8.fsdp_utils.WeightWithDynamicFloat8CastTensor", [], "_tensor"),
    )
}


def register_tensor_class(cls: type | str, *, shared: Collection[str] = (), values: str = "") -> None:
    """Say which of the tensors inside those of a class are no parts of the elements, so that each is stored rightly.

    A class needs this only if it has such: all others are divided among ranks as the elements are. A tensor of the
    class has torch's ``__tensor_flatten__`` and ``__tensor_unflatten__``.

    Args:
        cls: The class, or its full name, ``module.Class``: then it need not be imported. Derived classes are as it is.
        shared: The names of tensors that all elements share, equal on all ranks: a table from codes to values.
        values: The name of a tensor that has the values as they are, where the class only changes how they are computed
            with: it alone is stored, in the tensor's place, and loads into a model without the class.

    Raises:
        CheckpointingException: ``cls`` is neither a class nor the full name of one, or ``shared`` is one text.
    """
    given: object = cls
    if not isinstance(given, type) and not (isinstance(given, str) and "." in given):
        raise CheckpointingException(f"register_tensor_class: {show_given(given)}: expected a class or 'module.Class'")
    if isinstance(shared, str):  # each of its letters would be a name
        raise CheckpointingException(f"register_tensor_class: shared={shared!r}: expected a list, such as [{shared!r}]")
    name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    _KNOWN[name] = InnerNames(frozenset(shared), values)


def find_inner_names(tensor: torch.Tensor) -> InnerNames:
    """Return the known description of a tensor's class, or of its nearest base."""
    classes = (f"{each.__module__}.{each.__qualname__}" for each in type(tensor).__mro__)
    return next((_KNOWN[name] for name in classes if name in _KNOWN), InnerNames())


def get_outer_key(key: str) -> str:
    """Return the key of the tensor that has the one of this key inside; empty if none has."""
    outer = (key.partition(f".{each}.")[0] for each in (INNER, SHARED) if f".{each}." in key)
    return min(outer, key=len, default="")  # a tensor inside may have others inside, too


def has_inner(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value, which is no DTensor, is a tensor that has others inside.

    torch's ShardedTensors and nested tensors do not count.
    """
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in ORDINARY
        and hasattr(value, "__tensor_flatten__")
        and not is_sharded_tensor(value)
        and not value.is_nested
    )


def flatten_tensor(tensor: Any) -> tuple[dict[str, Any], Any]:
    """Return the tensors inside a tensor by name, and the context from which torch's protocol makes it again."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def get_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside that has the values as they are, if the class has one, else the tensor itself.

    Weights of torchao's float8 training have one, which a job without torchao can load.
    """
    name = find_inner_names(tensor).values if has_inner(tensor) else ""
    return get_values(getattr(tensor, name)) if name else tensor
