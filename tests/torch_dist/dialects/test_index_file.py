from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from hypothesis import strategies as st

from shardckpt.chunks import Chunk, Item, StoredTensor
from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning.boxes import Box
from shardckpt.storage.columns import pack_columns
from shardckpt_torch_dist.dialects import index_file
from shardckpt_torch_dist.dialects.index_file import encode_index, parse_index
from tests.property.search import drawn, for_all
from tests.tables import table
from tests.torch_dist.indexes import FILES, INDEXES, content, index_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt_torch_dist.dialects.stored import StoredIndex

SOURCE = "/ckpt/shardckpt-index.safetensors"
LARGEST = (1 << 63) - 1

Change = dict[str, Any]


def sample() -> StoredIndex:
    """A matrix in two chunks, a vector in one, a number, and an object."""
    rows = {(n, 0): Chunk(Box((n, 0), (2, 3)), Item(FILES[0], n * 500, 624), 0, 6) for n in (0, 2)}
    tensors = {
        "matrix": StoredTensor(torch.float32, (4, 3), rows),
        "vector": StoredTensor(torch.bfloat16, (5,), {(0,): Chunk(Box((0,), (5,)), Item(FILES[1], 0, 600), 0, 5)}),
        "number": StoredTensor(torch.int64, (), {(): Chunk(Box((), ()), Item(FILES[1], 600, 600), 0, 1)}),
    }
    return index_of(tensors, {"rng/shard_0_1": Item(FILES[2], 0, 90)})


def changed(**changes: Any) -> bytes:
    """The sample's file with other columns: lists of text or numbers, functions of what it has, or None to lack it."""
    columns = safetensors.torch.load(encode_index(sample()))
    for name, change in changes.items():
        if change is None:
            del columns[name]
        elif callable(change):
            columns[name] = change(columns[name].to(torch.int64)).contiguous()
        elif isinstance(change, bytes):
            columns[name] = torch.frombuffer(bytearray(change), dtype=torch.uint8)
        elif all(isinstance(value, str) for value in change):
            columns[name] = safetensors.torch.load(pack_columns({name: change}))[name]
        else:
            columns[name] = torch.tensor(change)
    return safetensors.torch.save(columns)


