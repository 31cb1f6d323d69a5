from __future__ import annotations

import argparse
import enum
import io
import json
import math
import types
import zipfile
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, ShardingError, UnsafePickleError
from shardckpt.huggingface import TorchFile
from shardckpt.maintenance import convert_checkpoint, verify_checkpoint
from shardckpt.maintenance.sources import open_any
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.tensors import tensor_bytes
from shardckpt.testing.tensors import DTYPES
from tests.interop.sample import check_equal
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def make_state_dict() -> dict[str, Any]:
    """A module and its optimizer as torch's state_dict() has them, with strided, lazy, shared and empty tensors."""
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    model = OrderedDict(w=base, t=base.T, cut=base[1:5, 2:7], row=base[2], zero=torch.zeros(0, 3), one=torch.tensor(4))
    model["wave"] = torch.tensor([1 + 2j, 3 - 1j]).conj()
    moments = {number: {"exp_avg": torch.full((3,), float(number)), "step": torch.tensor(2.0)} for number in range(2)}
    groups = [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0, 1]}]
    pair = (1, torch.ones(2), [torch.zeros(1), {"a": torch.ones(1)}])
    return {
        "model": model,
        "optim": {"state": moments, "param_groups": groups},
        "step": 7,
        "names": ["a"],
        "pair": pair,
    }


@table("legacy", [False, True], ids=["zip", "legacy"])
def test_a_file_goes_to_a_checkpoint_and_back(tmp_path: Path, legacy: bool) -> None:
    """The state dict of a file, whatever its strides and containers, comes back from a checkpoint as it was."""
    state = make_state_dict()
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    there = convert_checkpoint(tmp_path / "a.pt", tmp_path / "there", "safetensors")
    assert (there.old, there.tensors, there.left_out) == (("torch_save", 1), 11, ())
    with dc.open_checkpoint(tmp_path / "there") as stored:
        assert torch.equal(stored["model.t"][2:4].contiguous(), state["model"]["t"][2:4])
        assert stored.common["step"] == 7
    back = convert_checkpoint(tmp_path / "there", tmp_path / "b.pt", "torch")
    for mmap in (False, True):
        check_equal(torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap), state, "state")
    again = convert_checkpoint(tmp_path / "b.pt", tmp_path / "c.pt", "torch")
    prints = [[(t.key, t.before, t.after) for t in report.proof] for report in (there, back, again)]
    assert sorted(prints[0]) == sorted(prints[1]) == sorted(prints[2])
    assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "c.pt").read_bytes()


def test_plain_dcp_becomes_the_file_of_torchs_converter(tmp_path: Path) -> None:
    """What `dcp.save` flattened is nested in the file as in torch's `dcp_to_torch_save`'s, with casts, too."""
    state = make_state_dict() | {"lists": [torch.ones(1), {"seed": 5}], "top.level": torch.ones(2)}
    del state["pair"]
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "torch.pt")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "a.pt", "torch")
    expected = torch.load(tmp_path / "torch.pt", weights_only=True)
    check_equal(torch.load(tmp_path / "a.pt", weights_only=True), expected, "state")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "b.pt", "torch", dtype="bfloat16", leave_out=["optim", "model.w"])
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found.keys() == expected.keys() - {"optim"}
    assert found["model"].keys() == expected["model"].keys() - {"w"}
    check_equal(found["lists"], [torch.ones(1).bfloat16(), {"seed": 5}], "lists")


def test_stock_dcp_finds_the_values_of_a_file(tmp_path: Path) -> None:
    """`--to dcp` stores tensors and plain values by their paths: stock `dcp.load` fills the nested state dict."""
    state = make_state_dict()
    torch.save(state, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "dcp", "dcp")
    wanted = {"model": {"w": torch.zeros(6, 8)}, "step": 0, "names": [], "optim": {"param_groups": [{"lr": 0.0}]}}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(wanted["model"]["w"], state["model"]["w"])  # type: ignore[index, call-overload]
    assert (wanted["step"], wanted["names"]) == (7, ["a"])
    assert wanted["optim"]["param_groups"][0]["lr"] == 0.5  # type: ignore[index, call-overload]


