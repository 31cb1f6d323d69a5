from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import threading
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shardckpt.errors import ShardingError
from shardckpt_safetensors.objects import encode_object
from shardckpt_safetensors.objects import encoder as encoder_module
from shardckpt_safetensors.objects.codecs import FORMAT_CLASSES
from shardckpt_safetensors.objects.plain import LEAVES
from tests.tables import table


def _make_phase() -> type[enum.IntEnum]:
    class Phase(enum.IntEnum):
        """An enum that is an int, too, and that no module has by its name."""

        WARM = 1

    return Phase


PHASE = _make_phase()


@dataclasses.dataclass
class Plan:
    """A class that the format does not know."""

    steps: int = 3


def _make_named() -> tuple[int, ...]:
    class Named(NamedTuple):
        """A subclass of tuple, which no module has by its name."""

        a: int = 1

    return Named()


def _subclass(base: type, *args: Any) -> Any:
    return type("Mine", (base,), {"__module__": __name__})(*args)


def _marked_parameter() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


REFUSED: dict[str, tuple[Any, str]] = {
    "enum": (
        PHASE(1),
        r"test_encoder\.\S*Phase \(an enum member\).*register_codec\('.*Phase', Phase, lambda member: member.name",
    ),
    "dataclass": (
        Plan(),
        r"test_encoder\.Plan .*register_codec\('.*Plan', Plan, vars, lambda fields: Plan\(\*\*fields\)\)",
    ),
    "dict": (_subclass(dict), r"Mine .*make it a dict, if that is enough, or register a codec"),
    "list": (_subclass(list), "make it a list"),
    "str": (_subclass(str, "a"), "make it a str"),
    "int": (_subclass(int, 1), "make it a int"),
    "float": (_subclass(float, 1), "make it a float"),
    "ordered dict": (_subclass(collections.OrderedDict), "make it a collections.OrderedDict"),
    "namespace": (_subclass(argparse.Namespace), "make it a argparse.Namespace"),
    "named tuple": (_make_named(), r"test_encoder\.\S*Named .*make it a tuple"),
    "defaultdict": (collections.defaultdict(lambda: 1), "default_factory is not one of .* make it a dict"),
    "lock": (threading.Lock(), "give plain values in its place, or register a codec"),
    "class": (Plan, "is code, which is never stored"),
    "function": (functools.partial(print), "is code, which is never stored"),
    "meta": (torch.ones(1, device="meta"), "on the meta device"),
    "sparse": (torch.eye(2).to_sparse(), "layout torch.sparse_coo: .*indices and values"),
    "subclass": (torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})), r"full_tensor\(\).*ShardedTensor"),
    "attributes": (_marked_parameter(), r"attributes 'tensor_model_parallel'.*detach\(\)"),
    "objects": (np.array([{}]), "dtype object: give it as a list"),
    "structure": (np.zeros(2, "i4,f8"), "dtype .*: give it as a list"),
    "long double": (np.zeros(2, np.longdouble), "dtype .*128: give it as a list"),
    "matrix": (np.ma.masked_array([1]), r"MaskedArray is a subclass of an array: give numpy.array\(it\)"),
    "text scalar": (np.str_("a"), r"numpy.str_ .*str\(\)"),
    "other integer": (np.longlong(1), r"a numpy.longlong is a scalar .*item\(\)"),
}


@table("name", REFUSED)
def test_what_cannot_be_represented_is_refused_by_its_place(name: str) -> None:
    """Nothing becomes another class silently: the error names the object, the place, the class, and the way out."""
    value, text = REFUSED[name]
    with pytest.raises(ShardingError, match=text) as caught:
        encode_object({"a": [0, (1, argparse.Namespace(b={2: value}))]}, "object 'rng'")
    assert str(caught.value).startswith("object 'rng'['a'][1][1]'s attributes['b'][2] cannot be stored: a ")


def test_keys_are_refused_by_their_place() -> None:
    """An unknown class as a key of a dict is named as a key, without its repr."""
    with pytest.raises(ShardingError, match=r"^object 'rng' key \[a tests\S*Phase\] cannot be stored: "):
        encode_object({PHASE(1): 1}, "object 'rng'")


def test_a_quantized_tensor_is_refused() -> None:
    """Tensors of torch's quantized dtypes need more than their bytes: the error says what to give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once in a process that these dtypes go
        value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(ShardingError, match=r"int_repr\(\), scales"):
        encode_object(value, "object 'rng'")


def test_a_cycle_is_refused() -> None:
    """A value that contains itself is an error that names where, and one that is there twice is not."""
    cycle: list[Any] = [1]
    cycle.append({"a": cycle})
    with pytest.raises(ShardingError, match=r"object 'rng'\[1\]\['a'\] cannot be stored: a list that contains itself"):
        encode_object(cycle, "object 'rng'")
    twice = [1]
    assert encode_object([twice, twice], "object 'rng'")[1].rstrip() == b"[[1],[1]]"


def test_depth_is_no_recursion() -> None:
    """However deep a value is, the error is one of ours, with its first and last places."""
    value: Any = 1
    for _ in range(5_000):
        value = [value]
    with pytest.raises(
        ShardingError, match=r"\[0\]\[0\]\.\.\.\[0\].* below 500 others, which a load would refuse"
    ) as caught:
        encode_object(value, "object 'rng'")
    assert len(str(caught.value)) < 300


def test_a_value_that_doubles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small value whose tree would have no end in practice is refused before it takes the memory."""
    monkeypatch.setattr(encoder_module, "_MOST_VALUES", 1000)
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    with pytest.raises(ShardingError, match="too many values"):
        encode_object(value, "object 'rng'")


def test_a_tree_too_long_for_a_header_is_refused() -> None:
    """A tree beside tensors that readers would refuse for its length is refused at the save."""
    with pytest.raises(ShardingError, match=r"object 'rng' needs a header of \d+ bytes; readers accept 100000000"):
        encode_object([torch.ones(1), "x" * 100_000_000], "object 'rng'")


def test_classes_of_the_format_are_all_known() -> None:
    """The classes for which no codec can be registered are those that the encoder knows."""
    known = {*LEAVES, *encoder_module._CONTAINERS, bytes, bytearray, torch.Tensor, torch.nn.Parameter}
    assert known == FORMAT_CLASSES
