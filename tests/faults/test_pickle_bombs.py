"""A pickle takes time and memory by its size, whatever it asks for, and none ends the process."""

from __future__ import annotations

import gc
import io
import pickle
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from shardckpt import dist_checkpointing
from shardckpt.archive.opcodes import check_pickle
from shardckpt.archive.reader import load_bytes
from shardckpt.errors import CorruptCheckpointError, UnsafePickleError
from shardckpt.huggingface.torch_file import read_torch_file
from shardckpt.stubs import Stub
from tests.faults import samples
from tests.faults.bombs import ANYWHERE
from tests.faults.hostile import Foreign, archive
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _deep_path(metadata: Any) -> None:
    """Give a loose object a path that hashing would not come back from."""
    path: Any = ("a",)
    for _ in range(60):
        path = (path, path)
    metadata.state_dict_metadata["loose"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("loose")] = next(iter(metadata.storage_data.values()))
    metadata.planner_data = {"loose": path}


def _shared_chunks(metadata: Any) -> None:
    """Let a thousand tensors have one list of chunks."""
    entry = metadata.state_dict_metadata["split"]
    metadata.state_dict_metadata.update({f"split{number}": entry for number in range(1000)})


def _many_axes(metadata: Any) -> None:
    """Say that a chunk has ten thousand axes."""
    metadata.state_dict_metadata["split"].chunks[0].sizes = torch.Size((1,) * 10_000)


@table(
    ("change", "text"),
    [(_deep_path, "cannot be at a tuple"), (_shared_chunks, "shares its list of chunks"), (_many_axes, "10000 axes")],
)
def test_metadata_that_multiplies(tmp_path: Path, change: Any, text: str) -> None:
    """What .metadata says once is not worked on a million times."""
    dist_checkpointing.save(samples.state_dict(1), tmp_path / "base")
    foreign = Foreign(tmp_path / "base", tmp_path / "ckpt")
    foreign.edit_metadata(change)
    with pytest.raises(CorruptCheckpointError, match=rf"\.metadata.*{text}"):
        samples.load(foreign.directory)


@table("old", [False, True])
@table("name", ["nested tuples as a key", "tuples that hold one twice, as a key", "colliding keys"])
def test_torch_files(tmp_path: Path, name: str, old: bool) -> None:
    """Files of torch.save are looked at alike before torch's own reader gets them, in its old format, too."""
    if old:
        file = io.BytesIO()
        torch.save({}, file, _use_new_zipfile_serialization=False)
        empty = pickle.dumps({}, 2)
        content = file.getvalue().replace(empty, ANYWHERE[name])
        assert content != file.getvalue()
    else:
        content = archive(ANYWHERE[name])
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"model\.bin.*(deep|10000 values|too many keys)"):
        read_torch_file(tmp_path / "model.bin")


def test_compressed_torch_file(tmp_path: Path) -> None:
    """A file of a few bytes does not become a gigabyte."""
    content = archive(pickle.dumps({"a": "x" * 1_000_000}), compression=zipfile.ZIP_DEFLATED)
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"model\.bin.*compressed"):
        read_torch_file(tmp_path / "model.bin")


def _plain_values() -> list[Any]:
    shared = [1, 2.5, "text", b"bytes", None, True, 1 << 100]
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    by_tuple = {(x, y): x * y for x in range(-50, 50) for y in range(-50, 50)}
    return [shared, {"a": shared, "b": [shared] * 1000}, deep, by_tuple, {frozenset((1, 2)), (3, (4, 5))}, 3 + 4j]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_honest_pickles(protocol: int) -> None:
    """What pickle itself writes is let through, by every protocol, up to its end and no further."""
    data = pickle.dumps(_plain_values(), protocol)
    assert check_pickle(data + b"more", "it") == len(data)


@table("chunks", [1, 4000])
def test_honest_metadata(tmp_path: Path, chunks: int) -> None:
    """The records of a long .metadata, which are looked at as a whole, are let through and loaded as short ones are."""
    dist_checkpointing.save(samples.state_dict(1), tmp_path / "base")
    foreign = Foreign(tmp_path / "base", tmp_path / "ckpt")

    def grow(metadata: Any) -> None:
        places = metadata.storage_data
        index, place = next((index, place) for index, place in places.items() if index.fqn == "split")
        for number in range(chunks):
            offset = torch.Size((1_000_000 + number, *index.offset[1:]))
            places[MetadataIndex(f"unused{number}", offset, number)] = place

    foreign.edit_metadata(grow)
    assert samples.differences(samples.load(foreign.directory), 1) == []


_RECORD = b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n\x940"
_NAMES = b"\x8c\x01a\x940" + b"ctorch\nSize\n\x940"
_MORE = b"N0" * 40_000  # records are matched as a whole in large pickles alone


def _get(place: int) -> bytes:
    return b"j" + place.to_bytes(4, "little")


@table("plain", [0, 1, 8, 9, 16, 20, 24])
@table("text", [False, True])
@table("sizes", [0, 1, 2])
def test_records_fill_the_memo_as_they_do(plain: int, text: bool, sizes: int) -> None:
    """However many attributes of which kind a record has: the values that follow it are taken for what they are."""
    attributes = (_get(1) + b"K\x01") * plain
    attributes += (_get(1) + b"\x8c\x01b\x94") * text
    attributes += (_get(1) + _get(2) + b"K\x01\x85\x94\x85\x94R\x94") * sizes
    record = _get(0) + b")\x81\x94}\x94(" + attributes + b"ub0"
    place = 3 + 2 + text + 3 * sizes
    chain = b")\x940N\x940N\x940N\x940"
    for _ in range(1_500):
        chain += _get(place) + b"\x85\x940N\x940N\x940N\x940"
        place += 4
    pickled = b"\x80\x04" + _RECORD + _NAMES + record + chain + _MORE + b"}" + _get(place) + b"Ns."
    with pytest.raises(CorruptCheckpointError, match="tuples in tuples"):
        check_pickle(pickled, "it", plain=True)


