"""Trees to values. The text is a stranger's: each object with ``$`` is checked before anything is made of it."""

from __future__ import annotations

import argparse
import collections
import types
from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt_safetensors.objects.by_name import BY_NAME, decode_by_name
from shardckpt_safetensors.objects.codecs import find_codec_by_name
from shardckpt_safetensors.objects.factories import FACTORIES
from shardckpt_safetensors.objects.json_text import show
from shardckpt_safetensors.objects.numpy_arrays import decode_array, decode_scalar
from shardckpt_safetensors.objects.plain import (
    DECODERS,
    KIND,
    VALUE,
    decode_base64,
    decode_plain,
    has_surrogates,
    list_of,
)
from shardckpt_safetensors.objects.torch_tensors import decode_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from shardckpt.stubs import Stub
    from shardckpt_safetensors.objects.tensor_file import FileTensor

    #: Decodes a container: yields the tree of each part, is sent the part's value, and returns its own.
    Walk = Generator[Any, Any, Any]

#: Fewer keys than these may have any hashes.
_FEW = 1024
#: Keys of a dict, or members of a set, to a hash. More are an attack: the time would grow with the square.
_MOST_OF_ONE_HASH = 8


def decode_tree(tree: Any, tensors: Mapping[str, FileTensor], what: str) -> Any:
    """Decode a tree of at most 500 levels, as of :func:`parse_json`; ``tensors`` are the tensors of its file, by name.

    Tensors and arrays have memory of their own, on the CPU. All references to one tensor become one object. It is a
    CheckpointingException if a codec is not registered, numpy is missing, or this torch lacks a dtype.
    """
    try:
        return _Decoder(tensors).decode(tree)
    except ValueError as exc:
        raise CorruptCheckpointError(f"{what} is damaged: {exc}") from exc
    except CheckpointingException as exc:
        raise CheckpointingException(f"{what} cannot be loaded: {exc}") from exc


class _Decoder:
    def __init__(self, tensors: Mapping[str, FileTensor]) -> None:
        self._tensors = tensors
        #: The value that each tensor has become, with the form of the reference to it.
        self._made: dict[str, tuple[Any, Any]] = {}
        self._stub_classes: set[type[Stub]] = set()

    def decode(self, tree: Any) -> Any:
        """Decode a tree without recursion."""
        walks: list[Walk] = []
        while True:
            value = self._start(tree)
            if isinstance(value, types.GeneratorType):
                walks.append(value)
                value = None
            while walks:
                try:
                    tree = walks[-1].send(value)
                    break
                except StopIteration as end:
                    value = end.value
                    walks.pop()
            else:
                return value

    def _start(self, tree: Any) -> Any:
        """Return the value of a tree without parts, or the walk over a container."""
        cls = type(tree)
        if cls is list:
            return _items(tree)
        if cls is not dict:
            return decode_plain(tree)
        if KIND not in tree:
            return _dict(tree)
        if tree.keys() != {KIND, VALUE} or type(tree[KIND]) is not str:
            raise ValueError(f"an object with {KIND!r} that is malformed: {show(tree)}")
        return self._tagged(tree[KIND], tree[VALUE])

    def _tagged(self, kind: str, inner: Any) -> Any:
        """Return the value, or the walk over it, of an object with a type tag."""
        decode = DECODERS.get(kind) or _BUILDERS.get(kind)
        if decode is not None:
            return decode(inner)
        if kind in _IN_FILE:
            return self._from_file(kind, inner)
        if kind in _BYTES:
            return self._bytes(kind, inner)
        if kind in BY_NAME:
            return self._by_name(kind, inner)
        if "." in kind:
            return _registered(kind, inner)
        raise ValueError(f"{KIND!r} is {kind!r:.100}, which the format does not have")

    def _by_name(self, codec: str, inner: Any) -> Walk:
        return decode_by_name(codec, (yield inner), self._stub_classes)

    def _bytes(self, kind: str, inner: Any) -> Any:
        if type(inner) is not dict:
            return _BYTES[kind](decode_base64(inner))
        if inner.keys() != {KIND, VALUE} or inner[KIND] != "tensor" or type(inner[VALUE]) is not str:
            raise ValueError(f"malformed {kind}: {show(inner)}")
        return self._from_file(kind, inner[VALUE])

    def _from_file(self, kind: str, inner: Any) -> Any:
        """Return the value that a tree refers to by the name of a tensor, or by an object with the name and more."""
        reference = {"name": inner} if type(inner) is str else inner
        name = reference.get("name") if type(reference) is dict else None
        if type(name) is not str or name not in self._tensors:
            raise ValueError(f"a {kind} whose tensor is not in the file: {show(inner)}")
        if name not in self._made:
            self._made[name] = (kind, reference), _make(kind, reference, self._tensors[name])
        # one value for one tensor: a small tree must not ask for a large tensor many times
        referred, value = self._made[name]
        if referred != (kind, reference):
            raise ValueError(f"the tensor {show(name)} is referred to in two ways")
        return value


