"""Differences between two checkpoints: every kind is found and counted, whatever the formats and the sharding."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import OrderedDict
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import export_to_huggingface, find_mapping
from shardckpt.maintenance import convert_checkpoint, diff_checkpoints
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.planning import Box
from tests.maintenance.diff import save_values
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _values() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(7.0 * 300).view(7, 300),
        "b": torch.tensor(3),
        "nan": torch.tensor([1.0, math.nan]),
        "half": torch.arange(50.0).bfloat16(),
        "empty": torch.ones(0, 3),
    }


@table("fingerprints", [True, False])
def test_equal_values_are_equal_in_any_formats(tmp_path: Path, fingerprints: bool) -> None:
    """The same values, NaN and empty tensors among them, have no difference: by fingerprints, and read."""
    save_values(tmp_path / "one", _values(), "torch_dist", fingerprints=fingerprints)
    save_values(tmp_path / "two", _values(), "safetensors", fingerprints=True)
    report = diff_checkpoints(tmp_path / "one", tmp_path / "two")
    assert (report.are_same, report.equal, report.by_fingerprint) == (True, 5, 5 * fingerprints)
    assert diff_checkpoints(tmp_path / "one", tmp_path / "two", read_values=True).by_fingerprint == 0


@table("fingerprints", [True, False])
@table("memory", [256, 1 << 20])
def test_it_finds_one_flipped_bit(tmp_path: Path, memory: int, fingerprints: bool) -> None:
    """One bit of one element: its tensor, its index and the size of the difference, also read in small pieces."""
    values = _values()
    save_values(tmp_path / "one", values, fingerprints=fingerprints)
    values["a"].view(torch.int32)[5, 213] ^= 1
    save_values(tmp_path / "two", values, fingerprints=fingerprints)
    report = diff_checkpoints(tmp_path / "one", tmp_path / "two", memory=memory)
    (found,) = report.differences
    assert (found.key, found.kind, found.elements, found.different, found.index) == ("a", "values", 2100, 1, (5, 213))
    step = abs(values["a"][5, 213].item() - 1713.0)
    assert found.max_absolute == step
    assert found.max_relative == step / values["a"][5, 213].item()
    assert diff_checkpoints(tmp_path / "one", tmp_path / "two", atol=2 * step).are_same
    assert diff_checkpoints(tmp_path / "one", tmp_path / "two", rtol=1e-6).are_same
    assert not diff_checkpoints(tmp_path / "one", tmp_path / "two", atol=step / 2).are_same


def test_each_kind_of_difference_is_named(tmp_path: Path) -> None:
    """Keys of one checkpoint only, other shapes, other dtypes, NaN against a number: sorted, each with its kind."""
    save_values(tmp_path / "one", _values() | {"gone": torch.ones(1), "zero": torch.tensor([0.0])})
    others = {"half": torch.arange(50.0), "b": torch.ones(2), "nan": torch.tensor([math.nan, 2.0])}
    save_values(
        tmp_path / "two", _values() | others | {"new": torch.ones(1), "zero": torch.tensor([-0.0])}, "torch_dist"
    )
    report = diff_checkpoints(tmp_path / "one", tmp_path / "two")
    assert [(found.key, found.kind) for found in report.differences] == [
        ("b", "shape"),
        ("gone", "only in first"),
        ("half", "dtype"),
        ("nan", "values"),
        ("new", "only in second"),
        ("zero", "values"),
    ]
    shape, _, dtype, nan, _, zero = report.differences
    assert (shape.first, shape.second, shape.elements) == ("int64 []", "float32 [2]", 0)
    assert (dtype.different, dtype.elements, dtype.index) == (0, 50, None)
    assert (nan.different, nan.max_absolute, nan.max_relative, nan.index) == (2, math.inf, math.inf, (0,))
    assert (shape.relative_norm, dtype.relative_norm, zero.relative_norm) == (None, None, 0.0)
    assert (zero.different, zero.max_absolute, zero.max_relative) == (1, 0.0, 0.0)  # the bits differ


def test_a_packed_dtype_is_compared_by_its_bytes(tmp_path: Path) -> None:
    """Torch converts no element of it to a number: it has no norm, and no distance."""
    codes = torch.arange(8, dtype=torch.uint8)
    for name, values in (("one", codes), ("two", codes.flip(0))):
        save_values(tmp_path / name, {"w": values.view(torch.float4_e2m1fn_x2)})
    (found,) = diff_checkpoints(tmp_path / "one", tmp_path / "two").differences
    assert (found.kind, found.elements, found.different, found.index) == ("values", 8, 8, (0,))
    assert (found.max_absolute, found.relative_norm) == (None, None)


def test_dtypes_alone_are_no_difference_if_they_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that a cast keeps are equal, with a count of them; what a cast has rounded still differs."""
    values = {"kept": torch.arange(8.0), "rounded": torch.tensor([1.0, 0.1]), "same": torch.ones(2)}
    save_values(tmp_path / "one", values, "torch_dist")
    save_values(tmp_path / "two", {**values, **{k: values[k].bfloat16() for k in ("kept", "rounded")}}, "ep")
    calls = ["diff", str(tmp_path / "one"), str(tmp_path / "two")]
    assert main([*calls, "--json"]) == 1
    assert [each["kind"] for each in json.loads(capsys.readouterr().out)["differences"]] == ["dtype", "dtype"]
    assert main([*calls, "--ignore-dtype", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert (found["key"], found["kind"], found["different"], found["index"]) == ("rounded", "values", 1, [1])
    assert main([*calls, "--ignore-dtype", "--rtol", "0.01"]) == 0
    assert "3 of 3 tensors are equal, 2 of them of another dtype" in capsys.readouterr().out


def test_the_relative_norm_is_that_of_the_whole_tensor(tmp_path: Path) -> None:
    """A value that was near 0 makes a huge relative difference, and hardly changes the norm of the tensor."""
    one = {"w": torch.tensor([3.0, 4.0, 1e-30]), "zero": torch.zeros(2), "nan": torch.tensor([1.0, math.nan])}
    two = {"w": torch.tensor([3.0, 4.5, 1e-3]), "zero": torch.ones(2), "nan": torch.tensor([2.0, math.nan])}
    save_values(tmp_path / "one", one)
    save_values(tmp_path / "two", two)
    report = diff_checkpoints(tmp_path / "one", tmp_path / "two", memory=8)  # an element of each at a time
    found = {difference.key: difference.relative_norm for difference in report.differences}
    expected = torch.linalg.vector_norm(one["w"].double() - two["w"].double()) / torch.linalg.vector_norm(
        one["w"].double()
    )
    assert found == {"w": pytest.approx(float(expected)), "zero": math.inf, "nan": math.inf}


def test_the_relative_norm_does_not_depend_on_the_memory(tmp_path: Path) -> None:
    """Elements within the tolerance count, whether or not they are read with one that differs by more."""
    save_values(tmp_path / "one", {"w": torch.tensor([1.0, 1.0, 1.0])})
    save_values(tmp_path / "two", {"w": torch.tensor([1.5, 1.5, 3.0])})
    norms = set()
    for memory in (8, 1 << 20):
        (found,) = diff_checkpoints(tmp_path / "one", tmp_path / "two", atol=0.6, memory=memory).differences
        norms.add(round(found.relative_norm or 0.0, 6))
    assert norms == {round((4.5 / 3) ** 0.5, 6)}


def test_differences_of_large_integers_are_exact(tmp_path: Path) -> None:
    """Integers above 2^53 that differ by one have a difference of one, not of zero, also across dtypes."""
    save_values(tmp_path / "one", {"w": torch.tensor([2**62 + 1, -(2**60)])})
    save_values(tmp_path / "two", {"w": torch.tensor([2**62, -(2**60) + 3])})
    (found,) = diff_checkpoints(tmp_path / "one", tmp_path / "two").differences
    assert (found.different, found.max_absolute) == (2, 3.0)
    save_values(tmp_path / "small", {"w": torch.tensor([7, 7], dtype=torch.int32)})
    (found,) = diff_checkpoints(tmp_path / "small", tmp_path / "two").differences
    assert (found.kind, found.max_absolute) == ("dtype", float(2**62))


def test_names_of_another_library_by_a_mapping(tmp_path: Path) -> None:
    """A tensor of all experts is compared with those of a checkpoint with one for each, as Hugging Face names them."""
    experts = torch.arange(4.0 * 6 * 8).view(4, 6, 8)
    mapping = find_mapping("qwen3_moe")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    save_values(tmp_path / "one", {f"model.{key}": experts, "optimizer.step": torch.ones(1)})
    parts = {
        entry.name: experts[entry.box.within(Box((0, 0, 0), (4, 6, 8)))].view(entry.folder_box.shape)
        for entry in mapping.links(key, (4, 6, 8))
    }
    assert len(parts) == 8
    save_values(tmp_path / "hf", parts, "torch_dist")
    assert diff_checkpoints(tmp_path / "one", tmp_path / "hf", mapping=mapping, prefix="model.").are_same
    experts[2, 4, 1] += 1
    save_values(tmp_path / "two", {f"model.{key}": experts})
    (found,) = diff_checkpoints(tmp_path / "two", tmp_path / "hf", mapping=mapping, prefix="model.").differences
    assert (found.key, found.different, found.index) == (f"model.{key}", 1, (2, 4, 1))


def test_folders_of_the_hub_and_files_are_compared(tmp_path: Path) -> None:
    """A Hugging Face folder and a file of torch.save have the tensors of the checkpoint that they were made of."""
    values = {f"model.{key}": value for key, value in _values().items()}
    save_values(tmp_path / "one", values)
    export_to_huggingface(tmp_path / "one", tmp_path / "hf")
    torch.save(values | {"model.nan": torch.zeros(2)}, tmp_path / "two.pt")
    assert diff_checkpoints(tmp_path / "one", tmp_path / "hf").equal == len(values)
    (found,) = diff_checkpoints(tmp_path / "two.pt", tmp_path / "one").differences
    assert (found.key, found.different, found.max_absolute) == ("model.nan", 2, math.inf)


def test_a_file_of_torch_save_differs_from_dcp_in_its_values_alone(tmp_path: Path) -> None:
    """The nesting of a state dict in a file is no value: with the same values, plain DCP's directory is equal to it."""
    state = {"model": {"w": torch.ones(3)}, "step": 5}
    torch.save(state, tmp_path / "file.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert diff_checkpoints(tmp_path / "dcp", tmp_path / "file.pt").are_same
    torch.save({**state, "step": 6}, tmp_path / "file.pt")
    assert not diff_checkpoints(tmp_path / "dcp", tmp_path / "file.pt").are_same


def test_the_verb_exits_with_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 is the same, 1 different, 2 an error: scripts rely on it. JSON has no infinity."""
    save_values(tmp_path / "one", _values())
    save_values(tmp_path / "two", _values() | {"nan": torch.zeros(2)})
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert main(["diff", one, one]) == 0
    assert "5 of 5 tensors are equal" in capsys.readouterr().out
    assert main(["diff", one, two]) == 1
    assert "all 2" in capsys.readouterr().out
    assert main(["diff", one, two, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["equal"], found["differences"][0]["max_absolute"]) == (False, 4, "inf")
    assert main(["diff", one, str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def _save_objects(path: Path, backend: str, args: dict[str, object], seed: int, step: int = 3) -> None:
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(2)),
        "rng": ShardedObject("rng", {"seed": seed, "nan": math.nan, "state": torch.arange(3)}, (1,), (0,)),
        "args": args,
        "step": step,
    }
    dist_checkpointing.save(state, path, backend)


def test_objects_and_common_state_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another seed, another type and an entry of one alone are found, at their places, between formats; NaN is NaN."""
    _save_objects(tmp_path / "one", "torch_dist", {"lr": 1.0, "names": ["a", "b"]}, 1)
    _save_objects(tmp_path / "same", "safetensors", {"lr": 1.0, "names": ["a", "b"]}, 1)
    _save_objects(tmp_path / "two", "safetensors", {"lr": 1, "names": ["a"], "new": None}, 2)
    one, two = tmp_path / "one", tmp_path / "two"
    report = diff_checkpoints(one, tmp_path / "same")
    assert report.are_same
    assert report.objects is not None
    assert report.objects.equal == 3
    found = diff_checkpoints(one, two).objects
    assert found is not None
    assert [(each.key, each.kind) for each in found.differences] == [
        ("common['args']['lr']", "type"),
        ("common['args']['names'][1]", "only in first"),
        ("common['args']['new']", "only in second"),
        ("rng/shard_0_1['seed']", "value"),
    ]
    assert found.differences[0][2:] == ("float 1.0", "int 1")
    assert main(["diff", str(one), str(two)]) == 1
    assert "rng/shard_0_1['seed']" in capsys.readouterr().out
    assert main(["diff", str(one), str(two), "--tensors-only"]) == 0
    assert main(["diff", str(one), str(two), "--json"]) == 1


def test_objects_for_other_libraries_are_compared_where_both_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of PlainObjects differ, with equal tensors; one that one alone has is no difference, and said."""
    for name, lr in (("one", 0.1), ("same", 0.1), ("two", 0.2)):
        weight = ShardedTensor.from_rank_offsets("w", torch.ones(3))
        rate = PlainObject("lr", lr, keys=("optim.w.lr", "optim.b.lr"))
        state = {"w": weight, "rate": rate, "betas": PlainObject("optim.betas", [0.9, 0.95])}
        dist_checkpointing.save(state, tmp_path / name, fingerprints=True)
    convert_checkpoint(tmp_path / "one", tmp_path / "three", "safetensors")
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    assert main(["diff", one, str(tmp_path / "same")]) == 0
    found = diff_checkpoints(one, two).objects
    assert found is not None
    assert found.different_plain == ("optim.b.lr",)  # one value at two keys
    assert main(["diff", one, two]) == 1
    assert "1 value differs\ndifferent: 1 object for readers of other libraries: optim.b.lr" in capsys.readouterr().out
    assert main(["diff", one, three]) == 0
    assert "not compared: 3 objects for readers of other libraries" in capsys.readouterr().out
    dcp.save({"w": torch.ones(3), "step": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert_checkpoint(tmp_path / "dcp", tmp_path / "converted", "torch_dist")
    assert main(["diff", str(tmp_path / "dcp"), str(tmp_path / "converted")]) == 0
    assert "not compared" not in capsys.readouterr().out  # the common state of the folder has the value


def test_an_option_without_its_other_is_an_error_with_fingerprints_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--cut-vocabulary`` without ``--mapping`` is refused also where stored fingerprints tell that all is equal."""
    save_values(tmp_path / "one", _values(), fingerprints=True)
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "one"), "--cut-vocabulary"]) == 2
    assert "mapping" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["torch_dist", "safetensors"])
