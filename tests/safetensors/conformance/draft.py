"""A checkpoint as a draft: written from FORMAT.md alone, and changed on the way by the entries of the corpus."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INDEX, COMMON, MARKER, RECORD = "index.safetensors", "common.safetensors", "metadata.json", "shardckpt.json"
SAVE_ID = "0123456789abcdef" * 2
WIDTHS = {"U8": "u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32", "C32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "C128": 128,
    "F4_E2M1_X2": 8,
}
#: zlib's own compression of 40 lengths of 100 bytes: what it writes must not depend on its release.
LENGTHS_OF_100 = bytes.fromhex("789c4b6160604819c41800022b0fa1")


class Link(NamedTuple):
    """A symbolic link in the place of a file."""

    target: str


Files = dict[str, "bytes | Link"]


class Box(NamedTuple):
    """A stored part of a tensor."""

    offset: Sequence[int]
    extent: Sequence[int]
    file: str = "rank_0.safetensors"


@dataclass
class Tensor:
    """A tensor: its boxes, or None for all of it in one."""

    name: str
    shape: tuple[int, ...] = (4,)
    dtype: str = "F32"
    boxes: list[Box] | None = None

    @property
    def array(self) -> np.ndarray:
        """Its elements, as they lie in memory: bytes that depend on the name."""
        nbytes = BITS[self.dtype] // 8
        content = (np.arange(math.prod(self.shape) * nbytes) * 7 + sum(self.name.encode())) % 251
        if self.dtype == "BOOL":
            content %= 2
        return np.frombuffer(content.astype("u1").tobytes(), f"V{nbytes}").reshape(self.shape)

    def list_boxes(self) -> list[Box]:
        """Return the boxes in the order of the index."""
        whole = [Box([0] * len(self.shape), self.shape)] if 0 not in self.shape else []
        return sorted(whole if self.boxes is None else self.boxes, key=lambda box: list(box.offset))


@dataclass
class Saved:
    """An object: its codec and payload."""

    name: str
    codec: str
    payload: bytes
    file: str = "rank_0.safetensors"


def pack_safetensors(entries: Iterable[tuple[str, str, Sequence[int], bytes]], metadata: dict[str, str]) -> bytes:
    """Return a safetensors file: entries are names, dtypes, shapes and payloads."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    payloads, end = [], 0
    for name, dtype, shape, payload in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end := end + len(payload)]}
        payloads.append(payload)
    return join_header(json.dumps(header, ensure_ascii=False).encode(), b"".join(payloads))


def join_header(text: bytes, payloads: bytes) -> bytes:
    """Return a file of a header, filled with spaces to a multiple of 64 bytes, and payloads."""
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + payloads


class Packed(NamedTuple):
    """A data file, and where its payloads begin and which lengths its segments have."""

    data: bytes
    starts: list[int]
    lengths: list[int]


def pack_data_file(payloads: list[tuple[str, bytes]]) -> Packed:
    """Return a data file with payloads at multiples of 64 bytes, and what fills the gaps declared."""
    entries: list[tuple[str, str, Sequence[int], bytes]] = []
    starts, end = [], 0
    for number, (name, payload) in enumerate(payloads):
        if gap := -end % 64:
            entries.append((f"__padding__{number}", "U8", [gap], bytes(gap)))
        starts.append(end + gap)
        end += gap + len(payload)
        entries.append((name, "U8", [len(payload)], payload))
    data = pack_safetensors(entries, {})
    begin = len(data) - end
    marks = {0, len(data)}
    for start, (_, payload) in zip(starts, payloads, strict=True):
        if len(payload) > 1 << 16:
            marks |= {*range(begin + start, begin + start + len(payload), 1 << 20), begin + start + len(payload)}
    cuts = sorted(marks)
    return Packed(data, [begin + start for start in starts], [b - a for a, b in itertools.pairwise(cuts)])


def digest_table(data: bytes, lengths: list[int], algorithm: str, packed: bytes | None = None) -> tuple[str, str]:
    """Return ``digest`` and ``segments`` of a file; ``packed`` are the lengths if zlib's own compression is wanted."""
    if algorithm == "xxh3_64":
        from xxhash import xxh3_64_intdigest as function

        code = "<u8"
    else:
        function, code = zlib.crc32, "<u4"
    ends = list(itertools.accumulate(lengths, initial=0))
    digests = np.array([function(data[a:b]) for a, b in itertools.pairwise(ends)], code).tobytes()
    column = np.array(lengths, "<u4").tobytes()
    # level 0: what is stored, not compressed, is the same with every zlib
    text = base64.b64encode((packed or zlib.compress(column, 0)) + digests).decode()
    return hashlib.sha256(column + digests).hexdigest(), text


