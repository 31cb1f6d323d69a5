"""Differences by stored fingerprints alone: the answer without torch is the answer with it, or there is none."""

from __future__ import annotations

import argparse
import enum
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.cli.inspect import OUTLINES
from shardckpt.engine.outlined import open_by_outline
from shardckpt.maintenance import diff_by_fingerprints, diff_checkpoints
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.backends import Backend, both
from tests.cli.checkpoints import damage
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


class _Phase(enum.Enum):
    WARM_UP = 1


TENSORS = {"a": torch.arange(6.0).view(2, 3), "half": torch.ones(4).bfloat16(), "scalar": torch.tensor(3)}
STATE = {"iteration": 7, "args": argparse.Namespace(lr=0.5, betas=(0.9, 0.95)), "nothing": None, "names": ["x", "y"]}


def _save(path: Path, tensors: dict[str, torch.Tensor], backend: str, *, prints: bool = True, **common: Any) -> None:
    shards = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    dist_checkpointing.save({**shards, **common}, path, (backend, 1), fingerprints=prints)


def _both_ways(folder: Path, **options: bool) -> tuple[Any, Any]:
    paths = str(folder / "one"), str(folder / "two")
    return diff_by_fingerprints(*paths, OUTLINES, **options), diff_checkpoints(*paths, **options)


@both
@table("change", ["nothing", "first", "second", "each"])
def test_the_report_is_that_of_values(tmp_path: Path, backend: Backend, change: str) -> None:
    """Of equal tensors, and of those that one of them alone has, it is the report that diff_checkpoints makes."""
    one = TENSORS | ({"x": torch.ones(2, 2).int(), "z": torch.ones(1)} if change in ("first", "each") else {})
    other = TENSORS | ({"y": torch.ones(0, 5)} if change in ("second", "each") else {})
    _save(tmp_path / "one", one, backend.name, iteration=7, names=["x", {"lr": 0.1}])
    _save(tmp_path / "two", other, backend.name, iteration=7, names=["x", {"lr": 0.1}])
    found, full = _both_ways(tmp_path)
    assert found == full
    assert (found.equal, found.by_fingerprint, found.objects.equal) == (3, 3, 2)
    assert found.are_same == (change == "nothing")


@both
def test_indexes_with_equal_columns_are_not_taken_for_each_other(tmp_path: Path, backend: Backend) -> None:
    """The dtypes of the second format stand beside the columns, and are other ones where these are equal."""
    for name, dtype in (("one", torch.float32), ("two", torch.int32)):
        _save(tmp_path / name, {"a": torch.ones(3, dtype=dtype)}, backend.name, iteration=7)
    found = [open_by_outline(str(tmp_path / name), OUTLINES) for name in ("one", "two")]
    assert [each and each.outline.dtypes for each in found] == [["float32"], ["int32"]]


def test_tensors_of_two_formats_are_compared(tmp_path: Path) -> None:
    """Without the objects and the common state, whose bytes depend on the format."""
    for name, backend in (("one", "torch_dist"), ("two", "safetensors")):
        _save(tmp_path / name, TENSORS, backend, **STATE)
    found, full = _both_ways(tmp_path, tensors_only=True)
    assert found == full
    assert _both_ways(tmp_path)[0] is None


def test_common_state_of_a_pickle_is_compared_by_its_bytes(tmp_path: Path) -> None:
    """With a namespace, tuples and tensors: what every load of torch_dist accepts."""
    for name in ("one", "two"):
        _save(tmp_path / name, TENSORS, "torch_dist", **STATE, rng=torch.arange(4))
    found, full = _both_ways(tmp_path)
    assert found == full
    assert found.objects.equal == 5


@both
def test_objects_are_compared_by_their_bytes(tmp_path: Path, backend: Backend) -> None:
    """Of several ranks, with tensors and values that JSON lacks; the report is that of their values."""
    for name in ("one", "two"):
        objects = {f"rng{n}": ShardedObject("rng", {"seed": (n, torch.arange(n + 3))}, (2,), (n,)) for n in range(2)}
        _save(tmp_path / name, TENSORS, backend.name, iteration=7, **objects)
    found, full = _both_ways(tmp_path)
    assert found == full
    assert (found.objects.equal, found.are_same) == (3, True)


@both
@table(
    "case",
    ["values", "dtype", "shape", "no fingerprints", "object", "common state", "content metadata", "damage"],
)
def test_what_needs_values_has_no_report(tmp_path: Path, backend: Backend, case: str) -> None:
    """Other values, dtypes, shapes, objects or common states, and tensors without fingerprints: these are read."""
    changed = {
        "values": {"a": TENSORS["a"] + 1},
        "dtype": {"a": TENSORS["a"].double()},
        "shape": {"a": TENSORS["a"].view(3, 2)},
    }
    common: dict[str, dict[str, Any]] = {
        "object": {"rng": ShardedObject("rng", None, (1,), (0,))},
        "content metadata": {"content_metadata": {"version": 2}},
    }
    for name in ("one", "two"):
        is_second = name == "two"
        common["object"]["rng"].data = {"seed": int(is_second)}
        _save(
            tmp_path / name,
            TENSORS | (changed.get(case, {}) if is_second else {}),
            backend.name,
            prints=not (case == "no fingerprints" and is_second),
            iteration=8 if case == "common state" and is_second else 7,
            **common.get(case, {}),
        )
    if case == "damage":
        damage(tmp_path / "two" / "tensors.fingerprints", "zeroed")
    paths = str(tmp_path / "one"), str(tmp_path / "two")
    assert diff_by_fingerprints(*paths, OUTLINES) is None
    if case in ("object", "common state", "content metadata"):
        assert diff_by_fingerprints(*paths, OUTLINES, tensors_only=True) is not None


@table("value", [_Phase.WARM_UP, torch.arange(2), float("nan"), {"lr": (1, 2)}])
def test_common_state_that_json_lacks_has_no_report(tmp_path: Path, value: Any) -> None:
    """In the second format, whose JSON says of a tensor where it is, and of a class its name alone."""
    for name in ("one", "two"):
        _save(tmp_path / name, TENSORS, "safetensors", value=[value])
    found, full = _both_ways(tmp_path)
    assert found is None
    assert full.are_same


@pytest.mark.parametrize("other", ["file", "s3://bucket/step"])
def test_what_is_no_checkpoint_of_ours_has_no_report(tmp_path: Path, other: str) -> None:
    """A file, and what is at a URL."""
    _save(tmp_path / "one", TENSORS, "safetensors")
    torch.save(TENSORS, tmp_path / "file")
    second = str(tmp_path / other) if other == "file" else other
    assert diff_by_fingerprints(str(tmp_path / "one"), second, OUTLINES) is None