def put(*place: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of one number."""

    def change(column: torch.Tensor) -> torch.Tensor:
        column[place] = value
        return column

    return change


@drawn(50)
@pytest.mark.parametrize("block", [1, 3, 1 << 13])
def test_what_is_dumped_is_parsed(block: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a save of ours stores comes back as it was."""
    monkeypatch.setattr(index_file, "_BLOCK", block)

    def check(index: StoredIndex) -> None:
        found = parse_index(encode_index(index), SOURCE)
        assert content(found) == content(index)
        assert found.keys == index.keys
        assert found.files == index.files

    for_all(INDEXES, count, check)


def test_the_columns_are_those_of_an_index() -> None:
    """What is not stored (numbers of tensors, first elements, volumes) is there after parsing, all in int64."""
    index = sample()
    found = parse_index(encode_index(index), SOURCE)
    for name in ("file", "start", "length", "first", "volume"):
        column = getattr(found.chunks, name)
        assert column.dtype == torch.int64
        assert torch.equal(column, getattr(index.chunks, name))
    assert all(torch.equal(one, other) for one, other in zip(found.chunks.box, index.chunks.box, strict=True))
    assert torch.equal(found.bounds, index.bounds)
    assert (found.common, found.loose) == (None, {})


def test_files_of_objects_need_not_be_named_before() -> None:
    """A file that holds objects alone is in the file's names, whether or not the index names it."""
    index = index_of({}, {"rng/shard_0_1": Item("a.distcp", 7, 90)})
    index.files.clear()
    assert parse_index(encode_index(index), SOURCE).objects == {"rng/shard_0_1": Item("a.distcp", 7, 90)}


def test_any_safetensors_reader_opens_it() -> None:
    """The file is a safetensors file as every tool reads it."""
    assert safetensors.torch.load(encode_index(sample()))["bounds"].tolist() == [0, 2, 3, 4]


@table(
    ("changes", "fault"),
    [
        ({"keys": None}, "no column 'keys'"),
        ({"keys": b"{}"}, "not a list of text"),
        ({"keys": b"[" * 100_000}, "not JSON"),
        ({"keys": [1.5, 2.5]}, "'keys' is not JSON"),
        ({"keys": ["matrix", "vector"]}, "2 keys and 3 dtypes"),
        ({"keys": ["matrix", "vector", "vector"]}, "4 keys, but only 3 different ones"),
        ({"keys": ["matrix", "vector", "rng/shard_0_1"]}, "4 keys, but only 3 different ones"),
        ({"dtypes": ["float32", "bfloat16", "float3"]}, "no dtype 'float3'"),
        ({"dtypes": ["float32", "bfloat16", "save"]}, "no dtype 'save'"),
        ({"dtypes": ["float32", "bfloat16", ""]}, "no dtype ''"),
        ({"dtypes": ["complex128", "bfloat16", "int64"], "length": put(0, value=95)}, "'matrix' has a chunk that is l"),
        ({"axes": [2, 1]}, r"'axes' is of shape \(2,\), expected \(3,\)"),
        ({"axes": [2, 1, 1 << 40]}, "'shapes' is of shape"),
        ({"axes": [2, 1, -1]}, "'axes' has -1"),
        ({"axes": [1, 1, 0]}, "'shapes' is of shape"),
        ({"axes": [2, 0, 0]}, "'vector' has a size along an axis that it lacks"),
        ({"shapes": put(0, 0, value=3)}, "'matrix' has a chunk that is not inside"),
        ({"shapes": put(0, 0, value=-4)}, "'shapes' has -4"),
        ({"shapes": lambda shapes: shapes.view(-1)}, "'shapes' is of shape"),
        ({"bounds": [0, 2, 3]}, "'bounds' is of shape"),
        ({"bounds": [1, 2, 3, 4]}, "does not ascend"),
        ({"bounds": [0, 3, 2, 4]}, "does not ascend"),
        ({"bounds": [0, 2, 3, 5]}, r"'file' is of shape \(4,\), expected \(5,\)"),
        ({"bounds": [0, 2, 3, 1 << 62]}, "'file' is of shape"),
        ({"bounds": [0, 1, 3, 4]}, "'vector' has a chunk that is not inside"),
        ({"offset": put(1, 0, value=3)}, "'matrix' has a chunk that is not inside"),
        ({"offset": put(1, 0, value=-1)}, "'offset' has -1"),
        ({"offset": put(1, 0, value=LARGEST)}, "'matrix' has a chunk that is not inside"),
        ({"offset": put(2, 1, value=1)}, "'vector' has a chunk that is not inside"),
        ({"offset": lambda offset: offset[:, :1]}, "'offset' is of shape"),
        ({"extent": put(0, 1, value=4)}, "'matrix' has a chunk that is not inside"),
        ({"extent": put(0, 1, value=-3)}, "'extent' has -3"),
        ({"extent": put(3, 0, value=0)}, "'number' has a chunk that is not inside"),
        ({"extent": put(0, 1, value=LARGEST)}, "'matrix' has a chunk that is not inside"),
        (
            {
                "shapes": lambda shapes: shapes + ((shapes == 4) | (shapes == 3)) * (1 << 40),
                "extent": put(0, value=1 << 40),
            },
            "'matrix' has a chunk of too many elements to count",
        ),
        ({"file": put(3, value=3)}, "'number' has a chunk that is in no file"),
        ({"file": put(3, value=-1)}, "'file' has -1"),
        ({"file": lambda file: file.double()}, "'file' is of F64"),
        ({"start": put(2, value=LARGEST)}, "'vector' has a chunk that is in no file"),
        ({"start": put(2, value=-2)}, "'start' has -2"),
        ({"length": put(0, value=23)}, "'matrix' has a chunk that is larger"),
        ({"length": put(0, value=-1)}, "'length' has -1"),
        ({"length": lambda length: length[1:]}, "'length' is of shape"),
        ({"files": [FILES[0], FILES[1], "../evil"]}, "'../evil' is not allowed"),
        ({"files": [FILES[0], FILES[1], ".."]}, "'..' is not allowed"),
        ({"files": [FILES[0]]}, "in no file"),
        ({"objects": []}, "'object_places' is of shape"),
        ({"objects": ["rng"]}, "'rng' is not the key of a sharded object"),
        ({"object_places": [[3, 0, 90]]}, "'rng/shard_0_1' is in no file"),
        ({"object_places": [[2, 1, LARGEST]]}, "'rng/shard_0_1' is in no file"),
        ({"object_places": [[2, -1, 90]]}, "'object_places' has -1"),
    ],
)
def test_what_cannot_be_is_refused(changes: Change, fault: str) -> None:
    """Whatever a file says that cannot be is an error that names the file and the fault."""
    with pytest.raises(CorruptCheckpointError, match=f"^{SOURCE}.*{fault}"):
        parse_index(changed(**changes), SOURCE)


def test_the_unchanged_sample_is_fine() -> None:
    """What the cases above change is the only fault that they have."""
    assert content(parse_index(changed(length=put(0, value=24)), SOURCE))[0].keys() == {"matrix", "vector", "number"}


@drawn(300)
def test_damage_is_an_error_or_harmless(count: int) -> None:
    """A file with changed bytes, or cut, is refused, or is an index whose every chunk can be asked for."""
    data = encode_index(sample())

    def check(case: tuple[int, int, int]) -> None:
        place, value, stop = case
        damaged = bytearray(data)
        damaged[place] = value
        try:
            content(parse_index(bytes(damaged[:stop]), SOURCE))
        except CorruptCheckpointError as exc:
            assert str(exc).startswith(SOURCE)  # noqa: PT017 - it need not be raised

    places = st.integers(0, len(data) - 1)
    for_all(st.tuples(places, st.integers(0, 255), st.just(len(data)) | places), count, check)
