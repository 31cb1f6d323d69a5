from __future__ import annotations

import argparse
import collections
import types
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt_safetensors.objects import decode_object, decode_tree_file, encode_object, encode_tree_file
from tests.safetensors.objects.equal import show_bits
from tests.safetensors.objects.payload import STATES
from tests.tables import table

WHAT = "object 'rng'"
QUANTIZED = ("qint32", "qint8", "quint2x4", "quint4x2", "quint8")
DTYPES = sorted({str(d) for name in dir(torch) if isinstance(d := getattr(torch, name), torch.dtype)})


def round_trip(value: Any, codec: str | None = None) -> Any:
    """Encode and decode a value, and check that it comes back bit for bit."""
    found, data = encode_object(value, WHAT)
    assert codec in (None, found)
    back = decode_object(found, data, WHAT)
    assert show_bits(back) == show_bits(value)
    assert show_bits(decode_tree_file(encode_tree_file(value, WHAT), WHAT)) == show_bits(value)
    return back


def make_arrays() -> list[Any]:
    """Arrays of every dtype that is stored, of several shapes and orders."""
    texts = [
        f"{order}{code}"
        for code in ("i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16", "M8[3ns]", "m8[D]")
        for order in "<>"
    ]
    arrays = [np.arange(6).astype(np.int64).astype(text).reshape(2, 3) for text in [*texts, "?", "i1", "u1"]]
    arrays += [np.array(["", "äb"]), np.array([b"a\0b"]), np.array(3.0), np.zeros((0, 3), ">f4"), np.ones((2, 3)).T]
    return [*arrays, np.array([np.nan, -0.0, np.inf], np.float32)[::-1]]


@table("name", STATES)
def test_states_of_trainers_come_back(name: str) -> None:
    """The common state and objects of Megatron, torchtitan, Lightning and transformers come back bit for bit."""
    round_trip(STATES[name])


@table("beside", [None, torch.ones(2)], ids=["json", "safetensors"])
def test_the_size_does_not_depend_on_numbers(beside: Any) -> None:
    """Payloads of one structure have one size, whatever their numbers: later saves can use the plan of an earlier."""
    values = [(0, 0.5), (1 << 63, -2.2250738585072014e-308), (-(1 << 63), 1e22), (7, 3.141592653589793e-05)]
    states = [{"1.5e3": [step, (rate, 'a "1" \\"2')], "n\\": {"12": rate}, "t": beside} for step, rate in values]
    payloads = [encode_object(state, WHAT) for state in states]
    assert len({(codec, len(data)) for codec, data in payloads}) == 1
    for state, (codec, data) in zip(states, payloads, strict=True):
        assert show_bits(decode_object(codec, data, WHAT)) == show_bits(state)
    assert len(encode_object(list(range(30_000)), WHAT)[1]) < 30_000 * 6  # a long list takes its own space alone


def test_each_codec_is_the_simplest_that_will_do() -> None:
    """Bytes are raw, values without tensors are JSON, and others a safetensors file that the library opens."""
    round_trip(b"\x80\0", "raw")
    round_trip({"a": [1, b"x", (None,)]}, "json")
    codec, data = encode_object({"b": torch.arange(3), "s": np.arange(2.0), "c": b"x" * 5000}, WHAT)
    assert codec == "safetensors"
    stored = safetensors.torch.load(data)
    assert sorted(map(tuple, (tensor.shape for tensor in stored.values()))) == [(2,), (3,), (5000,)]
    assert list(dict(safetensors.deserialize(encode_tree_file(None, WHAT)))) == []