def test_lists_and_tuples_are_found_as_dcp_flattens_them(tmp_path: Path) -> None:
    """A list of plain lists, and a tuple, are one value each to DCP; a list with a dict, a list or a tensor is not."""
    state = {"w": torch.ones(2), "ranges": [[1, 2], [3]], "pair": (0.9, {"x": 1}), "mixed": [[{"y": 2}], [4], 5]}
    torch.save(state, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "dcp", "dcp")
    wanted = {"w": torch.zeros(2), "ranges": [], "pair": (), "mixed": [[{"y": 0}], [0], 0]}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    check_equal(wanted, state, "state")


def test_tensors_in_containers_of_any_class_are_read(tmp_path: Path) -> None:
    """A file's namespaces, deques and tuples come into a checkpoint with the tensors in them, classes and all."""
    tensor = torch.arange(3.0)
    state = {
        "w": tensor,
        "args": argparse.Namespace(mean=tensor),
        "other": types.SimpleNamespace(deep=[{"mean": tensor}]),
        "recent": deque([tensor], 4),
        "pair": (OrderedDict(a=tensor), tensor),
    }
    torch.save(state, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "there", "safetensors")
    common = dc.load_common_state_dict(tmp_path / "there")
    assert common["recent"].maxlen == 4
    assert type(common["pair"][0]) is OrderedDict
    found = common["args"].mean, common["other"].deep[0]["mean"], common["recent"][0], *common["pair"][0].values()
    assert all(value.equal(tensor) for value in (*found, common["pair"][1]))


def test_tensors_that_are_keys_and_in_sets_are_read(tmp_path: Path) -> None:
    """Dicts by tensors in a container of a file come with their keys, and sets without the loss of an item."""
    first, second = torch.arange(3.0), torch.ones(2)
    nest = (Counter({(first, "a"): 0}), {7: "plain", first: second}, {first, first.detach()})
    torch.save({"w": first, "nest": nest}, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "there", "torch_dist")
    counts, values, items = dc.load_common_state_dict(tmp_path / "there")["nest"]
    ((pair, count),) = counts.items()
    assert (pair[0].tolist(), pair[1], count) == ([0, 1, 2], "a", 0)
    (seven, plain), (key, value) = values.items()
    assert (seven, plain, key.tolist(), value.tolist()) == (7, "plain", [0, 1, 2], [1, 1])
    assert [item.tolist() for item in items] == [[0, 1, 2]] * 2


class Pair(NamedTuple):
    """A named tuple of a user's."""

    mean: torch.Tensor
    count: int