def _make(kind: str, reference: dict[str, Any], stored: FileTensor) -> Any:
    if kind == "array":
        return decode_array(reference, stored)
    if kind in _BYTES:
        if stored.kind != "U8" or len(stored.shape) != 1:
            raise ValueError(f"{kind} in a tensor of {stored.kind} and shape {stored.shape}")
        return _BYTES[kind](stored.data)
    return decode_tensor(reference, stored, parameter=kind == "parameter")


def _registered(name: str, inner: Any) -> Walk:
    codec = find_codec_by_name(name)
    if codec is None:
        raise CheckpointingException(
            f"its codec {name!r:.300} is not registered in this process: import the module that registers it, or call "
            f"shardckpt_safetensors.register_codec({name!r:.300}, ...) as where it was saved"
        )
    plain = yield inner
    try:
        return codec.decode(plain)
    except CheckpointingException as exc:
        raise CheckpointingException(f"its codec {name!r} fails: {exc}") from exc
    except Exception as exc:
        raise ValueError(f"the codec {name!r} fails to decode it: {type(exc).__name__}: {exc}") from exc


def _dict(tree: dict[str, Any]) -> Walk:
    value = {}
    for key, part in tree.items():
        if key.startswith(KIND) or has_surrogates(key):
            raise ValueError(f"an object with the key {key!r:.100}")
        value[key] = yield part
    return value


def _items(tree: Any) -> Walk:
    if type(tree) is not list:
        raise ValueError(f"not a list: {show(tree)}")
    values = []
    for part in tree:
        values.append((yield part))  # noqa: PERF401 - a comprehension cannot yield
    return values


def _pairs(tree: Any) -> Walk:
    if type(tree) is not list or not all(type(pair) is list and len(pair) == 2 for pair in tree):  # noqa: PLR2004 - a pair
        raise ValueError(f"not a list of pairs: {show(tree)}")
    values = []
    for key, part in tree:
        values.append(((yield key), (yield part)))
    _check_keys([key for key, _ in values])
    return values


def _check_keys(keys: list[Any]) -> None:
    """Raise ValueError if values cannot be the keys of one dict, or if making it would take long."""
    try:
        hashes = collections.Counter(map(hash, keys))
    except TypeError as exc:
        raise ValueError(f"a key that cannot be one: {exc}") from exc
    if len(keys) > _FEW and max(hashes.values()) > _MOST_OF_ONE_HASH:
        raise ValueError("keys with the same hash, made to take long")
    if len(set(keys)) != len(keys):
        raise ValueError("a key twice")


def _as_dict(tree: Any) -> Walk:
    return dict((yield from _pairs(tree)))


def _ordered_dict(tree: Any) -> Walk:
    if type(tree) is not dict:
        return collections.OrderedDict((yield from _pairs(tree)))
    if tree.keys() != {"items", "attributes"}:
        raise ValueError(f"a malformed ordered dict: {show(tree)}")
    value = collections.OrderedDict((yield from _pairs(tree["items"])))
    vars(value).update(_check_attributes((yield tree["attributes"])))
    return value


def _counter(tree: Any) -> Walk:
    counter: collections.Counter[Any] = collections.Counter()
    dict.update(counter, (yield from _pairs(tree)))  # Counter's own update would add
    return counter


def _defaultdict(tree: Any) -> Walk:
    name, pairs = list_of(tree, 2)
    if name is not None and (type(name) is not str or name not in FACTORIES):
        raise ValueError(f"a default factory {show(name)}")
    return collections.defaultdict(None if name is None else FACTORIES[name], (yield from _pairs(pairs)))


def _scalar(tree: Any) -> Any:
    dtype, data = list_of(tree, 2)
    return decode_scalar(dtype, decode_base64(data))


def _tuple(tree: Any) -> Walk:
    return tuple((yield from _items(tree)))


def _deque(tree: Any) -> Walk:
    most, items = list_of(tree, 2)
    values = yield from _items(items)
    if most is not None and (type(most) is not int or not len(values) <= most < 1 << 63):
        raise ValueError(f"{len(values)} items in a deque of at most {show(most)}")
    return collections.deque(values, most)


def _set(tree: Any) -> Walk:
    values = yield from _items(tree)
    _check_keys(values)
    return set(values)


def _frozenset(tree: Any) -> Walk:
    return frozenset((yield from _set(tree)))


def _namespace(cls: type[Any], tree: Any) -> Walk:
    value = cls()
    # not by setattr: a name such as __class__ must remain a name
    vars(value).update(_check_attributes((yield tree)))
    return value


def _check_attributes(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise ValueError("attributes that are not a dict by name")
    return value


_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "scalar": _scalar,
    "tuple": _tuple,
    "set": _set,
    "frozenset": _frozenset,
    "dict": _as_dict,
    "ordered_dict": _ordered_dict,
    "counter": _counter,
    "defaultdict": _defaultdict,
    "deque": _deque,
    "namespace": partial(_namespace, argparse.Namespace),
    "simple_namespace": partial(_namespace, types.SimpleNamespace),
}
_IN_FILE = frozenset(("tensor", "parameter", "array"))
_BYTES: dict[str, Callable[[Any], Any]] = {"bytes": bytes, "bytearray": bytearray}
