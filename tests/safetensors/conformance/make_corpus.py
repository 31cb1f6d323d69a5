"""Write the corpus: 33 valid directories and 69 invalid ones, with their verdicts.

``python -m tests.safetensors.conformance.make_corpus`` writes ``corpus.zip``, in which each entry is a folder, and
``corpus.json``, which has the verdict of each and why; of valid ones also what a reader finds there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.safetensors.conformance.draft import (
    COMMON,
    INDEX,
    LENGTHS_OF_100,
    MARKER,
    RECORD,
    Box,
    Draft,
    Entry,
    Link,
    Saved,
    Tensor,
    cut,
    digest_table,
    join_header,
    make,
    pack_safetensors,
    valid,
)
from tests.safetensors.conformance.draft_parts import Part, cut_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).parent
FILE = "rank_0.safetensors"
TREE = b'{"lr": 0.1, "betas": {"$": "tuple", "v": [0.9, 0.95]}, "best": {"$": "float", "v": "-inf"}}'


def widen(draft: Draft) -> None:
    """Make all columns I64."""
    draft.dtypes = {name: "I64" for name in draft.columns if name != "text"}


def list_valid() -> list[Entry]:
    """Return the valid entries."""
    w, b = Tensor("layers.0.weight", (4, 3)), Tensor("layers.0.bias", (5,), "BF16")
    rows = Tensor("w", (8, 3), boxes=cut((8, 3), [4], [], files=2))
    objects = [
        Saved("state.raw", "raw", bytes(range(256))),
        Saved("state.json", "json", TREE),
        Saved("state.rng", "safetensors", _rng()),
        Saved("state.empty", "raw", b""),
    ]
    many = cut((24, 2), range(1, 24), [], files=24)
    hundreds = b"notes for people\n" * 235 + b"12345"

    def later(draft: Draft) -> None:
        draft.about |= {"format": "1.9", "hint": {"of": "1.9"}, "optional_features": ["shards_by_color"]}
        draft.columns["box_color"] = np.arange(7)

    def scales(draft: Draft) -> None:
        draft.about["optional_features"] = ["block_scales"]
        draft.columns |= {"scaled": np.array([0]), "scaled_by": np.array([1]), "scaled_block": np.array([[1, 16]])}

    def hundreds_by_zlib(draft: Draft) -> None:
        draft.files["notes.txt"], draft.lengths["notes.txt"] = hundreds, [100] * 40
        draft.record["packed"] = {"notes.txt": LENGTHS_OF_100}

    def beside(draft: Draft) -> None:
        draft.files |= {"config.json": b'{"model_type": "llama"}', "empty.txt": b"", "model.safetensors": _plain()}

    odd = [w, b, Tensor("scale", (), "F32")]

    def unaligned(draft: Draft, tensors: Sequence[Tensor] = odd) -> None:
        data = pack_safetensors([(t.name, t.dtype, t.shape, t.array.tobytes()) for t in tensors], {"format": "pt"})
        sizes = [t.array.nbytes for t in tensors]
        draft.files[FILE], draft.lengths[FILE] = data, [len(data)]
        draft.columns["box_start"] = len(data) - sum(sizes) + np.cumsum([0, *sizes[:-1]])
        draft.about["required_features"] = ["unaligned"]

    links = [Tensor("codes", (4, 3), "U8"), b, Tensor("scales", (2, 3))]

    def linked(draft: Draft) -> None:
        unaligned(draft, links)
        draft.about["optional_features"] = ["block_scales"]
        draft.columns |= {"scaled": np.array([0]), "scaled_by": np.array([2]), "scaled_block": np.array([[2, 1]])}
        cut_index(draft, 1)

    return [
        valid(
            "axes_0_and_64",
            "A tensor without axes has one element; one with 64 axes is allowed.",
            [Tensor("step", (), "I64"), Tensor("deep", (1,) * 62 + (2, 3), "U8"), w],
        ),
        valid("rows_even", "A matrix in two boxes of rows, one in each file.", [rows, b]),
        valid(
            "rows_uneven", "Rows of 3 ranks: 2, 2 and 1.", [Tensor("w", (5, 3), boxes=cut((5, 3), [2, 4], [], files=3))]
        ),
        valid(
            "columns",
            "A matrix cut along its second axis, unevenly.",
            [Tensor("w", (4, 7), "F16", cut((4, 7), [], [3], files=2)), b],
        ),
        valid(
            "blocks_3d",
            "A grid of 2 x 2 x 2 uneven blocks.",
            [Tensor("experts", (3, 4, 5), "BF16", cut((3, 4, 5), [2], [1], [3], files=4))],
        ),
        valid(
            "boxes_of_no_grid",
            "Boxes of different sizes that no regular grid has, several in one file.",
            [
                Tensor(
                    "w",
                    (4, 4),
                    "F32",
                    [Box([0, 0], [1, 4]), Box([1, 0], [3, 1]), Box([1, 1], [1, 3]), Box([2, 1], [2, 3])],
                )
            ],
        ),
        valid(
            "many_files",
            "A row in each of 24 files, whose digests stand in files of their own: the record has format 3.",
            [Tensor("w", (24, 2), boxes=many)],
            record=_move_tables,
        ),
        valid(
            "folders",
            "Files in folders: the record has format 2.",
            [Tensor("w", (4, 3), boxes=cut((4, 3), [2], [], files=2, folder="ranks/of.node-0/"))],
        ),
        valid(
            "empty_tensor_without_boxes", "A tensor without elements need not have a box.", [Tensor("none", (0, 5)), w]
        ),
        valid(
            "empty_tensor_with_boxes",
            "A tensor without elements may have boxes, which are empty.",
            [Tensor("none", (0, 5), boxes=[Box([0, 0], [0, 2]), Box([0, 2], [0, 3])]), w],
        ),
        valid(
            "empty_boxes",
            "Empty boxes beside others: ranks that hold no row of a small tensor.",
            [
                Tensor(
                    "w",
                    (2, 3),
                    boxes=[Box([0, 0], [1, 3]), Box([1, 0], [1, 3]), Box([2, 0], [0, 3]), Box([2, 0], [0, 3])],
                ),
                w,
            ],
        ),
        valid(
            "integers",
            "Every dtype of integers, and booleans.",
            [Tensor(f"t.{d}", (3, 2), d) for d in ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")],
        ),
        valid(
            "floats",
            "Every dtype of floats of 16 bits and more.",
            [Tensor(f"t.{d}", (3, 2), d, cut((3, 2), [1], [], files=2)) for d in ("F16", "BF16", "F32", "F64")],
        ),
        valid(
            "floats_of_8_bits",
            "Every dtype of floats of 8 bits.",
            [Tensor(f"t.{d}", (9,), d) for d in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")],
        ),
        valid(
            "floats_of_4_bits",
            "Two elements a byte: shapes and boxes count the pairs.",
            [Tensor("w", (4, 8), "F4_E2M1_X2", cut((4, 8), [], [5], files=2))],
        ),
        valid(
            "complex", "Every dtype of complex numbers.", [Tensor(f"t.{d}", (3, 2), d) for d in ("C32", "C64", "C128")]
        ),
        valid(
            "aliases",
            "Tied tensors: two further names of one tensor.",
            [w, b],
            None,
            {"lm_head.weight": w.name, "tied": w.name},
        ),
        valid(
            "extensions",
            "Fields that others own, in the index's JSON, in its metadata and in the record.",
            [w],
            content=lambda d: d.about.update({"org.example": {"shards": [1, 2]}}),
            files=lambda d: _rewrite_header(d, INDEX, lambda h: h["__metadata__"].update({"format": "pt"})),
            record=lambda d: d.record.update({"content_metadata": {"run": 7}, "org.example": None}),
        ),
        valid(
            "optional_feature",
            "An optional feature that no reader knows is ignored.",
            [w],
            content=lambda d: d.about.update({"optional_features": ["org.example.colors"]}),
        ),
        valid(
            "later_minor",
            "A later minor version, with a field, a feature and a column that 1.0 does not have.",
            [w, b],
            content=later,
        ),
        valid("objects", "An object of each codec, and an empty one.", [w], objects),
        valid(
            "unknown_codec",
            "An object of a codec that somebody has registered: all else can be read.",
            [w],
            [*objects, Saved("state.loader", "org.example.loader", b"\x80\x04loader")],
        ),
        valid(
            "wide_columns",
            "Columns may be wider than their values need.",
            [rows, b],
            objects,
            {"tied": "w"},
            content=widen,
        ),
        valid(
            "narrow_columns",
            "Values of 128 to 70,000 lie in the narrowest columns that have them.",
            [
                Tensor("a", (127,), "U8"),
                Tensor("b", (255,), "U8"),
                Tensor("c", (256,), "U8"),
                Tensor("d", (32768,), "U8"),
                Tensor("e", (70000,), "U8"),
            ],
            content=lambda d: d.dtypes.update({"tensor_axes": "I16", "box_file": "I32"}),
        ),
        valid(
            "names",
            "Names in other scripts, with spaces and quotes, and one of 4,096 bytes.",
            [Tensor("poids.été"), Tensor("重み.0"), Tensor('a "b" \\ c/../d'), Tensor("🙂"), Tensor("é" * 2048)],
        ),
        valid(
            "large_payload",
            "A payload of 1.5 MiB in several segments between two small ones; lengths that zlib compressed.",
            [Tensor("small", (3,), "I16"), Tensor("large", (3 << 19,), "U8"), Tensor("small_too", (3,), "I16")],
            files=hundreds_by_zlib,
        ),
        valid("no_tensors", "A checkpoint of the common state alone: no tensor and no data file.", []),
        valid(
            "block_scales",
            "A packed tensor and the tensor of its scales, one for 16 elements.",
            [Tensor("w", (4, 16), "F4_E2M1_X2"), Tensor("w_scale", (4, 2), "F8_E4M3")],
            content=scales,
        ),
        valid(
            "other_files",
            "Files for other tools, which the record names; and one that it does not name.",
            [w],
            files=beside,
            after=lambda d: d.files.update({"README.txt": b"not of the checkpoint"}),
        ),
        valid(
            "unaligned",
            "With a feature, payloads follow each other without padding, as inference tools need it.",
            odd,
            content=unaligned,
        ),
        valid(
            "index_in_parts",
            "The index is in three parts, one of them without boxes; with an alias of a tensor in the second.",
            [rows, Tensor("none", (0, 5)), b, w, Tensor("m", (24, 2), "I16", many), Tensor("step", (), "I64")],
            objects,
            {"tied": b.name},
            content=lambda d: cut_index(d, 1, 2),
        ),
        valid(
            "index_in_parts_of_one_page",
            "Rows of a part that are wider than their values need, in one page.",
            [w, Tensor("m", (24, 2), boxes=many)],
            content=lambda d: cut_index(d, page=1000, change=lambda p: p[0].about.update(row=["I64"] * 4)),
        ),
        valid(
            "index_in_parts_with_links",
            "Payloads at odd bytes in two parts; an alias, and scales, of tensors of the other part.",
            links,
            aliases={"tied": b.name},
            content=linked,
        ),
        valid(
            "xxh3_64",
            "Digests of 64 bits, which a reader may lack.",
            [rows, b],
            objects,
            needs="xxh3_64",
            record=None,
            files=lambda d: d.record.update({"algorithm": "xxh3_64"}),
        ),
    ]


def list_invalid() -> list[Entry]:  # noqa: PLR0915 -- a statement an entry
    """Return the invalid entries: each is a valid one with one fault, and digests that fit what is there."""
    w, b = Tensor("a.w", (4, 3), boxes=cut((4, 3), [2], [], files=2)), Tensor("a.b", (6,), "I16")
    tensors, objects = [w, b], [Saved("o", "raw", b"object")]
    entries: list[Entry] = []

    def add(name: str, why: str, tensors: list[Tensor] = tensors, **hooks: Any) -> None:
        entries.append(Entry(name, why, make(tensors, objects, {"tied": "a.w"}, **hooks)))

    def column(name: str, where: Any, value: int) -> Callable[[Draft], None]:
        def change(draft: Draft) -> None:
            draft.columns[name][where] = value

        return change

    def about(**fields: Any) -> Callable[[Draft], None]:
        return lambda draft: draft.about.update(fields)

    def boxed(*boxes: tuple[list[int], list[int]]) -> list[Tensor]:
        return [Tensor("a.w", (4, 3), boxes=[Box(*box) for box in boxes]), b]

    # boxes
    add("hole", "Row 3 is in no box.", boxed(([0, 0], [2, 3]), ([2, 0], [1, 3])))
    add("overlap", "Row 1 is in two boxes.", boxed(([0, 0], [2, 3]), ([1, 0], [3, 3])))
    add(
        "overlap_and_hole",
        "Row 1 is in two boxes and row 3 in none: the number of elements is right.",
        boxed(([0, 0], [2, 3]), ([1, 0], [2, 3])),
    )
    add("box_outside", "A box lies one row further down than the tensor goes.", content=column("box_offset", (1, 0), 3))
    add("box_far_outside", "The end of a box is beyond 2^63.", content=column("box_offset", (1, 0), (1 << 63) - 1))
    add("shape_beyond_file", "A tensor claims 2^42 elements; all of its files have 1 KiB.", content=_claim_all)
    add(
        "shape_too_large",
        "A tensor without elements has an axis of 2^62.",
        [*tensors, Tensor("z", (0, 2))],
        content=column("tensor_shape", (2, 1), 1 << 62),
    )
    add("unsorted_rows", "The boxes of a tensor are not sorted.", content=_swap_boxes)
    add("size_of_no_axis", "A tensor with one axis has a size other than 1 along the second.", content=_size_of_no_axis)
    # payloads
    add("payload_behind_the_end", "A payload ends behind the end of its file.", content=lambda d: _shift(d, 1 << 20))
    add(
        "payload_misaligned", "A payload begins at a multiple of 32 bytes, not of 64.", content=lambda d: _shift(d, -32)
    )
    add("payloads_share_bytes", "Two tensors have the same payload.", content=_share)
    add("object_shares_bytes", "An object lies in the payload of a tensor.", content=_share_with_object)
    add("payload_in_header", "A payload lies in the header of its file.", content=column("box_start", 0, 64))
    add("payload_start_negative", "A payload begins before its file.", content=column("box_start", 0, -64))
    add(
        "shape_negative",
        "A tensor has the shape -2 x -3, whose product is right.",
        boxed(([0, 0], [4, 3])),
        content=lambda d: d.columns["tensor_shape"].__setitem__((0,), [-4, -3]),
    )
    # columns
    add(
        "tensor_end_decreases",
        "The boxes of the second tensor end before they begin.",
        content=column("tensor_end", 0, 5),
    )
    add("text_end_decreases", "A string ends before it begins.", content=column("text_end", 1, 100_000))
    add(
        "tensor_name_of_no_string",
        "A name is made of a string that is not there.",
        content=column("tensor", (0, 0), 99),
    )
    add("dtype_unknown", "A dtype that 1.0 does not have.", content=about(dtypes=["F32", "F6_E2M3"]))
    add("codec_out_of_range", "An object has the second of one codec.", content=column("object_codec", 0, 1))
    add("alias_of_no_tensor", "An alias of the ninth of two tensors.", content=column("alias_tensor", 0, 8))
    add("axes_65", "A tensor has 65 axes.", [Tensor("deep", (1,) * 64), *tensors], content=_one_more_axis)
    add("column_of_another_shape", "The names of tensors are rows of three strings.", content=_three_strings)
    add(
        "column_of_another_dtype",
        "Offsets are floating-point numbers.",
        files=lambda d: _rewrite_header(d, INDEX, lambda h: h["box_offset"].update({"dtype": "F8_E4M3"})),
    )
    add("column_missing", "There is no column of aliases.", content=lambda d: d.columns.pop("alias_tensor"))
    add(
        "count_beyond_file",
        "A column claims 2^40 rows of a file of 2 KiB.",
        files=lambda d: _rewrite_header(d, INDEX, lambda h: h["box_start"].update({"shape": [1 << 40]})),
    )
    # names
    add("name_twice", "Two tensors have one name.", content=lambda d: d.rename(b"b", b"w"))
    add("alias_named_as_object", "An alias has the name of an object.", content=lambda d: d.rename(b"tied", b"o"))
    add("name_empty", "An object has no name.", content=lambda d: d.rename(b"o", b""))
    add("name_too_long", "A name has 4,097 bytes.", content=lambda d: d.rename(b"o", b"x" * 4097))
    add("name_with_nul", "A name has a NUL in it.", content=lambda d: d.rename(b"o", b"a\x00b"))
    add("name_not_utf8", "A name is not UTF-8.", content=lambda d: d.rename(b"o", b"\xc3("))
    add(
        "file_of_no_record",
        "The index names a file that the record does not name.",
        content=lambda d: d.rename(b"rank_1.safetensors", b"rank_7.safetensors"),
    )
    add(
        "file_is_the_index",
        "A payload lies in the index itself.",
        content=lambda d: d.rename(b"rank_1.safetensors", INDEX.encode()),
    )
    # versions
    add(
        "required_feature",
        "A required feature that nobody knows.",
        content=about(required_features=["org.example.delta"]),
    )
    add("later_major", "Version 2.0 of the index.", content=about(format="2.0"))
    add("id_of_another_save", "The index is of another save.", content=about(id="f" * 32))
    add(
        "backend_of_another",
        "metadata.json names another backend.",
        files=lambda d: d.marker.update({"sharded_backend": "torch_dist"}),
    )
    add("version_2", "metadata.json names version 2.", files=lambda d: d.marker.update({"sharded_backend_version": 2}))
    add(
        "record_format_4", "The record has a format that is not known.", record=lambda d: d.record.update({"format": 4})
    )

    # parts of the index
    def parts(change: Callable[[list[Part]], object]) -> Callable[[Draft], None]:
        return lambda draft: cut_index(draft, 1, page=1, change=change)

    def in_part(name: str, where: Any, value: int) -> Callable[[Draft], None]:
        return parts(lambda found: found[0].columns[name].__setitem__(where, value))

    add("part_with_hole", "A box of a part begins one row too late.", content=in_part("box_offset", (1, 0), 3))
    add("part_of_no_file", "A row of a part has the ninth of two files.", content=in_part("box_file", 1, 8))
    add("part_head_differs", "The rows of a part begin 8 bytes later than the index says.", content=parts(_shift_head))
    add(
        "part_row_of_another_size",
        "The rows of a part have a byte more than their fields.",
        content=parts(lambda found: found[0].about.update(row=["U8", "U8", "U8", "I32"])),
        files=_narrow_row,
    )
    add("part_reach_differs", "A box reaches further than its part says.", content=in_part("tensor_reach", (0, 0), 1))
    add("part_page_differs", "A page begins elsewhere than its part says.", content=in_part("page_offset", (1, 0), 1))
    add(
        "part_with_name_of_another",
        "Two parts have a tensor of the same name.",
        content=parts(lambda found: found[1].columns.update({n: found[0].columns[n] for n in ("text", "text_end")})),
    )
    add("part_of_no_record", "The index names a part that the record does not name.", content=_unnamed_part)
    add("part_twice", "The index names a part twice.", content=_part_twice)

    # headers
    add("header_key_twice", "A column is there twice.", files=_column_twice)
    add(
        "index_field_twice",
        "A field of the index's JSON is there twice.",
        files=lambda d: _rewrite_header(
            d,
            INDEX,
            lambda h: h["__metadata__"].update({"shardckpt": h["__metadata__"]["shardckpt"][:-1] + ', "step": 1}'}),
        ),
    )
    add("nested_too_deep", "An extension has 600 lists in one another.", content=about(**{"org.example": _nested(600)}))
    add("header_overlap", "Two columns share bytes of the index.", files=lambda d: _rewrite_header(d, INDEX, _overlap))
    add(
        "header_hole",
        "Eight bytes of the index belong to no column.",
        files=lambda d: d.files.update({INDEX: d.files[INDEX] + bytes(8)}),
    )
    add(
        "header_longer_than_file",
        "The index says that its header has 2^63 bytes.",
        files=lambda d: d.files.update({INDEX: struct.pack("<Q", 1 << 63) + d.files[INDEX][8:]}),
    )
    # the record, digests, files
    add("no_marker", "There is no metadata.json.", after=lambda d: d.files.pop(MARKER))
    add(
        "record_changed",
        "A byte of the record is not that of its digest.",
        after=lambda d: d.files.update({RECORD: d.files[RECORD].replace(b'"world_size": 1', b'"world_size": 2')}),
    )
    add("digest_of_data_differs", "A byte of a tensor has changed.", after=lambda d: _flip(d, FILE))
    add("digest_of_index_differs", "A byte of the index has changed.", after=lambda d: _flip(d, INDEX))
    add("digest_of_table_differs", "A file's segments are not those of its digest.", record=_other_table)
    add("lengths_inflate", "A table of 3 KB inflates to 2 MB of lengths.", record=_bomb)
    add("file_missing", "A file that the record names is not there.", after=lambda d: d.files.pop("rank_1.safetensors"))
    add(
        "file_truncated",
        "The last byte of a file is missing.",
        after=lambda d: d.files.update({FILE: d.files[FILE][:-1]}),
    )
    add(
        "file_longer",
        "A file has a byte more than the record says.",
        after=lambda d: d.files.update({FILE: d.files[FILE] + b" "}),
    )
    add("index_missing", "There is no index, and the record names none.", files=lambda d: d.files.pop(INDEX))
    add("common_missing", "There is no common state, and the record names none.", files=lambda d: d.files.pop(COMMON))
    add(
        "file_is_a_link",
        "A file is a link to one with the same bytes.",
        after=lambda d: d.files.update({"elsewhere.bin": d.files[FILE], FILE: Link("elsewhere.bin")}),
    )
    add(
        "file_name_leaves",
        "A file is named ../NAME/rank_0.safetensors.",
        record=lambda d: d.record["files"][2].update({"name": f"../file_name_leaves/{FILE}"}),
    )
    return entries


def _rng() -> bytes:
    tree = {"seed": 5, "state": {"$": "tensor", "v": "0"}}
    return pack_safetensors([("0", "U8", [24], bytes(range(24)))], {"tree": json.dumps(tree)})


def _plain() -> bytes:
    return pack_safetensors([("x", "F32", [2], bytes(8))], {"format": "pt"})


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth - 1):
        found = [found]
    return found


def _rewrite_header(draft: Draft, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    data = draft.files[name]
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    change(header)
    draft.files[name] = join_header(json.dumps(header).encode(), data[end:])


def _overlap(header: dict[str, Any]) -> None:
    begin, end = header["box_start"]["data_offsets"]
    header["box_start"]["data_offsets"] = [begin - 2, end - 2]


def _column_twice(draft: Draft) -> None:
    data = draft.files[INDEX]
    end = 8 + struct.unpack("<Q", data[:8])[0]
    text = data[8:end].rstrip()
    entry = json.dumps(json.loads(text)["box_start"]).encode()
    draft.files[INDEX] = join_header(text[:-1] + b', "box_start": ' + entry + b"}", data[end:])


def _claim_all(draft: Draft) -> None:
    draft.columns["tensor_shape"][0] = 1 << 21
    draft.columns["box_extent"][0], draft.columns["box_extent"][1] = (1 << 20, 1 << 21), (1 << 20, 1 << 21)
    draft.columns["box_offset"][1] = 1 << 20, 0


def _swap_boxes(draft: Draft) -> None:
    for name in ("box_offset", "box_extent", "box_file", "box_start"):
        draft.columns[name][:2] = draft.columns[name][1::-1].copy()


def _size_of_no_axis(draft: Draft) -> None:
    draft.columns["tensor_shape"][1], draft.columns["box_extent"][2] = (3, 2), (3, 2)


def _one_more_axis(draft: Draft) -> None:
    for name, fill in (("tensor_shape", 1), ("box_offset", 0), ("box_extent", 1)):
        draft.columns[name] = np.pad(draft.columns[name], ((0, 0), (0, 1)), constant_values=fill)
    draft.columns["tensor_axes"][0] = 65


def _shift(draft: Draft, nbytes: int) -> None:
    draft.columns["box_start"][2] += nbytes


def _share(draft: Draft) -> None:
    draft.columns["box_start"][2], draft.columns["box_file"][2] = draft.columns["box_start"][0], 0


def _share_with_object(draft: Draft) -> None:
    draft.columns["object_start"][0], draft.columns["object_file"][0] = draft.columns["box_start"][0], 0


def _shift_head(parts: list[Part]) -> None:
    parts[0].shift = -8


def _narrow_row(draft: Draft) -> None:
    name = "index_0.safetensors"
    _rewrite_header(
        draft,
        name,
        lambda h: h["__metadata__"].update({"shardckpt": h["__metadata__"]["shardckpt"].replace('"I32"', '"I16"')}),
    )


def _unnamed_part(draft: Draft) -> None:
    cut_index(draft, 1)
    draft.rename(b"index_1.safetensors", b"index_7.safetensors")


def _part_twice(draft: Draft) -> None:
    cut_index(draft, 1)
    draft.columns["part"][1], draft.columns["part_head"][1] = (draft.columns[n][0] for n in ("part", "part_head"))


def _three_strings(draft: Draft) -> None:
    draft.columns["tensor"] = np.repeat(draft.columns["tensor"], [1, 2], axis=1)


def _flip(draft: Draft, name: str) -> None:
    data = bytearray(draft.files[name])
    data[-70 if name == FILE else -1] ^= 1
    draft.files[name] = bytes(data)


def _other_table(draft: Draft) -> None:
    row = draft.record["files"][2]
    size = row["size"]
    row["segments"] = digest_table(draft.files[row["name"]], [64, size - 64], "crc32")[1]


def _move_tables(draft: Draft) -> None:
    draft.record["format"] = 3
    for row in draft.record["files"]:
        # of one segment: its length and its crc32
        content = draft.files[row["name"]]
        row["segments"] = 8
        draft.files[f"{row['name']}.digests"] = struct.pack("<II", len(content), zlib.crc32(content))


def _bomb(draft: Draft) -> None:
    lengths = bytes(2 << 20)
    row = draft.record["files"][2]
    row["segments"] = base64.b64encode(zlib.compress(lengths, 9)).decode()
    row["digest"] = hashlib.sha256(lengths).hexdigest()


def list_entries() -> list[Entry]:
    """Return all entries."""
    return [*list_valid(), *list_invalid()]


def describe_entry(entry: Entry) -> dict[str, Any]:
    """Return what ``corpus.json`` has of an entry."""
    found: dict[str, Any] = {"name": entry.name, "verdict": "invalid", "why": entry.why}
    if entry.tensors is not None:
        found |= {"verdict": "valid", "tensors": entry.tensors, "objects": entry.objects}
    return found | ({"needs": entry.needs} if entry.needs else {})


def write_corpus() -> None:
    """Write ``corpus.zip`` and ``corpus.json``."""
    entries = list_entries()
    with zipfile.ZipFile(HERE / "corpus.zip", "w") as archive:
        for entry in entries:
            for name, data in entry.files.items():
                info = zipfile.ZipInfo(f"{entry.name}/{name}", (2026, 1, 1, 0, 0, 0))
                info.create_system, info.compress_type = 3, zipfile.ZIP_DEFLATED  # of Unix: links
                mode = stat.S_IFLNK | 0o777 if isinstance(data, Link) else stat.S_IFREG | 0o644
                info.external_attr = mode << 16
                archive.writestr(info, data.target if isinstance(data, Link) else data, compresslevel=9)
    lines = ",\n".join(json.dumps(describe_entry(entry)) for entry in entries)
    (HERE / "corpus.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    write_corpus()
