"""Functions over nested dicts and lists, and the split of a state dict into sharded and common state.

Only dict and list are containers; everything else, tuples included, is a leaf. Functions whose names end in
``_inplace``, and functions that Megatron documents as such, change their argument; all others leave it alone.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, ShardingError, show_given
from shardckpt.mapping.base import CommonStateDict, ShardedBase, ShardedStateDict, StateDict
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import PlainObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject, OptionalEntries

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

#: Where torch keeps its tensors that are spread over ranks: DTensor, ShardedTensor.
_SHARDED_BY_TORCH = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
#: Classes that dcp.save and dcp.load accept, and that the adapters describe here.
_DESCRIBED = (torch.nn.Module, torch.optim.Optimizer)

#: Containers that may have shards in them, as a leaf or inside of one: all but the dicts and lists that are walked.
_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
#: Classes of most leaves, which have nothing in them: isinstance of Mapping is slow.
_SIMPLE = frozenset((bool, int, float, str, bytes, type(None), torch.Tensor))

#: The leaves of a larger dict or list are yielded without a look at each, if all are leaves: there may be a million.
_MANY = 16

#: numpy's dtypes whose equal bytes are equal values: not objects, nor long doubles, which have bytes without a meaning.
_BYTES_ARE_VALUES = frozenset("?bBhHiIlLqQefdFDSUmM")

_K = TypeVar("_K")
_V = TypeVar("_V")
_R = TypeVar("_R")


def nested_values(x: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts and lists, depth first."""
    if not isinstance(x, (dict, list)):
        yield x
        return
    values = x.values() if isinstance(x, dict) else x
    if len(values) > _MANY and not any(issubclass(kind, (dict, list)) for kind in set(map(type, values))):
        yield from values
        return
    for value in values:
        if isinstance(value, (dict, list)):
            yield from nested_values(value)
        else:
            yield value


def list_nested_values(x: Any) -> list[Any]:
    """Return the values of :func:`nested_values`, in half of the time."""
    found: list[Any] = []
    _add_values(x, found)
    return found


def _add_values(x: Any, found: list[Any]) -> None:
    if not isinstance(x, (dict, list)):
        found.append(x)
        return
    values = x.values() if isinstance(x, dict) else x
    if not any(issubclass(kind, (dict, list)) for kind in set(map(type, values))):
        found += values
        return
    for value in values:
        _add_values(value, found)


def nested_items(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, leaf) pairs of nested dicts and lists, depth first; a path is a tuple of keys and indices."""
    if not isinstance(x, (dict, list)):
        yield path, x
        return
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, (dict, list)):
            yield from nested_items(value, (*path, key))
        else:  # most are leaves, which need no generator
            yield (*path, key), value


def flatten_as_dcp(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, leaf) pairs as torch.distributed.checkpoint flattens a state dict: the keys of dicts become text.

    A list without a dict, tensor or shard, in it or in its lists, is a leaf; so is every tuple.
    """
    if isinstance(x, dict):
        for key, value in x.items():
            yield from flatten_as_dcp(value, (*path, str(key)))
    elif isinstance(x, list) and _is_taken_apart(x):
        for number, value in enumerate(x):
            yield from flatten_as_dcp(value, (*path, number))
    else:
        yield path, x


def _is_taken_apart(values: list[Any]) -> bool:
    return any(
        _is_taken_apart(value) if isinstance(value, list) else isinstance(value, (dict, torch.Tensor, ShardedBase))
        for value in values
    )