def test_a_memo_that_is_numbered_in_two_ways() -> None:
    """Places that are said and places that are counted do not mix: nothing is taken for what it is not."""
    record = b"h\x00)\x81\x94}\x94(ub"
    said = _RECORD.replace(b"\x940", b"q\x000") + b"\x8c\x01aq\x010"
    with pytest.raises(CorruptCheckpointError, match="numbers its memo in two ways"):
        check_pickle(b"\x80\x04" + said + record * 3 + _MORE + b"N.", "it", plain=True)


@pytest.mark.parametrize("opcode", [pickle.EMPTY_SET, pickle.MARK], ids=["sets", "marks"])
def test_containers_of_a_byte_each(opcode: bytes) -> None:
    """An opcode that makes much more than a byte counts as what it makes."""
    with pytest.raises(CorruptCheckpointError, match=r"copies itself too often|values in values"):
        check_pickle(b"\x80\x04" + opcode * 1_000_000 + b"N.", "it", plain=True)


def test_a_member_that_torch_finds_by_another_case(tmp_path: Path) -> None:
    """Torch looks for a member without regard to case: so does the check of what it would read."""
    path, nested, limit = tmp_path / "model.bin", (), sys.getrecursionlimit()
    for _ in range(2_000):
        nested = (nested,)  # type: ignore[assignment]
    sys.setrecursionlimit(20_000)
    try:
        torch.save({"a": torch.ones(2), "nested": nested}, path)
    finally:
        sys.setrecursionlimit(limit)
    path.write_bytes(path.read_bytes().replace(b"/data.pkl", b"/DATA.PKL"))
    with pytest.raises(CorruptCheckpointError, match="tuples in tuples"):
        read_torch_file(path)


@table("function", [b"_codecs\nencode", b"__builtin__\nbytearray", b"__builtin__\nstr"])
def test_a_pickle_chooses_no_codec(function: bytes) -> None:
    """Punycode takes quadratic time, and hex doubles what it gets: only the codec by which pickles write bytes runs."""
    name, text = b"c" + function + b"\n", "".join(map(chr, range(0x4E00, 0x4E00 + 1500))).encode()
    opcode = pickle.BINBYTES if function.endswith(b"str") else pickle.BINUNICODE
    coded = b"\x80\x02" + name + opcode + len(text).to_bytes(4, "little") + text + b"X\x08\0\0\0punycode\x86R."
    hexed = b"\x80\x02" + name * 30 + b"X\x01\0\0\0a" + b"X\x03\0\0\0hex\x86R" * 30 + b"."
    with pytest.raises((CorruptCheckpointError, UnsafePickleError), match=r"only latin1|a str of a bytes"):
        load_bytes(archive(coded), "it")
    word = text[: 3 * 340]
    again = b"h\x00h\x01h\x02\x86R0" * 1000
    words = (
        b"\x80\x02" + name + b"q\x000X" + len(word).to_bytes(4, "little") + word + b"q\x010X\x08\0\0\0punycodeq\x020"
    )
    named = b"X\x06\0\0\0latin1X\x0b\0\0\0namereplace\x87R."
    long = text * 250
    replaced = b"\x80\x02" + name + b"X" + len(long).to_bytes(4, "little") + long + named
    # as torch's own reader, which allows any codec, would get them
    for costly in (coded, hexed, words + again + b"N.", replaced):
        with pytest.raises(CorruptCheckpointError, match="copies itself too often"):
            check_pickle(costly, "it", plain=True)
    honest = coded.replace(b"\x08\0\0\0punycode", b"\x06\0\0\0latin1")
    assert check_pickle(honest, "it", plain=True) == len(honest)


class Outer:
    """A class that a caller allows."""


def test_a_member_is_named_by_a_text() -> None:
    """Lists that share lists have exponentially long texts: none is made of what a pickle gives as a class's member."""
    lists = b"]q\x010" + b"".join(b"(h%ch%clq%c0" % (n, n, n + 1) for n in range(1, 24)) + b"h\x18"
    pickled = b"\x80\x02cbuiltins\ngetattr\nc" + f"{__name__}\nOuter\n".encode() + lists + b"\x86R."
    with pytest.raises(UnsafePickleError) as refused:
        load_bytes(archive(pickled), "it", [Outer])
    assert len(str(refused.value)) < 1000


def test_names_of_classes_do_not_pile_up() -> None:
    """A class that stands for one of another library takes far more than its name: few are made, and none stays."""
    names = [b"cmegatron.nowhere\nC%d\n" % number for number in range(2000)]
    with pytest.raises(CorruptCheckpointError, match="names more than 1024 classes of other libraries"):
        load_bytes(archive(b"\x80\x02(" + b"".join(names) + b"l."), "it")
    found = load_bytes(archive(b"\x80\x02(" + b"".join(names[:1000]) + b"l."), "it")
    assert len({*found}) == 1000
    assert load_bytes(archive(b"\x80\x02" + names[7] + b"."), "it") is found[7]
    del found
    gc.collect()
    assert not [cls for cls in Stub.__subclasses__() if cls.home[0] == "megatron.nowhere"]
