from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shardckpt import ShardedTensor, dist_checkpointing
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.huggingface import (
    export_to_huggingface,
    get_dtype_size,
    get_shard_info,
    load_from_huggingface,
    save_state_dict,
)
from shardckpt.huggingface.names import file_names
from shardckpt.maintenance import convert_checkpoint, merge_checkpoints
from shardckpt.storage import parse_size
from tests.huggingface.samples import same
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@table(
    ("dtype", "nbytes"),
    [
        (torch.float64, 8),
        (torch.complex128, 16),
        (torch.complex64, 8),
        (torch.uint16, 2),
        (torch.bool, 1),
        (torch.float8_e5m2fnuz, 1),
        (torch.float8_e8m0fnu, 1),
        (torch.float4_e2m1fn_x2, 1),
    ],
    ids=str,
)
def test_every_dtype_has_a_size(dtype: torch.dtype, nbytes: int) -> None:
    """An element's bytes, of packed dtypes the byte that holds two values: numel times it is what a tensor takes."""
    assert get_dtype_size(dtype) == nbytes
    assert torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).nbytes == 6


@table(("size", "nbytes"), [(7, 7), ("5GB", 5 * 10**9), ("2GiB", 2 << 30), ("500mb", 5 * 10**8), ("1.5 KB", 1500)])
def test_sizes_are_numbers_or_text(size: int | str, nbytes: int) -> None:
    """GB is 10^9 as on the hub, GiB is 2^30."""
    assert parse_size(size) == nbytes


def _state() -> dict[str, torch.Tensor]:
    """Tensors of 40 bytes to 4 kB, one tied and one a view of another."""
    large = torch.arange(1000.0)
    return {
        "a": torch.arange(10.0),
        "large": large,
        "b": torch.arange(20.0),
        "tied": large,
        "c": torch.arange(30.0),
        "d": torch.arange(10),
        "none": torch.zeros(0, 3),
    }


@table(
    ("limit", "files"),
    [
        (1, ["a", "large", "b", "tied", "c", "d", "none"]),
        (200, ["a", "large", "b", "tied", "c d none"]),
        (4080, ["a large", "b tied", "c d none"]),
        (4320, ["a large b tied c d none"]),
    ],
)
def test_names_of_one_file_follow_each_other(limit: int, files: list[str]) -> None:
    """Large and tied tensors keep their places; of tied ones in one file one counts, in two both."""
    state = _state()
    is_sharded, total, weight_map = get_shard_info(state, None, limit)
    assert is_sharded == (len(files) > 1)
    assert [*weight_map] == [*state]
    assert [" ".join(names) for _, names in itertools.groupby(weight_map, weight_map.__getitem__)] == files
    assert list(dict.fromkeys(weight_map.values())) == file_names(len(files), "safetensors")
    assert total == sum(t.nbytes for t in state.values()) - (4000 if len(files) == 1 else 0)


def test_nothing_is_one_file_of_nothing() -> None:
    """An empty state dict is no sharded one; empty tensors at the end are in the map."""
    assert get_shard_info({}) == (False, 0, {})
    assert get_shard_info({"z": torch.zeros(0)}) == (False, 0, {"z": "model.safetensors"})
    is_sharded, _, weight_map = get_shard_info({"a": torch.ones(2), "b": torch.ones(2), "z": torch.zeros(0)}, None, 8)
    assert is_sharded
    assert weight_map["z"] == "model-00002-of-00002.safetensors"


def test_a_cast_counts_for_floats_only() -> None:
    """Ints, bools and 8-bit floats keep their bytes; a view counts what it shows, a copy in another file too."""
    base = torch.zeros(100)
    state = {
        "f": torch.zeros(4, dtype=torch.float64),
        "i": torch.zeros(3, dtype=torch.int64),
        "b": torch.zeros(2, dtype=torch.bool),
        "e": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "v": base[10:12],
        "base": base,
        "again": base,
    }
    assert get_shard_info(state, "bfloat16")[1] == 8 + 24 + 2 + 5 + 4 + 200
    assert get_shard_info(state, "float8_e4m3fn")[1] == 4 + 24 + 2 + 5 + 2 + 100
    _, total, weight_map = get_shard_info(state, torch.float16, 100, safe_serialization=False)
    assert total == 443
    assert weight_map["again"] == "pytorch_model-00003-of-00003.bin"  # a copy: the file of base is full