def list_dcp_values(x: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a state dict that are no tensors, by the keys that stock ``dcp.load`` asks for."""
    return ((".".join(map(str, path)), v) for path, v in flatten_as_dcp(x) if not isinstance(v, torch.Tensor))


def extract_matching_values(
    x: Any, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """Split nested dicts and lists into the leaves that match and the rest: ``(match, rest)``.

    Each has the dicts and lists in which it has leaves. With ``return_lists_as_dicts`` lists become dicts from index to
    value, so that :func:`merge` knows their indices.
    """
    children = _children(x)
    if children is None:
        raise CheckpointingException(f"expected a dict or a list to split, got {type(x).__name__}")
    match: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    for key, value in children.items():
        if isinstance(value, (dict, list)):
            inner_match, inner_rest = extract_matching_values(value, predicate, return_lists_as_dicts)
            if inner_match:
                match[key] = inner_match
            if inner_rest or not value:
                rest[key] = inner_rest
        else:
            (match if predicate(value) else rest)[key] = value
    if isinstance(x, list):
        return (match, rest) if return_lists_as_dicts else (list(match.values()), of_type(x, list(rest.values())))
    return match, of_type(x, rest)


def are_equal(x1: Any, x2: Any) -> bool:
    """Return whether two values are equal, leaf by leaf: NaN equals NaN, and values that cannot be compared differ."""
    return not any(diff(x1, x2))


def have_equal_bits(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits."""
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (x1, x2)))


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Compare two nested dicts or lists.

    Returns paths that only ``x1`` has, paths that only ``x2`` has, and (path, type, type) where the leaves differ.
    """
    only_left: list[Any] = []
    only_right: list[Any] = []
    mismatch: list[Any] = []
    left, right = _children(x1), _children(x2)
    if left is None or right is None or type(x1) is not type(x2):
        if not _equal_leaves(x1, x2):
            mismatch.append((prefix, type(x1), type(x2)))
        return only_left, only_right, mismatch
    only_left.extend((*prefix, key) for key in left if key not in right)
    only_right.extend((*prefix, key) for key in right if key not in left)
    for key in left:
        if key in right:
            parts = diff(left[key], right[key], (*prefix, key))
            for found, total in zip(parts, (only_left, only_right, mismatch), strict=True):
                total.extend(found)
    return only_left, only_right, mismatch


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return nested dicts and lists of the same types, with ``f`` applied to every leaf."""
    if isinstance(x, dict):
        return of_type(x, {key: dict_list_map_outplace(f, value) for key, value in x.items()})
    if isinstance(x, list):
        return of_type(x, [dict_list_map_outplace(f, value) for value in x])
    return f(x)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every leaf by ``f(leaf)``, in place, and return ``x``."""
    if isinstance(x, dict):
        for key in x:
            x[key] = dict_list_map_inplace(f, x[key])
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
    else:
        return f(x)
    return x


def merge(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """Merge the nested ``x2`` into ``x1``, which is changed in place and returned.

    A dict whose keys are list indices is merged into a list at these indices; an index just past the end appends. It is
    a ValueError if both have a leaf at the same path, or lists differ in length.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"cannot merge lists of {len(x1)} and {len(x2)} values at {format_path(key)}")
        for index, value in enumerate(x2):
            x1[index] = merge(x1[index], value, (*key, index))
    elif isinstance(x1, list) and isinstance(x2, dict):
        return _merge_into_list(x1, x2, key)
    else:
        raise ValueError(f"cannot merge: both sides have a value at {format_path(key)}: {x1!r:.80} and {x2!r:.80}")
    return x1


class DictKey(int):
    """A part of a path that is an integer and the key of a dict, not the index of a list."""


class _Node(dict[Any, Any]):
    """A dict or list that is put together; a value may be a dict as well."""


def nest_values(values: Iterable[tuple[tuple[str | int, ...], Any]]) -> Any:
    """Put values together as nested dicts and lists, which DCP does not tell apart; an empty dict without values.

    Their paths are different. An integer is an index of a list, except a :class:`DictKey`. (In DCP's paths every key of
    a dict is text, whatever it was.) A path begins with another one only where that one's value is an empty dict or
    list: a rank had nothing there, and another one had. Values that contradict each other are a CorruptCheckpointError.
    """
    nested = _Node()
    for path, value in values:
        node = nested
        for depth, part in enumerate(path[:-1], 1):
            inner = node.setdefault(part, _Node())
            if _is_empty(inner):
                inner = node[part] = _Node()
            if not isinstance(inner, _Node):
                raise _contradiction(path[:depth])
            node = inner
        if path[-1] not in node or _is_empty(node[path[-1]]):
            node[path[-1]] = value
        elif not _is_empty(value):
            raise _contradiction(path)
    return _restore_lists(nested)