def test_values_that_json_lacks_come_back() -> None:
    """Numbers, strings, containers and values of torch that JSON has no word for keep their type and bits."""
    numbers = [float("nan"), -float("inf"), -0.0, 5e-324, 2**63 - 1, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**5000]
    other_nan = np.array([0xFFF8000000000001], np.uint64).view(np.float64)
    texts = ["", "é\0\u2028", "\ud800", "\ud83d\ude00", "😀", "$"]
    round_trip(
        [*numbers, *other_nan.tolist(), *texts, True, None, complex(-0.0, float("nan")), range(5, 1 << 70, -(1 << 65))],
        "json",
    )
    round_trip(
        {1: "a", (2, (3,)): {"$": 1, "$v": {"a": 2}}, None: 3, "\ud800": 4, 1.5: frozenset([1, "b"]), b"k": set()},
        "json",
    )
    round_trip(
        [torch.Size([]), torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cuda", 3), torch.device("meta")], "json"
    )
    state = collections.OrderedDict(b=1, a=2)
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    many = [state, collections.Counter("aab"), collections.deque([1], 2), collections.deque()]
    many += [collections.defaultdict(f, {1: 2}) for f in (None, list, dict, int, float, collections.OrderedDict)]
    namespace = argparse.Namespace(a=[])
    vars(namespace).update({"__class__": 1, "$": 2})
    round_trip([*many, namespace, types.SimpleNamespace(a=[])], "json")


@pytest.mark.filterwarnings("ignore:B?Complex.* support")
@table("name", [name for name in DTYPES if name.removeprefix("torch.") not in QUANTIZED])
def test_tensors_of_every_dtype_come_back(name: str) -> None:
    """Each dtype that torch has is stored bit for bit, 0-d, empty and larger, with memory of its own."""
    dtype = getattr(torch, name.removeprefix("torch."))
    for shape in ((), (0, 3), (3, 5)):
        tensor = torch.empty(shape, dtype=dtype)
        tensor.untyped_storage().copy_(torch.randint(0, 2, (tensor.nbytes,), dtype=torch.uint8).untyped_storage())
        back = round_trip({"t": tensor}, "safetensors")["t"]
        assert back.untyped_storage().nbytes() == back.nbytes


def test_views_come_back_as_their_values() -> None:
    """Strides, conjugation, expansion and gradients of a tensor are resolved; Parameters stay Parameters."""
    base = torch.arange(12.0).reshape(3, 4)
    conj = torch.tensor([1 + 2j]).conj()
    views = [base.T, base[::2, 1:], torch.ones(1).expand(4), conj, conj.imag, base.clone().requires_grad_()]
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.arange(2), requires_grad=False)]
    back = round_trip([*views, *parameters])
    back[0].zero_()
    assert base[0, 1] == 1


def test_one_tensor_twice_is_stored_once() -> None:
    """What was one tensor, array or view is stored once, and is one after the load."""
    tensor, array = torch.arange(1000), np.arange(1000)
    codec, data = encode_object([tensor, tensor.view(1000), {"a": tensor}, array, array, tensor[:10]], WHAT)
    back = decode_object(codec, data, WHAT)
    assert len(data) < 17_000
    assert back[0] is back[1] is back[2]["a"]
    assert back[3] is back[4]
    back[5].zero_()
    assert back[0][5] == 5


def test_arrays_and_scalars_of_numpy_come_back() -> None:
    """Arrays of numbers, dates and fixed texts, of any byte order, and scalars keep dtype and bits."""
    for array in make_arrays():
        back = round_trip([array])[0]
        assert back.flags.writeable
        assert back.base is None or back.base.nbytes == back.nbytes
    scalars = [
        np.float32(0.1),
        np.int8(-1),
        np.bool_(True),
        np.complex64(1j),
        np.datetime64("2020-01-01"),
        np.float64("nan"),
    ]
    round_trip([*scalars, np.uint64(2**64 - 1), np.timedelta64(3, "s"), np.float16(-0.0)], "json")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.binary()
    | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("$av"), inner)
        | st.dictionaries(st.integers() | st.tuples(st.booleans(), st.text()), inner)
        | inner.map(lambda value: torch.tensor([len(repr(value))]))
    ),
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_value_comes_back(value: Any) -> None:
    """Values of plain classes, nested in any way, come back bit for bit."""
    round_trip(value)


@table("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}, lambda v: argparse.Namespace(a=v)])
def test_the_save_refuses_the_depth_that_the_load_would(wrap: Any) -> None:
    """However a value nests, what is encoded is decoded, and what is too deep is refused when it is encoded."""
    back = payload = None
    for depth in (*range(160, 170), *range(245, 255), *range(495, 505)):
        value: Any = 1
        for _ in range(depth):
            value = wrap(value)
        try:
            payload = encode_object(value, WHAT)
        except ShardingError as error:
            assert str(error).startswith(WHAT)  # noqa: PT017
            break
        back = decode_object(*payload, WHAT)
    assert depth in (167, 251, 501)
    assert encode_object(back, WHAT) == payload


def test_files_are_the_same_in_every_process() -> None:
    """The payload of a set does not depend on the order in which the process happens to have it."""
    names = [f"name {i}" for i in range(100)]
    assert encode_object(set(names), WHAT) == encode_object({*names[::-1]}, WHAT)
    tree = encode_object({"a", "b", "c"}, WHAT)[1]
    assert tree == b'{"$":"set","v":["a","b","c"]}'


def test_an_unknown_codec_is_refused_by_name() -> None:
    """A codec of a later release is an error that names the object and the codec."""
    with pytest.raises(CheckpointingException, match=r"object 'rng' has the codec 'zstd'"):
        decode_object("zstd", b"", WHAT)


def test_a_reader_without_numpy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numpy is not installed, an object with an array is an error that says to install it."""
    codec, data = encode_object([np.arange(3)], WHAT)
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    with pytest.raises(CheckpointingException, match=r"object 'rng' cannot be loaded: .*install numpy"):
        decode_object(codec, data, WHAT)
    assert decode_object(*encode_object([torch.ones(1)], WHAT), WHAT) == [torch.ones(1)]