@table(
    ("arguments", "text"),
    [
        ({"save_dtype": "bf17"}, "save_dtype='bf17'"),
        ({"save_dtype": torch.int8}, "save_dtype=torch.int8"),
        ({"save_dtype": "float4_e2m1fn_x2"}, "expected float64, float32, float16, bfloat16 or an 8-bit float"),
        ({"shard_size": "5 apples"}, "shard_size='5 apples'"),
        ({"shard_size": 0}, "above 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    """A dtype or a size that is none is an error that says what was given and what is expected."""
    with pytest.raises(CheckpointingException, match=text):
        get_shard_info({"a": torch.ones(1)}, **arguments)


def test_values_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    """An object among the weights is named, not written as something else."""
    with pytest.raises(CheckpointingException, match="'extra' is a int"):
        get_shard_info({"extra": 3})  # type: ignore[dict-item]
    with pytest.raises(CheckpointingException, match="'extra' is a int"):
        save_state_dict({"extra": 3}, tmp_path / "x")  # type: ignore[dict-item]


def _views() -> dict[str, torch.Tensor]:
    base = torch.arange(100.0)
    return {
        "slice": base[3:10],
        "transposed": base.view(10, 10).t(),
        "base": base,
        "tied": base,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "lazy": torch.tensor([1 + 2j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "expanded": torch.tensor([1.5]).expand(4),
    }


def test_a_file_has_what_views_show_and_tied_weights_once(tmp_path: Path) -> None:
    """Strided, lazy and shared tensors are written by value; of tied ones the first, the others named in the header."""
    state = _views()
    save_state_dict(state, tmp_path / "model.safetensors")
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys() - {"tied"}
    assert all(torch.equal(found[name], state[name]) for name in found)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "tied": "base"}
    data = (tmp_path / "model.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_bin_file_keeps_ties_and_no_more_than_it_shows(tmp_path: Path) -> None:
    """torch.load gives the values, tied weights in one memory; a small view does not bring its large base along."""
    state = _views()
    save_state_dict(state, tmp_path / "model.bin", safe_serialization=False)
    found = torch.load(tmp_path / "model.bin", weights_only=True)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert found["base"].data_ptr() == found["tied"].data_ptr()
    save_state_dict({"v": torch.zeros(1 << 20)[:4]}, tmp_path / "view.bin", safe_serialization=False)
    assert (tmp_path / "view.bin").stat().st_size < 4096


@table("safe", [True, False])
def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, safe: bool) -> None:
    """An error leaves the file that was there, and nothing beside it; a missing folder is made, as by a save."""
    save_state_dict({"a": torch.ones(2)}, tmp_path / "f", safe)
    before = (tmp_path / "f").read_bytes()
    with pytest.raises(ShardingError, match="'b' cannot be written"):
        save_state_dict({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}, tmp_path / "f", safe)
    assert (tmp_path / "f").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    save_state_dict({"a": torch.zeros(2)}, tmp_path / "f", safe)
    assert (tmp_path / "f").read_bytes() != before
    save_state_dict({"a": torch.zeros(2)}, tmp_path / "new" / "f", safe)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["f"]


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    """complex128 has no name in the format: an error that says so, and that .bin files hold it."""
    state = {"z": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(CheckpointingException, match=r"'z' \(torch.complex128\)"):
        save_state_dict(state, tmp_path / "f")
    save_state_dict(state, tmp_path / "f", safe_serialization=False)
    assert same(torch.load(tmp_path / "f", weights_only=True)["z"], state["z"])


def test_no_tensor_is_named_like_the_header_s_metadata(tmp_path: Path) -> None:
    """A tensor called __metadata__ would be lost in a safetensors file: refused by name, by the export too."""
    state = {"a": torch.ones(2), "__metadata__": torch.ones(2)}
    with pytest.raises(CheckpointingException, match="'__metadata__' cannot be a tensor's name"):
        save_state_dict(state, tmp_path / "f")
    dist_checkpointing.save(entire(state), tmp_path / "step-1")
    with pytest.raises(CheckpointingException, match="'__metadata__' cannot be a tensor's name"):
        export_to_huggingface(tmp_path / "step-1", tmp_path / "hf")
    save_state_dict(state, tmp_path / "f", safe_serialization=False)
    assert torch.load(tmp_path / "f", weights_only=True).keys() == state.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"f", "step-1"}


@table("size", [1, 100, 200, 4080, 100_000])
def test_a_folder_written_by_the_callers_loop_loads(tmp_path: Path, size: int) -> None:
    """MindSpeed's loop, which writes a file when the next name has another one, loses no tensor."""
    state = _state()
    _, total, weight_map = get_shard_info(state, None, size, True)
    names, file = list(state), {}
    for name, following in zip(names, [*names[1:], None], strict=True):
        file[name] = state[name]
        if following is None or weight_map[following] != weight_map[name]:
            save_state_dict(file, path_to_save=tmp_path / weight_map[name], safe_serialization=True)
            file = {}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load_from_huggingface(
        {n: ShardedTensor.from_rank_offsets(n, torch.empty_like(t)) for n, t in state.items()}, tmp_path
    )
    assert all(torch.equal(found[name], state[name]) for name in state)


def _dtensor(path: Path) -> tuple[int, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}
    try:
        save_state_dict(state, path)
    except ShardingError as exc:
        return get_shard_info(state)[1], str(exc)
    return 0, ""


def test_a_dtensor_counts_whole_and_is_not_gathered(ranks: Ranks, tmp_path: Path) -> None:
    """Its size is the global one; to write it would take a collective behind the caller's back: refused by name."""
    for total, text in ranks.run(2, _dtensor, tmp_path / "f"):
        assert total == 64
        assert "'w' cannot be written" in text
        assert "full_tensor()" in text


@table("name", [1, None, "\ud800"])
def test_a_name_that_is_no_text_is_refused(name: Any, tmp_path: Path) -> None:
    """A safetensors file has names in UTF-8: any other is an error, and no file that no reader opens; .bin takes it."""
    with pytest.raises(CheckpointingException, match="names are text"):
        save_state_dict({name: torch.ones(1)}, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()
    save_state_dict({name: torch.ones(1)}, tmp_path / "a.bin", safe_serialization=False)
    assert torch.load(tmp_path / "a.bin").keys() == {name}


def test_names_to_leave_out_are_a_list(tmp_path: Path) -> None:
    """One text in the place of a list is an error that shows the list, not the names of its letters."""
    dist_checkpointing.save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(1))}, tmp_path / "c")
    for call in (
        lambda: export_to_huggingface(tmp_path / "c", tmp_path / "d", leave_out="a"),
        lambda: convert_checkpoint(tmp_path / "c", tmp_path / "d", "torch", leave_out="a"),
        lambda: merge_checkpoints([tmp_path / "c"] * 2, tmp_path / "d", leave_out="a"),
    ):
        with pytest.raises(CheckpointingException, match=r"such as \['a'\]"):
            call()