class Named(tuple[Any, ...]):  # noqa: SLOT001 - it has attributes
    """A tuple with a constructor of its own, and an attribute."""

    def __new__(cls, first: torch.Tensor, second: int) -> Self:
        """Make it of two items."""
        return super().__new__(cls, (first, second))

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Give a pickle both."""
        return tuple(self)


@dataclass(frozen=True, slots=True)
class Slotted:
    """An object without a ``__dict__``."""

    mean: torch.Tensor


def test_tensors_in_objects_that_the_user_allows_are_read(tmp_path: Path) -> None:
    """Named tuples, others with items or attributes, and objects with slots come with the tensors in them."""
    tensor, allowed = torch.arange(3.0), (Pair, Slotted, Named)
    named = Named(tensor, 1)
    named.more = [tensor]
    torch.save({"w": tensor, "pair": [Pair(tensor, 2)], "slotted": Slotted(tensor), "named": named}, tmp_path / "a.pt")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "there", "torch_dist", allow_globals=allowed)
    common = dc.load_common_state_dict(tmp_path / "there", allow_globals=allowed)
    (pair,), slotted = common["pair"], common["slotted"]
    assert (type(pair), pair.count, type(slotted)) == (Pair, 2, Slotted)
    assert type(common["named"]) is Named
    found = pair.mean, slotted.mean, common["named"][0], common["named"].more[0]
    assert all(value.equal(tensor) for value in found)


def test_files_of_one_model_may_share_a_dict(tmp_path: Path) -> None:
    """Dicts of one name in two files of an index are joined; two values that differ are an error by their name."""
    folder = tmp_path / "hub"
    folder.mkdir()
    for name in "ab":
        torch.save(
            {"model": {name: torch.ones(1)}, "format": "pt", "sizes": [1, (2, math.nan)]}, folder / f"{name}.bin"
        )
    index = {"weight_map": {f"model.{name}": f"{name}.bin" for name in "ab"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    convert_checkpoint(folder, tmp_path / "new", "dcp")
    convert_checkpoint(tmp_path / "new", tmp_path / "new.pt", "torch")
    state_dict = torch.load(tmp_path / "new.pt")
    assert (state_dict["model"].keys(), state_dict["format"]) == ({"a", "b"}, "pt")
    torch.save({"model": {"b": torch.ones(1)}, "format": "tf"}, folder / "b.bin")
    with pytest.raises(CheckpointingException, match=r"b\.bin: format is another value in an earlier file"):
        convert_checkpoint(folder, tmp_path / "other", "dcp")


def test_tuples_that_hold_one_twice_are_visited_once(tmp_path: Path) -> None:
    """A file of a few hundred bytes that names 2^60 places is opened and checked like any other."""
    value: Any = (torch.ones(2),)
    for _ in range(60):
        value = (value, value)
    torch.save({"w": torch.ones(3), "nest": value}, tmp_path / "a.pt")
    with open_any(tmp_path / "a.pt") as checkpoint:
        assert list(checkpoint) == ["w"]
        found = checkpoint.common["nest"]
    while isinstance(found, tuple):
        found = found[0]
    assert found.equal(torch.ones(2))
    assert [result.fault for result in verify_checkpoint(tmp_path / "a.pt")] == [""]


def test_every_dtype_is_written_as_torch_reads_it(tmp_path: Path) -> None:
    """torch.load, with memory-mapping too, reads tensors of all dtypes bit for bit; their bytes are aligned."""
    values = {f"{dtype}": torch.randint(0, 2, (3, 16), dtype=torch.uint8).view(dtype) for dtype in DTYPES}
    dc.save(entire(values), tmp_path / "old")
    convert_checkpoint(tmp_path / "old", tmp_path / "a.pt", "torch")
    for mmap in (False, True):
        found = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
        assert found.keys() == values.keys()
        for key, value in values.items():
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
            assert tensor_bytes(found[key]) == tensor_bytes(value), key
            assert not mmap or found[key].data_ptr() % 64 == 0
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert len(archive.namelist()) == len(values) + 3


class Color(enum.Enum):
    """A class of the user's."""

    RED = 2


def test_a_name_that_utf8_has_not_is_written(tmp_path: Path) -> None:
    """A large file, whose writing may be continued, takes a lone surrogate in a key as a small one does."""
    for name, count in (("small", 2), ("large", 1 << 20)):
        values = torch.ones(count, dtype=torch.uint8)
        dc.save({"w": ShardedTensor.from_rank_offsets("w\udc80", values)}, tmp_path / name, "torch_dist")
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}.pt", "torch")
        assert torch.load(tmp_path / f"{name}.pt")["w\udc80"].equal(values)