def test_an_object_is_the_value_of_its_key_in_a_file_of_torch_save(tmp_path: Path, backend: str) -> None:
    """What ``convert --to torch`` wrote equals its source, objects included, whichever comes first."""
    for name, rate in (("one", 0.5), ("two", 0.25)):
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 3}
        groups = {"lr": rate, "betas": (0.9, 0.99)}
        dist_checkpointing.save(
            {**state, "groups": ShardedObject("groups", groups, (1,), (0,))}, tmp_path / name, backend
        )
    convert_checkpoint(tmp_path / "one", tmp_path / "one.pt", "torch")
    assert diff_checkpoints(tmp_path / "one", tmp_path / "one.pt").are_same
    assert diff_checkpoints(tmp_path / "one.pt", tmp_path / "one").are_same
    found = diff_checkpoints(tmp_path / "two", tmp_path / "one.pt").objects
    assert found is not None
    assert [each.key for each in found.differences] == ["common['groups']['lr']"]


@table("backend", ["torch_dist", "safetensors"])
def test_a_tensor_in_an_object_is_that_of_its_key_in_a_file(tmp_path: Path, backend: str) -> None:
    """What ``convert --to torch`` wrote equals its source where objects have tensors; so does what is made of it."""
    for name, shift in (("one", 0), ("two", 1)):
        groups = {"lr": 0.5, "t": torch.arange(4) + shift, "list": [torch.ones(2), 3], "all": {"a": [torch.ones(1)]}}
        objects = {"groups": groups, "whole": torch.ones(3 + shift), "rng": [torch.ones(3)]}
        state = {key: ShardedObject(key, value, (1,), (0,)) for key, value in objects.items()}
        many = {f"part.{rank}": ShardedObject("many", torch.ones(2), (2,), (rank,)) for rank in range(2)}
        w = ShardedTensor.from_rank_offsets("w", torch.ones(2))
        dist_checkpointing.save({"w": w, "seen": torch.ones(2), **state, **many}, tmp_path / name, backend)
    convert_checkpoint(tmp_path / "one", tmp_path / "one.pt", "torch")
    convert_checkpoint(tmp_path / "one.pt", tmp_path / "again", backend)
    for converted in ("one.pt", "again"):
        for places in (("one", converted), (converted, "one")):
            report = diff_checkpoints(*(tmp_path / place for place in places))
            assert report.are_same, report
        for places, turn in ((("two", converted), 1), ((converted, "two"), -1)):
            report = diff_checkpoints(*(tmp_path / place for place in places))
            assert report.differences == ()
            assert report.objects is not None
            assert [(each.key, each.kind, each[2:][::turn]) for each in report.objects.differences] == [
                ("common['groups']['t']", "value", ("tensor int64 [4]", "tensor int64 [4]")),
                ("whole/shard_0_1", "value", ("tensor float32 [4]", "tensor float32 [3]")),
            ]