def narrow(values: np.ndarray) -> str:
    """Return the narrowest dtype of a column."""
    if values.size and values.min() < 0:
        return "I64"
    limit = int(values.max(initial=0))
    return "U8" if limit < 1 << 8 else "I16" if limit < 1 << 15 else "I32" if limit < 1 << 31 else "I64"


@dataclass
class Draft:
    """A checkpoint that is being written. Entries change it on the way: a hook is called after each step.

    Attributes:
        about: The index's JSON.
        columns: The index's columns by name.
        dtypes: Of columns that do not have the narrowest.
        files: The files by name.
        lengths: Of the segments, by file; one segment for a file without.
        record: ``shardckpt.json``.
        marker: ``metadata.json``.
    """

    about: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    marker: dict[str, Any] = field(
        default_factory=lambda: {"sharded_backend": "safetensors", "sharded_backend_version": 1}
    )

    def add_content(self, tensors: list[Tensor], objects: list[Saved], aliases: dict[str, str]) -> None:
        """Write the data files, the index's JSON and columns."""
        boxes = [(tensor, box) for tensor in tensors for box in tensor.list_boxes()]
        payloads: dict[str, list[tuple[str, bytes]]] = {}
        places = []
        for tensor, box in boxes:
            part = tensor.array[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))]
            ranges = ",".join(f"{o}:{o + e}" for o, e in zip(box.offset, box.extent, strict=True))
            own = payloads.setdefault(box.file, [])
            own.append((f"{tensor.name}[{ranges}]", part.tobytes()))
            places.append((box.file, len(own) - 1))
        for saved in objects:
            own = payloads.setdefault(saved.file, [])
            own.append((saved.name, saved.payload))
            places.append((saved.file, len(own) - 1))
        packed = {file: pack_data_file(own) for file, own in sorted(payloads.items())}
        self.files |= {file: one.data for file, one in packed.items()}
        self.lengths |= {file: one.lengths for file, one in packed.items()}
        starts = [packed[file].starts[number] for file, number in places]

        strings: dict[str, int] = {}
        files = list(packed)
        axes = max((len(tensor.shape) for tensor in tensors), default=0)
        dtypes = sorted({tensor.dtype for tensor in tensors})
        codecs = sorted({saved.codec for saved in objects})
        named = {tensor.name: number for number, tensor in enumerate(tensors)}

        def place(text: str) -> int:
            return strings.setdefault(text, len(strings))

        def split(names: Iterable[str]) -> np.ndarray:
            """Two strings a name: up to its last dot, and the rest."""
            cut = [(name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]) for name in names]
            return np.array([[place(first), place(rest)] for first, rest in cut], "i8").reshape(-1, 2)

        def table(rows: Iterable[Sequence[int]], fill: int) -> np.ndarray:
            filled = [[*row, *[fill] * (axes - len(row))] for row in rows]
            return np.array(filled, "i8").reshape(len(filled), axes)

        def column(values: Iterable[int]) -> np.ndarray:
            return np.array(list(values), "i8")

        ends = itertools.accumulate(len(tensor.list_boxes()) for tensor in tensors)
        at = [files.index(file) for file, _ in places]
        self.columns = {
            "file": column(place(file) for file in files),
            "tensor": split(tensor.name for tensor in tensors),
            "tensor_dtype": column(dtypes.index(tensor.dtype) for tensor in tensors),
            "tensor_axes": column(len(tensor.shape) for tensor in tensors),
            "tensor_shape": table((tensor.shape for tensor in tensors), 1),
            "tensor_end": column(ends),
            "box_offset": table((box.offset for _, box in boxes), 0),
            "box_extent": table((box.extent for _, box in boxes), 1),
            "box_file": column(at[: len(boxes)]),
            "box_start": column(starts[: len(boxes)]),
            "alias": split(aliases),
            "alias_tensor": column(named[name] for name in aliases.values()),
            "object": split(saved.name for saved in objects),
            "object_codec": column(codecs.index(saved.codec) for saved in objects),
            "object_file": column(at[len(boxes) :]),
            "object_start": column(starts[len(boxes) :]),
            "object_nbytes": column(len(saved.payload) for saved in objects),
        }
        self.set_text([text.encode() for text in strings])
        self.about = {
            "format": "1.0",
            "required_features": [],
            "optional_features": [],
            "id": SAVE_ID,
            "parent": None,
            "step": 100,
            "created_by": "make_corpus.py",
            "dtypes": dtypes,
            "codecs": codecs,
        }

    def get_text(self) -> list[bytes]:
        """Return the strings of the index."""
        text = self.columns["text"].astype("u1").tobytes()
        return [text[a:b] for a, b in itertools.pairwise([0, *self.columns["text_end"].tolist()])]

    def set_text(self, strings: list[bytes]) -> None:
        """Replace the strings of the index."""
        self.columns["text"] = np.frombuffer(b"".join(strings), "u1").astype("i8")
        self.columns["text_end"] = np.array(list(itertools.accumulate(map(len, strings))), "i8")

    def rename(self, old: bytes, new: bytes) -> None:
        """Change one string of the index."""
        assert old in self.get_text()
        self.set_text([new if string == old else string for string in self.get_text()])

    def add_index(self) -> None:
        """Write the index and the common state."""
        dtypes = {name: self.dtypes.get(name, narrow(values)) for name, values in self.columns.items()}
        order = sorted(dtypes, key=lambda name: -np.dtype(WIDTHS[dtypes[name]]).itemsize)  # aligned without gaps
        entries = [
            (n, dtypes[n], v.shape, v.astype(WIDTHS[dtypes[n]]).tobytes()) for n in order for v in [self.columns[n]]
        ]
        self.files[INDEX] = pack_safetensors(entries, {"shardckpt": json.dumps(self.about)})
        self.files[COMMON] = pack_safetensors([], {"tree": json.dumps({"step": 100, "lr": 0.5})})

    def add_record(self) -> None:
        """Write the record of the files as they are, but for its own digest."""
        algorithm = self.record.pop("algorithm", "crc32")
        packed = self.record.pop("packed", {})
        rows = []
        for name, data in sorted(self.files.items()):
            assert isinstance(data, bytes)
            lengths = self.lengths.get(name, [len(data)] if data else [])
            digest, segments = digest_table(data, lengths, algorithm, packed.get(name))
            row = {"name": name, "size": len(data), "rank": 0, "keys": 1, "digest": digest, "segments": segments}
            rows.append(row)
        self.record = {
            "format": 2 if any("/" in name for name in self.files) else 1,
            "save_id": SAVE_ID,
            "backend": "safetensors",
            "version": 1,
            "reader": "shardckpt 0.9",
            "writer": {"shardckpt": "0.9"},
            "world_size": 1,
            "digest_algorithm": algorithm,
            "files": rows,
        }

    def seal(self) -> None:
        """Write ``shardckpt.json`` with its own digest, and ``metadata.json``."""
        text = json.dumps({**self.record, "self_digest": "0" * 64}, indent=1)
        root = hashlib.sha256(text.encode()).hexdigest()
        self.files[RECORD] = text.replace("0" * 64, root).encode()
        self.files[MARKER] = json.dumps(self.marker).encode()


