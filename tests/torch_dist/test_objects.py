from __future__ import annotations

import argparse
import collections
import datetime as dt
import enum
import io
import logging
import pathlib
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import UnsafePickleError
from shardckpt.mapping import ShardedObject

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Mine:
    """A class that no allow-list knows."""

    x: int


class Colour(enum.Enum):
    """An enum that no allow-list knows."""

    RED = 1


PLAIN = {
    "numbers": [1, 2.5, 3 + 4j, True, None, 10**30],
    "texts": ("a", b"bytes", bytearray(b"ba"), "ü"),
    "sets": {1, 2},
    "frozen": frozenset({"x"}),
    "ordered": collections.OrderedDict(a=1),
    "default": collections.defaultdict(list, {"k": [1]}),
    "deque": collections.deque([1, 2], maxlen=3),
    "counter": collections.Counter("aab"),
    "namespace": argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=1)),
    "simple": SimpleNamespace(a=[1]),
    "time": dt.datetime(2026, 11, 21, 8, 0, tzinfo=dt.timezone.utc).replace(tzinfo=None),
    "delta": dt.timedelta(seconds=5),
    "torch": [torch.float8_e4m3fn, torch.Size((1, 2)), torch.device("cpu")],
    "random": random.Random(3).getstate(),
    "slice": slice(1, 2),
    "range": range(3),
}


def _stored(value: Any, path: Path, **options: Any) -> Any:
    dc.save({"o": ShardedObject("o", value, (1,), (0,)), "common": value}, path)
    loaded = dc.load({"o": ShardedObject("o", None, (1,), (0,))}, path, **options)
    return loaded["o"], loaded["common"]


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_plain_values_come_back_equal(tmp_path: Path, name: str) -> None:
    """What training states are made of needs no leave: as object and as common state it comes back as it was."""
    for got in _stored(PLAIN[name], tmp_path / "c"):
        assert got == PLAIN[name]
        assert isinstance(got, type(PLAIN[name]))


def test_arrays_and_tensors_come_back_equal(tmp_path: Path) -> None:
    """Numpy arrays of all kinds, numpy's random state, tensors and streams are plain too."""
    value = {
        "array": np.arange(6).reshape(2, 3),
        "strings": np.array(["a", "bc"]),
        "objects": np.array([{"x": 1}, None], dtype=object),
        "scalar": np.float32(2.5),
        "random": np.random.RandomState(1).get_state(),
        "tensor": torch.arange(5, dtype=torch.bfloat16),
        "stream": io.BytesIO(b"data"),
    }
    got, _ = _stored(value, tmp_path / "c")
    assert np.array_equal(got["array"], value["array"])
    assert np.array_equal(got["strings"], value["strings"])
    assert got["objects"].tolist() == [{"x": 1}, None]
    assert got["scalar"] == value["scalar"]
    assert all(np.array_equal(a, b) for a, b in zip(got["random"], value["random"], strict=True))
    assert torch.equal(got["tensor"], value["tensor"])
    assert got["stream"].read() == b"data"


def test_paths_come_as_pure_paths(tmp_path: Path) -> None:
    """A path is only a name: it comes back as one that cannot touch the file system."""
    got, _ = _stored(pathlib.Path("/a/b"), tmp_path / "c")
    assert got == pathlib.PurePosixPath("/a/b")


@pytest.mark.parametrize("value", [Mine(3), Colour.RED], ids=["dataclass", "enum"])
def test_other_classes_need_leave(tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The save warns, the load refuses with the global's name, and allow_globals= lets it through."""
    kind = type(value)
    with caplog.at_level(logging.WARNING):
        dc.save({"common": value}, tmp_path / "c")
    assert f"{kind.__module__}.{kind.__name__}" in caplog.text
    with pytest.raises(UnsafePickleError, match=rf"test_objects\.{kind.__name__}.*allow_globals=\[{kind.__name__}\]"):
        dc.load_common_state_dict(tmp_path / "c")
    allowed = [kind, getattr] if kind is Colour else [kind]
    assert dc.load_common_state_dict(tmp_path / "c", allow_globals=allowed)["common"] == value


def test_torchs_safe_globals_are_honoured(tmp_path: Path) -> None:
    """What the user registered with torch.serialization is allowed here too."""
    dc.save({"common": Mine(1)}, tmp_path / "c")
    with torch.serialization.safe_globals([Mine]):
        assert dc.load_common_state_dict(tmp_path / "c")["common"] == Mine(1)
    with torch.serialization.safe_globals([(Mine, f"{Mine.__module__}.Mine")]):
        assert dc.load_common_state_dict(tmp_path / "c")["common"] == Mine(1)