def test_each_tensor_of_an_object_is_compared(tmp_path: Path) -> None:
    """One by two names is that of both in the file; of two by one name, the second is not lost."""
    shared = {"m": torch.ones(2)}
    for name, value in (("twice", {"x": shared, "y": shared}), ("clash", {0: torch.zeros(3), "0": torch.ones(3)})):
        state = {"o": ShardedObject("o", value, (1,), (0,)), "w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
        dist_checkpointing.save(state, tmp_path / name)
    convert_checkpoint(tmp_path / "twice", tmp_path / "twice.pt", "torch")
    assert diff_checkpoints(tmp_path / "twice", tmp_path / "twice.pt").are_same
    torch.save({"w": torch.ones(2), "o": {"0": torch.zeros(3)}}, tmp_path / "clash.pt")
    assert not diff_checkpoints(tmp_path / "clash", tmp_path / "clash.pt").are_same


def test_a_long_list_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a random generator's 600 numbers one row says how many differ; --verbose and JSON have all.

    A list with few differences, and a value behind brackets in a name, have a row each; a list of lists has one.
    """
    for name, shift in (("one", 0), ("two", 1)):
        state = [0, *range(1 + shift, 600 + shift)]
        groups = [{"lr": number + shift, "few": [1, 2 + shift]} for number in range(20)]
        args: dict[str, object] = {"rng": (3, state), "few": [1, 2, 3 + shift], "a[0]": shift, "groups": groups}
        _save_objects(tmp_path / name, "safetensors", args, 1)
    call = ["diff", str(tmp_path / "one"), str(tmp_path / "two")]
    assert main(call) == 1
    said = capsys.readouterr().out
    assert [line.split(maxsplit=1) for line in said.splitlines() if line.startswith("common")] == [
        ["common['args']['rng'][1]", "599 of 600 places  -      -"],
        ["common['args']['few'][2]", "value              int 3  int 4"],
        ["common['args']['a[0]']", "value              int 0  int 1"],
        ["common['args']['groups']", "20 of 20 places    -      -"],
    ]
    assert "entries are equal, 641 values differ" in said
    assert "--verbose lists each value; --tensors-only leaves out objects and common state" in said
    assert main([*call, "--verbose"]) == 1
    said = capsys.readouterr().out
    assert said.count("common['args']['rng'][1]") == 599
    assert "--verbose" not in said
    assert main([*call, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["objects"]["differences"]) == 641


def test_values_that_are_not_numbers_are_equal_in_any_class(tmp_path: Path) -> None:
    """NaN equals NaN in an array, a scalar of numpy and a complex number; other bits in an array are a difference."""
    values = {"array": np.array([1.0, math.nan]), "scalar": np.float32(math.nan), "number": complex(math.nan, 1)}
    for name, last in (("one", math.nan), ("same", math.nan), ("other", 2.0)):
        _save_objects(tmp_path / name, "safetensors", {**values, "last": np.array([last])}, 1)
    assert diff_checkpoints(tmp_path / "one", tmp_path / "same").are_same
    found = diff_checkpoints(tmp_path / "one", tmp_path / "other").objects
    assert found is not None
    assert [each.key for each in found.differences] == ["common['args']['last']"]


def test_values_that_hold_one_twice_are_compared_once(tmp_path: Path) -> None:
    """Files of a few hundred bytes that name 2^60 places are compared, and shown, like any others."""
    for name, value in (("one", 1), ("same", 1), ("other", 2)):
        nest: Any = (value,)
        for _ in range(60):
            nest = (nest, nest)
        torch.save({"w": torch.ones(2), "nest": nest, name: OrderedDict(nest=nest)}, tmp_path / name)
    first = diff_checkpoints(tmp_path / "one", tmp_path / "same").objects
    second = diff_checkpoints(tmp_path / "one", tmp_path / "other").objects
    assert first is not None
    assert second is not None
    assert [(each.key, each.kind) for each in first.differences] == [
        ("common['one']", "only in first"),
        ("common['same']", "only in second"),
    ]
    assert second.differences[0].key == f"common['nest']{'[0]' * 61}"
    assert len(second.differences) == 3


class _Unknown:
    """A class that no load accepts unasked."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unknown)

    __hash__ = object.__hash__


def test_objects_of_unknown_classes_are_not_unpickled(tmp_path: Path) -> None:
    """A comparison runs no code of a checkpoint: an unknown class is an error, unless the caller allows it."""
    shard = ShardedObject("thing", _Unknown(), (1,), (0,))
    dist_checkpointing.save({"thing": shard}, tmp_path / "one", "torch_dist", allow_globals=[_Unknown])
    with pytest.raises(CheckpointingException, match="_Unknown"):
        diff_checkpoints(tmp_path / "one", tmp_path / "one")
    assert diff_checkpoints(tmp_path / "one", tmp_path / "one", allow_globals=(_Unknown,)).are_same
    # each checkpoint is read with all of an iterator
    assert diff_checkpoints(tmp_path / "one", tmp_path / "one", allow_globals=iter([_Unknown])).are_same  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="allow_globals: the class _Unknown where a list"):
        diff_checkpoints(tmp_path / "one", tmp_path / "one", allow_globals=_Unknown)  # type: ignore[arg-type]


