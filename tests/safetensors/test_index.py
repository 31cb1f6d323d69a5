from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.chunks import MergedPlan
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, VersionTooNewError
from shardckpt.manifest import Lineage
from shardckpt.planning import Table
from shardckpt.storage import Columns
from shardckpt.testing.contract.rewriting import open_reader
from shardckpt_safetensors.encoded_index import encode_index
from shardckpt_safetensors.index import StoredIndex, read_index
from shardckpt_safetensors.index_header import make_header
from tests.safetensors.checkpoints import change_index, save, wanted_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint."""
    return save(tmp_path / "c")


def _set(name: str, place: Any, value: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(columns: dict[str, torch.Tensor]) -> None:
        columns[name][place] = value

    return change


def _swap_rows(columns: dict[str, torch.Tensor]) -> None:
    for name in ("box_offset", "box_start"):
        rows = columns[name]
        rows[[0, 1]] = rows[[1, 0]]


def _load_all(path: Path) -> None:
    dc.load_plain_tensors(path)
    dc.load(wanted_state(), path)


def _share(columns: dict[str, torch.Tensor]) -> None:
    columns["box_start"][1] = columns["box_start"][0]


def _name_twice(columns: dict[str, torch.Tensor]) -> None:
    columns["tensor"][1] = columns["tensor"][0]


def _drop_box(columns: dict[str, torch.Tensor]) -> None:
    for name in ("box_offset", "box_extent", "box_file", "box_start"):
        columns[name] = columns[name][1:]
    columns["tensor_end"] -= 1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_set("box_offset", (0, 0), 1), "once|sorted"),
        (_set("box_offset", (0, 0), 11), "outside of its shape"),
        (_set("box_extent", (0, 0), 1 << 40), "outside of its shape"),
        (_set("tensor_shape", (0, 0), 1 << 62), "too many elements"),
        (_set("tensor_shape", (0, 0), 13), "once"),
        (_set("tensor_axes", 0, 65), "65"),
        (_set("tensor_dtype", 0, 9), "tensor_dtype"),
        (_set("tensor_end", 0, 100), "ascend"),
        (_set("box_file", 0, 7), "does not name"),
        (_set("box_start", 0, 1 << 50), "outside of its file"),
        (_set("box_start", 0, 0), "outside of its file"),
        (_set("box_start", 0, 100), "multiple of 64"),
        (_set("object_start", 0, 1 << 50), "outside of"),
        (_set("object_nbytes", 0, 1 << 50), "outside of"),
        (_set("object_codec", 0, 3), "object_codec"),
        (_set("text_end", 0, 1 << 20), "text_end"),
        (_set("text", 0, 0), "NUL"),
        (_set("text", 0, 255), "UTF-8"),
        (_name_twice, "more than once"),
        (_swap_rows, "sorted"),
        (_drop_box, "once"),
        (_share, "shares bytes"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    path: Path, change: Callable[[dict[str, torch.Tensor]], None], fault: str
) -> None:
    """A hole, an overlap, a place outside of a file, a wrong number: an error that names the index, and no values."""
    change_index(path, change)
    with pytest.raises(CorruptCheckpointError, match=fault) as error:
        _load_all(path)
    assert "index.safetensors" in str(error.value)


def test_features(path: Path) -> None:
    """An unknown required feature is refused by name; unknown optional ones, and other fields, are ignored and kept."""
    change_index(path, header=lambda header: header.update({"optional_features": ["later"], "acme.note": {"a": [1]}}))
    assert dc.load(wanted_state(), path)["step"] == 5
    dc.remove_sharded_tensors(path, "layers.0.bias")
    with open_reader(path) as reader:
        header = read_index(reader).header.model_dump()
    assert header["optional_features"] == ["later"]
    assert header["acme.note"] == {"a": [1]}
    change_index(path, header=lambda header: header.update(required_features=["tiled_boxes"]))
    with pytest.raises(VersionTooNewError, match="tiled_boxes"):
        dc.load(wanted_state(), path)


@pytest.mark.parametrize(
    ("version", "error"), [("2.0", VersionTooNewError), ("1.7", None), ("0.9", CorruptCheckpointError)]
)
def test_versions_of_the_format(path: Path, version: str, error: type[CheckpointingException] | None) -> None:
    """A later minor version is read; another major one is refused with its number."""
    change_index(path, header=lambda header: header.update(format=version))
    if error is None:
        assert dc.load(wanted_state(), path)["step"] == 5
        return
    with pytest.raises(error, match=version):
        dc.load(wanted_state(), path)


def test_the_header_says_where_it_comes_from(path: Path) -> None:
    """The index has the save's id, which shardckpt.json has, too, and the program; one of another save is refused."""
    change_index(path, header=lambda header: header.update(id="0" * 32))
    with pytest.raises(CorruptCheckpointError, match="is of save 0000"):
        dc.load(wanted_state(), path)


def test_a_million_boxes_open_at_once() -> None:
    """1,000,000 boxes of 1,000 tensors open in less than 50 ms (here: 0.5 s, on busy cores) and 64 MB."""
    tensors, ranks = 1000, 1000
    count = tensors * ranks
    spec = torch.arange(tensors).repeat_interleave(ranks)
    rank = torch.arange(ranks).repeat(tensors)
    offset = torch.stack([rank * 128, torch.zeros_like(rank)], 1)
    extent = torch.tensor([[128, 4096]]).expand(count, 2)
    plan = MergedPlan(
        [f"layers.{n // 10}.p{n % 10}.weight" for n in range(tensors)],
        [torch.bfloat16] * tensors,
        [(128 * ranks, 4096)] * tensors,
        torch.arange(tensors + 1) * ranks,
        Table(spec, offset, extent),
        torch.stack([rank, 4096 + spec * (1 << 20)], 1),
        [f"rank_{n}_0.safetensors" for n in range(ranks)],
        {},
    )
    data = bytearray(encode_index(plan).to_bytes(make_header("0" * 32, Lineage())))
    assert len(data) < 32 << 20
    sizes = dict.fromkeys(plan.files, 1 << 40)
    tracemalloc.start()
    index = StoredIndex(Columns(data, "here"), "here", sizes)
    number = index.numbers["layers.3.p7.weight"]
    chunks, _ = index.select_chunks(torch.tensor([number]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
    assert torch.equal(chunks.box.offset, offset[:ranks])
    assert chunks.length.unique().tolist() == [128 * 4096 * 2]
