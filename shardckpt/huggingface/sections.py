"""Tell the model's keys from its optimizers' by the values they hold, not by one spelling."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine.optimizer_keys import is_optimizer_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

#: Trainers' names of the model in a dict of states.
_MODELS = frozenset({"model", "models", "module", "state_dict", "model_state_dict"})
#: Trainers' names of a dict around all states, which no model of the Hub has.
_OUTER = frozenset({"app", "state_dict", "model_state_dict", "module"})
#: Modules that models of the Hub have next to one that is called "model".
_OUTSIDE_MODEL = frozenset({"lm_head", "score", "classifier", "language_model", "embed_out", "visual", "vision_tower"})
#: Keys of an optimizer that are compared with the keys of parameters.
_SAMPLE = 64


class Sections(NamedTuple):
    """The prefixes of the keys of a checkpoint's model, ``""`` if they have none, and of its optimizers."""

    model: str
    optimizers: frozenset[str]

    def has_optimizer_key(self, key: str) -> bool:
        """Return whether a key belongs to an optimizer's state."""
        return not self.optimizers.isdisjoint(_outer_prefixes(key))


def find_sections(keys: Collection[str]) -> Sections:
    """Find the model and its optimizers among the keys of a checkpoint.

    An optimizer is known by its name (``optimizer``, ``optim``, ``optimizer_0`` and others), or by its structure:
    ``S.state.<parameter>.<value>`` of a parameter that the checkpoint has. The model is the section that has these
    parameters; or else the section next to the optimizer under a name that trainers give a model.
    """
    optimizers = frozenset(_find_optimizers(keys))
    found = Sections("", optimizers)
    others = [key for key in keys if not found.has_optimizer_key(key)]
    if not optimizers:
        return found._replace(model=_find_lone_model(others))
    by_parameters = _find_parameters(keys, others, optimizers)
    return found._replace(model=_find_neighbour(others, optimizers) if by_parameters is None else by_parameters)


def _outer_prefixes(key: str) -> Iterator[str]:
    """Yield the first part of a key, and the first two, each with its dot."""
    first, dot, rest = key.partition(".")
    if dot:
        yield f"{first}."
        second, dot, _ = rest.partition(".")
        if dot:
            yield f"{first}.{second}."


def _find_optimizers(keys: Collection[str]) -> Iterator[str]:
    prefixes = {prefix for key in keys for prefix in _outer_prefixes(key)}
    named = {prefix for prefix in prefixes if is_optimizer_key(f"{prefix}x")}
    yield from (prefix for prefix in named if _outer(prefix) not in named)
    states: dict[str, set[str]] = {}
    unnamed = {prefix for prefix in prefixes if prefix.endswith(".state.") and _outer(prefix) not in named}
    for key in keys if unnamed else ():
        for prefix in _outer_prefixes(key):
            if prefix in unnamed:
                states.setdefault(prefix, set()).add(key[len(prefix) :].rpartition(".")[0])
    if states:
        tails = {key[len(prefix) :] for key in keys for prefix in ("", *_outer_prefixes(key))}
        yield from (
            _outer(prefix) for prefix, names in states.items() if names <= tails and _are_stored(names, prefix, keys)
        )


def _outer(prefix: str) -> str:
    """Return a prefix without its last part."""
    return prefix[: -len(prefix.split(".")[-2]) - 1]


def _are_stored(names: Collection[str], state: str, keys: Iterable[str]) -> bool:
    """Return whether all parameters that a ``state`` has values of are stored elsewhere, behind one prefix.

    A model may have a module called ``state``, too.
    """
    outside = (key for key in keys if not key.startswith(_outer(state)))
    return any(count == len(names) for count in _match_parameters(names, outside).values())


def _list_parameters(keys: Iterable[str], prefix: str) -> set[str]:
    """Return names of parameters in some keys of an optimizer's ``state``: all but the last part, or but the first."""
    inner = islice((key[len(prefix) :] for key in keys if key.startswith(prefix)), _SAMPLE)
    parts = [text for text in inner if "." in text]
    return {text.rpartition(".")[0] for text in parts} | {text.partition(".")[2] for text in parts}


def _match_parameters(names: Collection[str], keys: Iterable[str]) -> Counter[str]:
    """Count, by prefix, the keys that are names of parameters behind it."""
    counts: Counter[str] = Counter()
    for key in keys:
        for prefix in ("", *_outer_prefixes(key)):
            counts[prefix] += key[len(prefix) :] in names
    return +counts


def _find_parameters(keys: Collection[str], others: Iterable[str], optimizers: Iterable[str]) -> str | None:
    """Return the prefix under which the optimizers' parameters are stored; None if they have no names."""
    names = {name for optimizer in optimizers for name in _list_parameters(keys, f"{optimizer}state.")}
    matched = _match_parameters(names, others)
    # averages of the weights, and a teacher's, have the same names
    order = sorted(matched, key=lambda prefix: (-matched[prefix], prefix.split(".")[-2:][0] not in _MODELS, prefix))
    return order[0] if order else None


def _find_neighbour(others: Iterable[str], optimizers: Iterable[str]) -> str:
    """Return the prefix of the section next to an optimizer that has a model's name."""
    for prefix in sorted({_outer(optimizer) for optimizer in optimizers}, key=len):
        siblings = {key[len(prefix) :].partition(".")[0] for key in others if key.startswith(prefix)}
        models = siblings & _MODELS
        if len(models) == 1 and not siblings & _OUTSIDE_MODEL:
            return f"{prefix}{models.pop()}."
    return ""


def _find_lone_model(keys: Collection[str]) -> str:
    """Return the common prefix of all keys that no model of the Hub has: ``app.model.``, ``state_dict.``."""
    prefix = ""
    while True:
        parts = {key[len(prefix) :].partition(".")[0] for key in keys}
        if len(parts) != 1:
            return prefix
        (part,) = parts
        inner = {key[len(prefix) + len(part) + 1 :].partition(".")[0] for key in keys}
        is_outer = part in _OUTER or (part in _MODELS and (prefix or inner & {"model", *_OUTSIDE_MODEL}))
        if not is_outer or "" in inner:
            return prefix
        prefix = f"{prefix}{part}."