def test_a_tolerance_that_is_none_is_an_error(tmp_path: Path) -> None:
    """A negative tolerance, or NaN, would make everything different: it is refused before anything is read."""
    for tolerance in (-1.0, math.nan, "1e-3", None):
        with pytest.raises(CheckpointingException, match=r"rtol=.*: (.* not negative|expected a number)"):
            diff_checkpoints(tmp_path, tmp_path, rtol=tolerance)  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="memory=0: expected a number of bytes"):
        diff_checkpoints(tmp_path, tmp_path, memory=0)


def test_memory_is_a_size_as_other_budgets_are(tmp_path: Path) -> None:
    """Text such as 1MiB is bytes of values, of a comparison and of weights."""
    save_values(tmp_path / "one", _values())
    assert diff_checkpoints(tmp_path / "one", tmp_path / "one", read_values=True, memory="1MiB").are_same
    with dist_checkpointing.open_checkpoint(tmp_path / "one") as checkpoint:
        assert dict(checkpoint.weights(memory="1MiB")).keys() == _values().keys()


def test_names_that_begin_otherwise_are_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where only the beginnings of names differ, the call that compares has the renames; it finds them equal."""
    for name, (model, optimizer) in {"old": ("app.model", "app.optim"), "new": ("model", "optimizer")}.items():
        save_values(tmp_path / name, {f"{model}.0.w": torch.ones(3), f"{optimizer}.state.0.w": torch.zeros(3)})
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    call = f"shardckpt diff {old} {new} --rename app.model=model --rename app.optim=optimizer"
    given = ["--rtol", "0.1", "--read", "--ignore-dtype", "--tensors-only"]
    assert main(["diff", old, new]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"`{call}`")
    assert main(["diff", old, new, *given]) == 1  # what was given stays
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"`{call} {' '.join(given)}`")
    assert main(call.split()[1:]) == 0
    capsys.readouterr()
    save_values(tmp_path / "other", {"x": torch.ones(3)})
    assert main(["diff", old, str(tmp_path / "other")]) == 1
    assert "(the first has app.model.0.w, the second x): --rename OLD=NEW" in capsys.readouterr().out
    save_values(tmp_path / "foreign", {"grid.w": torch.ones(5, 2)})  # an end alike, of another shape: no rename
    assert main(["diff", old, str(tmp_path / "foreign")]) == 1
    assert "--rename OLD=NEW" in capsys.readouterr().out


def test_an_optimizer_that_an_export_leaves_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After an export by a mapping the model is compared: exit code 0, and a line counts the optimizer's state."""
    save_values(tmp_path / "c", {"model.w": torch.ones(3), "optimizer.state.w": torch.zeros(3)})
    (tmp_path / "rules.json").write_text('{"model.w": "w"}')
    options = ["--mapping", str(tmp_path / "rules.json")]
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "hf"), "--prefix", "", *options]) == 0
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "c"), str(tmp_path / "hf"), *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not compared: 1 tensor of the optimizer's state"
    assert main(["diff", str(tmp_path / "c"), str(tmp_path / "hf")]) == 1


