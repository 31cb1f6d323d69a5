from __future__ import annotations

import io
import struct
import zipfile
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from shardckpt.archive.reader import load_bytes
from shardckpt.archive.zip_directory import Member, read_members
from tests.property.search import drawn, for_all
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

PAYLOAD = torch.arange(300, dtype=torch.int32)


def saved() -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save({"x": PAYLOAD, "y": [1, "two"]}, file)
    return file.getvalue()


def reading(data: bytes) -> Callable[[int, int], bytes]:
    """Reads ranges of the data."""
    return lambda offset, nbytes: data[offset : offset + nbytes]


def contents(data: bytes) -> dict[str, bytes]:
    """Every member's bytes, by our reader."""
    return {name: data[at.offset : at.offset + at.size] for name, at in read_members(reading(data), len(data)).items()}


def zipped(comment: bytes = b"") -> bytes:
    """A zip of zipfile's, with names and extra fields that torch does not write."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = comment
        for name, content in (("a/data.pkl", b"N."), ("a/ü", b"u"), ("a/empty", b"")):
            info = zipfile.ZipInfo(name)
            info.extra = struct.pack("<HH4s", 0x4246, 4, b"fill")
            archive.writestr(info, content)
    return file.getvalue()


@table("data", [saved(), zipped(), zipped(b"a comment"), zipped(b"c" * 60_000)])
def test_members_are_those_that_zipfile_finds(data: bytes) -> None:
    """Names and bytes are those that the standard library reads, in archives of torch's and of others."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert contents(data) == {name: archive.read(name) for name in archive.namelist()}


def test_what_follows_an_archive_does_not_matter() -> None:
    """A file that a store has padded is read, as torch.load reads it."""
    padded = saved() + bytes(512)
    assert torch.equal(torch.load(io.BytesIO(padded), weights_only=True)["x"], PAYLOAD)
    assert torch.equal(load_bytes(padded, "padded")["x"], PAYLOAD)


def test_sizes_of_64_bits_come_from_the_extra_field() -> None:
    """Where 32 bits say that they do not hold a size or an offset, it is the zip64 field's, in the field's order."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("first", b"one")
        archive.writestr("second", b"three")
    data = bytearray(file.getvalue())
    entry = data.rindex(b"PK\x01\x02")
    header = struct.unpack_from("<I", data, entry + 42)[0]
    extra = struct.pack("<HHH", 7, 2, 0) + struct.pack("<HHQQQ", 1, 24, 5, 5, header)
    data[entry + 20 : entry + 28] = b"\xff" * 8
    data[entry + 30 : entry + 32] = len(extra).to_bytes(2, "little")
    data[entry + 42 : entry + 46] = b"\xff" * 4
    data[entry + 46 + len("second") : entry + 46 + len("second")] = extra
    end = data.rindex(b"PK\x05\x06")
    size = struct.unpack_from("<I", data, end + 12)[0] + len(extra)
    data[end + 12 : end + 16] = size.to_bytes(4, "little")
    assert contents(bytes(data)) == {"first": b"one", "second": b"three"}


def test_a_few_reads_find_the_members() -> None:
    """The directory of a large archive on a store costs one request; each member one more for the header before it."""
    file = io.BytesIO()
    torch.save(torch.zeros(100_000), file)
    data, reads = file.getvalue(), list[tuple[int, int]]()

    def read(offset: int, nbytes: int) -> bytes:
        reads.append((offset, nbytes))
        return data[offset : offset + nbytes]

    found = read_members(read, len(data))
    assert len(reads) <= 1 + len(found)
    assert sum(nbytes for _, nbytes in reads) < 5000


@drawn(400)
def test_damage_is_an_error_or_stays_inside(count: int) -> None:
    """An archive with changed bytes, or cut, is refused, or its members lie inside it."""
    data = saved()
    tail = data.index(b"PK\x01\x02")

    def check(case: tuple[int, int, int]) -> None:
        place, value, stop = case
        damaged = bytearray(data)
        damaged[place] = value
        cut = bytes(damaged[:stop])
        try:
            found = read_members(reading(cut), len(cut))
        except (ValueError, struct.error):
            return
        assert all(isinstance(at, Member) and 0 <= at.offset <= at.offset + at.size <= stop for at in found.values())

    places = st.integers(tail, len(data) - 1) | st.integers(0, len(data) - 1)
    for_all(st.tuples(places, st.integers(0, 255), st.just(len(data)) | st.integers(0, len(data))), count, check)
