"""Values to trees: values that JSON can hold, and the tensors of a file."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import ShardingError
from shardckpt.storage import MOST_LEVELS
from shardckpt_safetensors.objects.by_name import encode_by_name
from shardckpt_safetensors.objects.codecs import Codec, class_name, find_codec_by_class
from shardckpt_safetensors.objects.factories import FACTORY_NAMES
from shardckpt_safetensors.objects.json_text import check_levels, dump_json
from shardckpt_safetensors.objects.numpy_arrays import encode_array, encode_scalar, is_numpy, is_scalar
from shardckpt_safetensors.objects.plain import KIND, LEAVES, PLAIN, encode_base64, has_surrogates, tagged
from shardckpt_safetensors.objects.tensor_file import FileTensor
from shardckpt_safetensors.objects.torch_tensors import encode_tensor, tensor_view

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    #: Encodes a container: yields each part with its place, is sent the part's tree, and returns its own.
    Walk = Generator[tuple[str, Any], Any, Any]

#: Longer bytes are tensors of the file, without base64.
_LONG_BYTES = 4096
#: Most values in one tree. A list that has one list twice, which has one twice, and so on, would never end.
_MOST_VALUES = 1 << 24
_SHOWN_STEPS = 20
#: Refused values that one error names.
_MOST_FAULTS = 20
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def encode_tree(value: Any, what: str) -> tuple[Any, dict[str, FileTensor]]:
    """Return the tree of a value, and the tensors that the tree refers to, by name.

    If it cannot be represented, the ShardingError names the place, the class, and the remedy.
    """
    encoder = _Encoder(what)
    tree = encoder.encode(value)
    try:
        check_levels(tree)
    except ValueError as exc:
        raise ShardingError(f"{what} is nested too deeply, which a load would refuse: it needs {exc}") from exc
    return tree, encoder.tensors


class _Encoder:
    def __init__(self, what: str) -> None:
        self.tensors: dict[str, FileTensor] = {}
        self._what = what
        #: The tree's references to stored values, by their memory or identity; with the value, which must live as long
        #: as its id or address is a key.
        self._references: dict[Any, tuple[Any, Any]] = {}
        self._count = 0
        #: The faults, a sentence each.
        self._faults: list[str] = []

    def encode(self, value: Any) -> Any:
        """Encode a value without recursion: however deep it is, Python's stack is not."""
        walks: list[Walk] = []
        places: list[str] = []
        open_ids: list[int] = []
        active: set[int] = set()
        place, tree = "", None
        try:
            while True:
                self._count += 1
                if self._count > _MOST_VALUES:
                    raise ValueError(f"too many values (more than {_MOST_VALUES}): make long lists tensors or arrays")
                walk = self._start_or_note(value, places, place)
                if isinstance(walk, types.GeneratorType):
                    if id(value) in active:
                        raise ValueError("that contains itself: break the cycle")
                    if len(walks) == MOST_LEVELS:
                        raise ValueError(f"below {MOST_LEVELS} others, which a load would refuse: flatten it")
                    walks.append(walk)
                    places.append(place)
                    place = ""
                    open_ids.append(id(value))
                    active.add(id(value))
                    tree = None
                else:
                    tree = walk
                # continues with the innermost container that has another part
                while walks:
                    try:
                        place, value = walks[-1].send(tree)
                        break
                    except (StopIteration, ValueError) as end:
                        tree = end.value if isinstance(end, StopIteration) else self._note(value, [*places, place], end)
                        walks.pop()
                        place = places.pop()
                        active.discard(open_ids.pop())
                else:
                    break
        except ValueError as exc:
            self._note(value, [*places, place], exc)
        if self._faults:
            raise ShardingError("\n".join(self._faults))
        return tree

    def _start_or_note(self, value: Any, places: list[str], place: str) -> Any:
        try:
            return self._start(value)
        except ValueError as exc:
            return self._note(value, [*places, place], exc)

    def _note(self, value: Any, shown: list[str], why: ValueError) -> Any:
        """Note a refused value, at the end of these steps, and go on: one error names all. None stands for its tree."""
        if len(shown) > _SHOWN_STEPS:
            shown = [*shown[: _SHOWN_STEPS // 2], "...", *shown[-_SHOWN_STEPS // 2 :]]
        self._faults.append(f"{self._what}{''.join(shown)} cannot be stored: a {class_name(type(value))} {why}")
        if len(self._faults) == _MOST_FAULTS:
            raise ShardingError("\n".join(self._faults)) from why
        return None

    def _start(self, value: Any) -> Any:
        """Return the tree of a value without parts, or the walk over a container; ValueError if it is refused."""
        cls = type(value)
        leaf = LEAVES.get(cls)
        if leaf is not None:
            return leaf(value)
        codec = find_codec_by_class(cls)
        if codec is not None:
            return self._registered(value, codec)
        container = _CONTAINERS.get(cls)
        if container is not None:
            return container(value)
        if cls in (bytes, bytearray):
            return self._bytes(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._numpy(value) if is_numpy(value) else _named(value)

    def _tensor(self, value: torch.Tensor) -> Any:
        try:
            key = tensor_view(value)
        except RuntimeError as exc:  # functorch's tensors have no address
            raise ValueError(f"without memory of its own: {exc}") from exc
        kind = "parameter" if type(value) is torch.nn.Parameter else "tensor"
        return self._refer(key, value, kind, encode_tensor)

    def _numpy(self, value: Any) -> Any:
        if not is_scalar(value):
            return self._refer(id(value), value, "array", encode_array)
        text, data = encode_scalar(value)
        return tagged("scalar", [text, encode_base64(data)])

    def _bytes(self, value: bytes | bytearray) -> Any:
        kind = class_name(type(value))
        if len(value) <= _LONG_BYTES:
            return tagged(kind, encode_base64(value))
        return tagged(kind, self._refer(id(value), value, "tensor", _bytes_as_tensor))

    def _refer(
        self, key: Any, value: Any, kind: str, encode: Callable[[Any, str], tuple[FileTensor, Any]]
    ) -> dict[str, Any]:
        """Return how the tree refers to a tensor, an array or bytes, which are stored once."""
        if key not in self._references:
            name = str(len(self.tensors))
            self.tensors[name], reference = encode(value, name)
            self._references[key] = reference, value
        return tagged(kind, self._references[key][0])

    def _registered(self, value: Any, codec: Codec) -> Walk:
        try:
            plain = codec.encode(value)
        except Exception as exc:
            raise ValueError(f"that the codec {codec.name!r} fails to encode: {type(exc).__name__}: {exc}") from exc
        return tagged(codec.name, (yield "", plain))


def _named(value: Any) -> Walk:
    named = encode_by_name(value)
    if named is None:
        raise ValueError(_advice(value))
    codec, fields = named
    return tagged(codec, (yield "", fields))


def _bytes_as_tensor(value: bytes | bytearray, name: str) -> tuple[FileTensor, Any]:
    # copied if it can change: a bytearray must not be locked while the payload is made
    return FileTensor("U8", [len(value)], bytes(value)), name


def _advice(value: Any) -> str:
    """Return advice about a value of a class that the format does not know."""
    cls = type(value)
    name, full = cls.__name__, class_name(cls)
    example = f"shardckpt_safetensors.register_codec('{full if '.' in full else f'my.{full}'}', {name}, "
    if isinstance(value, enum.Enum):
        return (
            "(an enum member) whose class its module does not have under its name: give its name or value, or register "
            f"a codec, where it is saved and where it is loaded: {example}lambda member: member.name, "
            f"lambda name: {name}[name])"
        )
    if isinstance(value, _CODE):
        return "is code, which is never stored: give its name, and find it by that after the load"
    if dataclasses.is_dataclass(value):
        return (
            f"is of a class that the format does not know: give a dict, or register a codec, where it is saved and "
            f"where it is loaded: {example}vars, lambda fields: {name}(**fields))"
        )
    base = next((b for b in cls.__mro__[1:] if b in LEAVES or b in _CONTAINERS), None)
    become = f"make it a {class_name(base)}, if that is enough" if base else "give plain values in its place"
    return (
        f"is of a class that the format does not know: {become}, or register a codec, where it is saved and where it "
        f"is loaded: {example}to_plain_values, from_plain_values)"
    )


def _show_key(key: Any) -> str:
    """Return a key of a dict for the place in an error: only of plain classes, whose repr is their own."""
    return f"[{key!r:.80}]" if type(key) in PLAIN or type(key) in (bytes, complex) else f"[a {class_name(type(key))}]"


def _items(value: Any) -> Walk:
    trees = []
    for index, item in enumerate(value):
        trees.append((yield f"[{index}]", item))
    return trees


def _pairs(value: dict[Any, Any]) -> Walk:
    trees = []
    for key, item in value.items():
        shown = _show_key(key)
        trees.append([(yield f" key {shown}", key), (yield shown, item)])
    return trees


def _dict(value: dict[Any, Any]) -> Walk:
    if not all(type(key) is str and not key.startswith(KIND) and not has_surrogates(key) for key in value):
        return tagged("dict", (yield from _pairs(value)))
    tree = {}
    for key, item in value.items():
        tree[key] = yield f"[{key!r:.80}]", item
    return tree


def _ordered_dict(value: collections.OrderedDict[Any, Any]) -> Walk:
    pairs = yield from _pairs(value)
    if not vars(value):
        return tagged("ordered_dict", pairs)
    # `_metadata` of a module's state dict
    return tagged("ordered_dict", {"items": pairs, "attributes": (yield "'s attributes", _attributes(value))})


def _counter(value: collections.Counter[Any]) -> Walk:
    if vars(value):
        raise ValueError("with attributes: give a dict")
    return tagged("counter", (yield from _pairs(value)))


def _defaultdict(value: collections.defaultdict[Any, Any]) -> Walk:
    factory = value.default_factory
    name = FACTORY_NAMES.get(factory) if isinstance(factory, type) else None
    if name is None and factory is not None:
        raise ValueError(f"whose default_factory is not one of {', '.join(FACTORY_NAMES.values())}: make it a dict")
    return tagged("defaultdict", [name, (yield from _pairs(value))])


def _tuple(value: tuple[Any, ...]) -> Walk:
    return tagged("tuple", (yield from _items(value)))


def _deque(value: collections.deque[Any]) -> Walk:
    return tagged("deque", [value.maxlen, (yield from _items(value))])


def _set(value: set[Any] | frozenset[Any]) -> Walk:
    trees = []
    for item in value:
        trees.append((yield "{...}", item))  # noqa: PERF401 - a comprehension cannot yield
    # sorted: the order of strings in a set is another in each process, and files are to be the same
    return tagged(class_name(type(value)), sorted(trees, key=dump_json))


def _namespace(value: argparse.Namespace | types.SimpleNamespace) -> Walk:
    kind = "namespace" if type(value) is argparse.Namespace else "simple_namespace"
    return tagged(kind, (yield "'s attributes", _attributes(value)))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a value as a new dict; ValueError if their names are not plain strings."""
    if not all(type(name) is str for name in vars(value)):
        raise ValueError("with attributes whose names are not strings: give a dict")
    return dict(vars(value))


_CONTAINERS: dict[type, Callable[[Any], Walk]] = {
    list: _items,
    dict: _dict,
    tuple: _tuple,
    set: _set,
    frozenset: _set,
    collections.OrderedDict: _ordered_dict,
    collections.Counter: _counter,
    collections.defaultdict: _defaultdict,
    collections.deque: _deque,
    argparse.Namespace: _namespace,
    types.SimpleNamespace: _namespace,
}