def test_megatrons_names_beside_the_hubs_are_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where one checkpoint has Megatron's names and one the Hub's, the call with the mapping is said, in its order."""
    for name, keys in {
        "m": ("embedding.word_embeddings", "output_layer"),
        "hub": ("model.embed_tokens", "lm_head"),
    }.items():
        save_values(tmp_path / name, {f"{key}.weight": torch.ones(3, 2) for key in keys})
    megatron, hub = str(tmp_path / "m"), str(tmp_path / "hub")
    for places in ((megatron, hub), (hub, megatron)):
        assert main(["diff", *places, "--tensors-only"]) == 1
        assert f"`shardckpt diff {megatron} {hub} --mapping megatron`" in capsys.readouterr().out.splitlines()[-1]


@table("optimizer", [False, True])
def test_names_that_lack_a_prefix_are_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: bool
) -> None:
    """Where no name is in both, but those of one are in the other behind a prefix, the call that compares is said.

    The optimizer's state, which has the names of the model behind a prefix of its own, is not meant.
    """
    tensors = {"a.w": torch.ones(3), "b.w": torch.zeros(3)}
    prefixes = ("model.", *(["optimizer.state.exp_avg."] if optimizer else []))
    save_values(tmp_path / "step", {f"{prefix}{key}": tensors[key] for prefix in prefixes for key in tensors})
    torch.save(tensors, tmp_path / "file.pt")
    step, file = str(tmp_path / "step"), str(tmp_path / "file.pt")
    call = f"shardckpt diff {step} {file} --prefix model."
    for places in ((step, file), (file, step)):
        assert main(["diff", *places, "--tensors-only"]) == 1
        assert capsys.readouterr().out.splitlines()[-1].endswith(f"`{call}`")
    assert main(call.split()[1:]) == 0
    capsys.readouterr()
    assert main(["diff", step, step, "--prefix", "model."]) == 1
    assert "without --prefix model., 2 tensors" in capsys.readouterr().out


def test_tensors_of_one_checkpoint_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of many tensors that only one has ten are rows and the others a count, before the hint; --verbose shows all."""
    for name in ("old", "new"):
        keys = [f"{name}.layers.{number}.weight" for number in range(30)]
        save_values(tmp_path / name, dict.fromkeys(keys, torch.ones(2)))
    call = ["diff", str(tmp_path / "old"), str(tmp_path / "new")]
    assert main(call) == 1
    lines = capsys.readouterr().out.splitlines()
    for number, side in enumerate(("first", "second")):
        assert sum(f"only in {side}" in line for line in lines) == 10 + 1
        assert f"... and 20 more only in {side}: --verbose or --json lists them" == lines[22 + number], lines
    assert "--rename old=new" in lines[-1]
    assert main([*call, "--verbose"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [sum(f"only in {side}" in line for line in lines) for side in ("first", "second")] == [30, 30]


class Caller(NamedTuple):
    """As megatron.core.rerun_state_machine has it: keys of a dict are of it."""

    message: str
    rank: int


class Config:
    """A class that a load does not import."""

    def __init__(self, lr: float) -> None:
        self.lr, self.losses = lr, torch.full((2,), math.nan)


def _save_as_megatron(path: Path, lr: float, count: int) -> None:
    args = argparse.Namespace(config=Config(lr), start=math.nan, tensor=torch.ones(3))
    state = {"args": args, "config": Config(lr), "counts": {Caller("loss", 0): count}}
    dist_checkpointing.save(state, path, "torch_dist")


def test_equal_stand_ins_are_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of classes that are not imported are compared by what is stored of them, and so are keys."""
    module = ModuleType("megatron")
    for cls in (Caller, Config):
        monkeypatch.setattr(cls, "__module__", "megatron")
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "megatron", module)
    for name, lr, count in (("a", 0.1, 3), ("b", 0.1, 3), ("c", 0.2, 4)):
        _save_as_megatron(tmp_path / name, lr, count)
    same = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert (same.objects.equal, same.objects.differences) == (3, ())
    other = diff_checkpoints(tmp_path / "a", tmp_path / "c").objects
    assert [(found.key, found.kind) for found in other.differences] == [
        ("common['args']", "value"),
        ("common['config']", "value"),
        ("common['counts'][<stub for megatron.Caller('loss', 0)>]", "value"),
    ]