def test_other_classes_become_builtin_ones(tmp_path: Path) -> None:
    """Values of other classes are written as builtin types, and listed; what has no counterpart is an error."""
    common = {"args": argparse.Namespace(lr=0.5, shape=torch.Size([2])), "rate": np.float64(1.5), "rng": np.arange(3)}
    state = {
        **common,
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(3)),
        "extra": ShardedObject("extra", io.BytesIO(b"bytes"), (1,), (0,)),
    }
    dc.save(state, tmp_path / "old")
    report = convert_checkpoint(tmp_path / "old", tmp_path / "a.pt", "torch")
    assert report.rewritten.keys() == {"args", "rate", "rng", "extra"}
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found["args"] == {"lr": 0.5, "shape": torch.Size([2])}
    assert (found["rate"], found["rng"].tolist(), found["extra"]) == (1.5, [0, 1, 2], b"bytes")
    with pytest.raises(CheckpointingException, match=r"a\.pt exists.*--overwrite"):
        convert_checkpoint(tmp_path / "old", tmp_path / "a.pt", "torch")
    convert_checkpoint(tmp_path / "old", tmp_path / "a.pt", "torch", overwrite=True, leave_out=["extra", "args"])
    assert torch.load(tmp_path / "a.pt", weights_only=True).keys() == {"w", "rate", "rng"}
    with pytest.raises(ShardingError, match=r"a\.b\.1 is a .*object.*--leave-out"):
        TorchFile({}).write(tmp_path / "b.pt", {"a": {"b": [Color.RED, object()]}}, lambda _: None)
    assert not (tmp_path / "b.pt").exists()


def test_arrays_of_other_bytes_than_torchs_are_written_or_refused(tmp_path: Path) -> None:
    """Big-endian arrays are written with their values; long doubles, which torch has none of, are a clear error."""
    state = {"big": np.arange(3, dtype=">f4"), "strided": np.arange(6)[::-2]}
    TorchFile({}).write(tmp_path / "a.pt", state, lambda _: None)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (found["big"].tolist(), found["strided"].tolist()) == ([0, 1, 2], [5, 3, 1])
    for value in (np.ones(2, dtype=np.longdouble), np.longdouble(1)):
        with pytest.raises(ShardingError, match=r"a is a numpy\..*, which has no counterpart"):
            TorchFile({}).write(tmp_path / "b.pt", {"a": value}, lambda _: None)


def test_what_holds_itself_or_loses_a_key_is_refused(tmp_path: Path) -> None:
    """A value that holds itself, and keys or elements that a file would have as one, are errors that name the place."""
    ring: dict[str, Any] = {"one": 1}
    ring["self"] = [ring]
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value, what in (
        (ring, r"a\.self\.0 is a dict that holds itself: .*--leave-out"),
        (deep, "a is nested too deep"),
        ({2: "int", Color.RED: "enum"}, r"a has 2 and <Color\.RED: 2>, which a file both has as 2"),
        ({Color.RED, 2}, "a has .*, which a file both has as 2"),
        ({frozenset((1,)): 1}, r"a has frozenset\(\{1\}\), of which a file has a set, which is no key"),
    ):
        with pytest.raises(ShardingError, match=what):
            TorchFile({}).write(tmp_path / "a.pt", {"a": value}, lambda _: None)
    assert not (tmp_path / "a.pt").exists()
    pair = [1]
    TorchFile({}).write(tmp_path / "b.pt", {"a": {"x": pair, "y": pair}, "b": {1.5, None}}, lambda _: None)
    assert torch.load(tmp_path / "b.pt", weights_only=True) == {"a": {"x": [1], "y": [1]}, "b": {1.5, None}}


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    """A file that names a class outside the allow-list is refused by its name; so is one of something else."""
    torch.save({"w": torch.ones(2), "module": torch.nn.Linear(2, 2)}, tmp_path / "a.pt")
    with pytest.raises(UnsafePickleError, match=r"a\.pt.*torch\.nn\.modules\.linear.*Linear"):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "new", "safetensors")
    torch.save(torch.ones(2), tmp_path / "b.pt")
    with pytest.raises(CheckpointingException, match=r"b\.pt holds a tensor, not a state dict"):
        convert_checkpoint(tmp_path / "b.pt", tmp_path / "new", "safetensors")
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}, tmp_path / "c.pt")
    with pytest.raises(ShardingError, match=r"two tensors whose paths, joined by dots, are 'a\.b'"):
        convert_checkpoint(tmp_path / "c.pt", tmp_path / "new", "safetensors")
    torch.save({"w": torch.ones(1).expand(1 << 20, 2)}, tmp_path / "d.pt")
    with pytest.raises(CorruptCheckpointError, match="has only 4 bytes"):
        convert_checkpoint(tmp_path / "d.pt", tmp_path / "new", "safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt", "c.pt", "d.pt"]