Hook = "Callable[[Draft], object] | None"


@dataclass
class Entry:
    """An entry of the corpus.

    Attributes:
        name: Of its folder.
        why: One sentence: what is to be seen in it.
        files: Its files by name.
        tensors: What a reader finds, as it prints it; None for an invalid entry.
        objects: Likewise.
        needs: A digest algorithm that a reader may lack: it then says so by name.
    """

    name: str
    why: str
    files: Files
    tensors: dict[str, list[Any]] | None = None
    objects: dict[str, list[str]] | None = None
    needs: str = ""


def make(
    tensors: list[Tensor],
    objects: list[Saved] | None = None,
    aliases: dict[str, str] | None = None,
    *,
    content: Hook = None,
    files: Hook = None,
    record: Hook = None,
    after: Hook = None,
) -> Files:
    """Return the files of a checkpoint; hooks change the index, the files before their digests, the record, the end."""
    draft = Draft()
    draft.add_content(tensors, objects or [], aliases or {})
    for hook, step in ((content, draft.add_index), (files, draft.add_record), (record, draft.seal), (after, None)):
        if hook is not None:
            hook(draft)
        if step is not None:
            step()
    return dict(sorted(draft.files.items()))


def sha256(data: bytes) -> str:
    """Return the SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def valid(
    name: str,
    why: str,
    tensors: list[Tensor],
    objects: list[Saved] | None = None,
    aliases: dict[str, str] | None = None,
    needs: str = "",
    **hooks: Any,
) -> Entry:
    """Return a valid entry."""
    found = {t.name: [t.dtype, list(t.shape), sha256(t.array.tobytes())] for t in tensors}
    found |= {alias: found[tensor] for alias, tensor in (aliases or {}).items()}
    shown = {o.name: [o.codec, sha256(o.payload)] for o in objects or []}
    return Entry(name, why, make(tensors, objects, aliases, **hooks), found, shown, needs)


def cut(shape: Sequence[int], *bounds: Sequence[int], files: int = 1, folder: str = "") -> list[Box]:
    """Return the boxes between bounds along each axis, dealt out to a number of files."""
    pairs = [list(itertools.pairwise([0, *inner, size])) for inner, size in zip(bounds, shape, strict=True)]
    boxes = enumerate(itertools.product(*pairs))
    return [
        Box([a for a, _ in box], [b - a for a, b in box], f"{folder}rank_{number % files}.safetensors")
        for number, box in boxes
    ]