def _is_empty(value: Any) -> bool:
    return type(value) in (dict, list) and not value


def _contradiction(path: tuple[str | int, ...]) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the paths of the stored values contradict each other: {'.'.join(map(str, path))!r} is a value, and has "
        "values below it or a second one at its place"
    )


def _restore_lists(node: Any) -> Any:
    """Turn nodes into dicts, and those whose keys are all indices into lists."""
    if not isinstance(node, _Node):
        return node
    values = {key: _restore_lists(value) for key, value in node.items()}
    numbers = sorted(key for key in values if type(key) is int)
    if len(numbers) < len(values) or not values:
        return {int(key) if type(key) is DictKey else key: value for key, value in values.items()}
    return [values[number] for number in numbers]


def map_reduce(
    xs: Iterable[_V],
    key_fn: Callable[[_V], _K] = lambda x: x,  # type: ignore[assignment,return-value]
    value_fn: Callable[[_V], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], _R] = lambda values: values,  # type: ignore[assignment,return-value]
) -> dict[_K, _R]:
    """Group ``value_fn(x)`` by ``key_fn(x)`` and reduce every group: ``{key: reduce_fn([values])}``."""
    groups: dict[_K, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace every factory, in place, by the shards that it builds."""
    dict_list_map_inplace(
        lambda leaf: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf, sharded_state_dict
    )


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """Undo :func:`apply_factories` on loaded values: run ``merge_fn`` wherever ``x2`` holds a factory.

    ``x1`` has the loaded values, nested; it is changed in place and returned. ``x2`` has the factories, nested at the
    same paths; lists may be dicts from index to value. A path that ``x1`` lacks is a ValueError.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    places = _children(x2)
    if places is None or not isinstance(x1, (dict, list)):  # Megatron's callers expect a ValueError
        raise ValueError(f"cannot merge factories at {format_path(key)}: {type(x1).__name__} and {type(x2).__name__}")
    for name, inner in places.items():
        try:
            loaded = x1[name]
        except (KeyError, IndexError):
            raise ValueError(
                f"cannot merge the factory at {format_path((*key, name))}: nothing was loaded there"
            ) from None
        x1[name] = apply_factory_merges(loaded, inner, (*key, name))
    return x1


def extract_sharded_tensors_and_factories(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict; return ``(sharded tensors and factories, rest)``."""
    return extract_matching_values(sharded_state_dict, lambda v: isinstance(v, (ShardedTensor, ShardedTensorFactory)))


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict; return ``(everything sharded, rest)``."""
    return extract_matching_values(sharded_state_dict, lambda v: isinstance(v, ShardedBase))


def split_for_save(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, CommonStateDict]:
    """Split a state dict into sharded and common state: build factories, leave out local and plain objects.

    Returns ``(sharded, common)``: validated copies of the shards, nested as they were, and the rest. The argument is
    not changed. It is a ShardingError if a shard contradicts itself, or a leaf of the common state is one rank's part
    of something.
    """
    sharded, common = split_state_dict(sharded_state_dict, plain_objects=False)
    return dict_list_map_outplace(validated_copy, sharded), common


def split_state_dict(x: Any, path: tuple[Any, ...] = (), *, plain_objects: bool) -> tuple[Any, Any]:
    """Split as :func:`split_for_save` does, but return the caller's own shards, not validated.

    Each of ``(sharded, common)`` has the containers in which it has leaves. ``x`` may be a list within the state dict;
    ``path`` is where it stands there, for errors.
    """
    children = _children(x)
    if children is None or (isinstance(x, list) and not path):
        raise CheckpointingException(
            f"the state dict is {show_given(x)}: expected a dict, as shardckpt.adapters.to_sharded_state_dict(model, "
            "optimizer) returns it"
        )
    if set(map(type, children.values())) == {ShardedTensor}:  # nearly always, and there may be hundreds of thousands
        return (list(x), of_type(x, [])) if isinstance(x, list) else (dict(x), of_type(x, {}))
    return _split_mixed(x, children, path, plain_objects=plain_objects)


def _split_mixed(x: Any, children: dict[Any, Any], path: tuple[Any, ...], *, plain_objects: bool) -> tuple[Any, Any]:
    """Split children of several kinds, in one pass, not one for each kind."""
    left_out = (LocalNonpersistentObject,) if plain_objects else (LocalNonpersistentObject, PlainObject)
    sharded: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    for key, leaf in children.items():
        if shards := _find_shards(leaf):
            sharded[key] = shards
            continue
        value = build_copy(leaf) if isinstance(leaf, ShardedTensorFactory) else leaf
        if isinstance(value, left_out):
            continue
        if isinstance(value, ShardedBase):
            sharded[key] = value
        elif isinstance(value, (dict, list)):
            inner, others = split_state_dict(value, (*path, key), plain_objects=plain_objects)
            if inner:
                sharded[key] = inner
            is_absent = isinstance(value, OptionalEntries) and not value.in_common
            if others or (not value and not is_absent):
                rest[key] = others
        else:
            refuse_parts(value, (*path, key))
            rest[key] = value
    if isinstance(x, list):
        return list(sharded.values()), of_type(x, list(rest.values()))
    return sharded, of_type(x, rest)


def _find_shards(leaf: Any) -> Any:
    """Return a ShardedTensor, or the list of them that a factory builds anew; None for any other leaf."""
    if type(leaf) is ShardedTensor:  # isinstance of an ABC is slow
        return leaf
    return leaf.build() if isinstance(leaf, ShardedTensorFactory) and leaf.builds_anew else None


def validated_copy(shard: ShardedBase) -> ShardedBase:
    """Return a validated copy of a shard's description; ``data`` is shared. ShardingError if it contradicts itself."""
    copied: ShardedBase = _copy_leaf(shard)
    copied.validate_metadata_integrity()
    return copied


def may_have_parts(leaf: Any) -> bool:
    """Return whether :func:`refuse_parts` may refuse a leaf."""
    return type(leaf) not in _SIMPLE and (_is_part(leaf) or isinstance(leaf, (*_DESCRIBED, *_CONTAINERS)))


def _is_part(leaf: Any) -> bool:
    """Return whether a leaf is one rank's part of a tensor: a DTensor or ShardedTensor of torch's."""
    return type(leaf).__module__.startswith(_SHARDED_BY_TORCH)


def refuse_parts(leaf: Any, path: tuple[Any, ...], container: str = "", visited: Collection[int] = ()) -> None:
    """Raise for a leaf that is one rank's part, as the common state has none: only the main rank's would be stored.

    ``container`` is the class of the leaf that it is in, if it is in one: no shard in it would be found. ``visited``
    are the ids of the containers that it is in: one may be in itself.
    """
    if container and isinstance(leaf, (ShardedBase, LocalNonpersistentObject)):
        raise ShardingError(
            f"{format_path(path)} is a {container} with a {type(leaf).__name__} in it: only dicts and lists, in dicts "
            "and lists, are looked into: use these"
        )
    if not may_have_parts(leaf):
        return
    if isinstance(leaf, _DESCRIBED):
        raise ShardingError(
            f"{format_path(path)} is a {type(leaf).__name__}, whose tensors nothing describes: give the result "
            "of shardckpt.adapters.to_sharded_state_dict(model, optimizer), and after a load hand it to load_into"
        )
    if _is_part(leaf):
        raise ShardingError(
            f"{format_path(path)} is a {type(leaf).__name__}, of which each rank has a part: describe it as a "
            "ShardedTensor (shardckpt.adapters.to_sharded_state_dict does)"
        )
    if isinstance(leaf, _CONTAINERS) and id(leaf) not in visited:
        for value in leaf.values() if isinstance(leaf, Mapping) else leaf:
            refuse_parts(value, path, container or type(leaf).__name__, (*visited, id(leaf)))


def build_copy(value: Any) -> Any:
    """Return a copy of a leaf, with a factory built: changes of the copy do not reach the caller's state dict."""
    if type(value) is ShardedTensor:
        return _copy_leaf(value)
    if isinstance(value, ShardedTensorFactory):
        if value.builds_anew:
            return value.build()
        with torch.no_grad():
            return dict_list_map_outplace(_copy_detached, value.build())
    return _copy_leaf(value)


def _copy_detached(value: Any) -> Any:
    """Copy the result of a factory; detach its views of a parameter, which are filled outside autograd."""
    copied = _copy_leaf(value)
    if isinstance(copied, ShardedTensor) and copied.data is not None:
        copied.data = copied.data.detach()
    return copied


def _copy_leaf(value: Any) -> Any:
    if type(value) is ShardedTensor:  # nearly every leaf is one, and copy.copy is slow
        return value.__copy__()
    if isinstance(value, ShardedTensorFactory):
        raise ShardingError(f"the factory {value.key!r} was built by another factory: build it in that one's build_fn")
    return copy.copy(value) if isinstance(value, ShardedBase) else value


def of_type(original: Any, content: Any) -> Any:
    """Return the content in a container of the original's type: a defaultdict keeps its factory."""
    if type(original) in (dict, list):
        return content
    result = copy.copy(original)  # not type(original)(): a subclass may want arguments, as defaultdict does
    result.clear()
    (result.update if isinstance(result, dict) else result.extend)(content)
    return result


def keep_counter(original: dict[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
    """Return the content as a Counter if the original is one, which the state of MultiStepLR needs.

    Of any other class, such as the OrderedDict of a module's state dict, it stays a dict.
    """
    return of_type(original, content) if type(original) is Counter else content


def _children(x: Any) -> dict[Any, Any] | None:
    if isinstance(x, dict):
        return x
    if isinstance(x, list):
        return dict(enumerate(x))
    return None


def _equal_leaves(x1: Any, x2: Any) -> bool:
    try:
        if isinstance(x1, torch.Tensor) or isinstance(x2, torch.Tensor):
            both = isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor)
            same_kind = both and (x1.dtype, x1.shape) == (x2.dtype, x2.shape)
            return same_kind and (torch.equal(x1, x2) or have_equal_bits(x1, x2))
        if isinstance(x1, tuple) and type(x1) is type(x2):
            return len(x1) == len(x2) and all(map(are_equal, x1, x2))
        same = x1 == x2
        # arrays compare by their elements
        return bool(same.all() if hasattr(same, "all") else same) or _is_same_nan(x1, x2)
    except Exception:  # noqa: BLE001 - any class may raise anything
        return False


def _is_same_nan(x1: Any, x2: Any) -> bool:
    """Return whether two numbers or arrays that are not equal by ``==`` have equal bits."""
    # by its name: numpy need not be installed
    if type(x1).__module__ == type(x2).__module__ == "numpy" and x1.dtype.char in _BYTES_ARE_VALUES:
        return bool((x1.dtype, x1.shape, x1.tobytes()) == (x2.dtype, x2.shape, x2.tobytes()))
    return isinstance(x1, (float, complex)) and type(x1) is type(x2) and repr(x1) == repr(x2)


def _merge_into_list(x1: list[Any], x2: dict[Any, Any], key: tuple[Any, ...]) -> list[Any]:
    for index in sorted(x2):
        if not isinstance(index, int) or not 0 <= index <= len(x1):
            raise ValueError(f"cannot merge at {format_path((*key, index))}: the list there has {len(x1)} values")
        if index == len(x1):
            x1.append(x2[index])
        else:
            x1[index] = merge(x1[index], x2[index], (*key, index))
    return x1


def format_path(key: tuple[Any, ...]) -> str:
    """Return a path as errors show it: ``['model']['weight']``."""
    return "".join(f"[{part!r}]" for part in key) or "the top level"


__all__ = [
    "DictKey",
    "apply_factories",
    "apply_factory_merges",
    "are_equal",
    "build_copy",
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "diff",
    "extract_matching_values",
    "extract_sharded_base",
    "extract_sharded_tensors_and_factories",
    "have_equal_bits",
    "map_reduce",
    "merge",
    "nest_values",
    "nested_items",
    "nested_values",
    "of_type",
    "split_for_save",
    "split_state_dict",
    "validated_copy",
]
