from __future__ import annotations

import contextlib
import io
import pathlib
import threading
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from shardckpt.archive import decode_object, encode_object, objects
from shardckpt.errors import CorruptCheckpointError, ShardingError, UnsafePickleError


@dataclass
class Schedule:
    """A class that no load knows."""

    steps: int = 3


NAME = f"{__name__}.Schedule"


def test_a_value_comes_back() -> None:
    """What a save may encode, a load decodes: nested plain values, tensors, and classes that the caller allows."""
    value = {"a": [1, (2.5, "x")], "t": torch.arange(3), "s": Schedule(7)}
    back = decode_object(encode_object(value, "it", [Schedule]), "it", [Schedule])
    assert torch.equal(back.pop("t"), value.pop("t"))
    assert back == value


def test_the_save_refuses_what_the_load_would() -> None:
    """An object of an unknown class is refused when it is encoded: by its place, its class, and the way to allow it."""
    with pytest.raises(UnsafePickleError) as caught:
        encode_object({"args": [1, {"plan": Schedule()}]}, "object 'rng'", iter(()))
    text = str(caught.value)
    for part in ("object 'rng'['args'][1]['plan']", NAME, "allow_globals=[Schedule]", "to save and to load"):
        assert part in text
    data = encode_object(Schedule(), "object 'rng'", [Schedule])
    with pytest.raises(UnsafePickleError, match=r"object 'rng': the pickle asks for .*Schedule"):
        decode_object(data, "object 'rng'", ())


def test_a_storage_outside_of_a_tensor_is_refused() -> None:
    """A save refuses a bare storage, by its place: a load would give its name and size in the place of its values."""
    tensor = torch.arange(3)
    with pytest.raises(UnsafePickleError, match=r"it\['b'\]: a storage of torch that no tensor is made of"):
        encode_object({"a": [tensor, tensor[1:]], "b": torch.ones(2).untyped_storage()}, "it", ())


def test_a_storage_of_an_older_save_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """An object that an older release has saved with a bare storage still loads, and a warning says what it lacks."""
    file = io.BytesIO()
    torch.save({"a": torch.arange(3), "b": torch.ones(2).untyped_storage()}, file)
    assert decode_object(file.getvalue(), "it", ())["a"].equal(torch.arange(3))
    assert "it: a storage of torch that no tensor is made of, without its values" in caplog.text


@pytest.mark.parametrize("value", [pathlib.Path, (1, bytes), {object: 1}, Namespace(kind=torch.Tensor), np.dtype])
def test_a_class_that_a_load_replaces_is_refused(value: Any) -> None:
    """A class or function as a value, in whose place a load has an object of its own, is refused by its place."""
    with pytest.raises(UnsafePickleError, match=r"it\['a'\]: a class or function as a value") as caught:
        encode_object({"a": (value,)}, "it", [pathlib.Path])
    assert not caught.value.can_be_allowed


def test_a_class_inside_an_attribute_is_refused_too() -> None:
    """Where no nested dict or list shows the place, the value as a whole is named."""
    with pytest.raises(UnsafePickleError, match=r"refuse object 'rng': .*Schedule"):
        encode_object((Schedule(),), "object 'rng'", ())


def test_what_cannot_be_pickled_is_named_by_its_place() -> None:
    """A lock, for example, is an error of the save that names where it is."""
    with pytest.raises(ShardingError, match=r"object 'rng'\['a'\]\[1\] cannot be pickled: TypeError"):
        encode_object({"a": [0, threading.Lock()]}, "object 'rng'", ())


def test_plain_values_are_not_loaded_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of names and numbers, such as groups of an optimizer, is saved without a load; any other costs one."""
    loads: list[bytes] = []
    monkeypatch.setattr(objects, "load_bytes", lambda data, *_, **__: loads.append(data))
    names = [f"layers.{number}.weight" for number in range(1000)]
    encode_object([{"params": names, "options": {"lr": 0.1, "betas": (0.9, 0.99), "fused": None, "n": 3}}], "it", ())
    assert not loads
    deep, shared, endless = 1, ["a"], []
    endless += [endless] * 100
    for _ in range(20):
        deep = [deep]
    others = [{1: 2}, 1 << 64, torch.ones(1), {"a": {1.5}}, torch.Size([1]), b"a", deep, endless]
    encode_object([shared, shared], "it", ())
    assert not loads
    for number, value in enumerate(others, 1):
        with contextlib.suppress(ShardingError):
            encode_object(value, "it", ())
        assert len(loads) == number


@pytest.mark.parametrize(
    "value",
    [["\ud800"] * 3, [float("nan")], [[[[[[[]]]]]]], {"": [()]}, [2**63 - 1, -(2**63)], [[{"a": 1}] * 3] * 1000],
)
def test_plain_values_are_those_that_any_load_takes(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    """What is neither loaded at the save nor packed by torch.save is loaded by us, and by torch, without permission."""
    monkeypatch.delattr(torch, "save")
    assert objects._is_plain(value)
    data = encode_object(value, "it", ())
    assert repr(decode_object(data, "it", ())) == repr(value)
    assert repr(torch.load(io.BytesIO(data), weights_only=True)) == repr(value)


def test_damage_is_an_error_of_the_family() -> None:
    """Bytes that are no archive are damage, by name."""
    with pytest.raises(CorruptCheckpointError, match=r"object 'rng' is not a torch\.save archive"):
        decode_object(b"no zip", "object 'rng'", ())
