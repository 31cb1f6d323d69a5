"""What the feature ``index_parts`` adds to a reader: tensors and boxes of other files become rows of the index."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.safetensors.conformance.strict_json import need

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]
_KINDS = {"U8": "u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
#: Columns of the index, and of a part: name, axes, the list in which they have places.
_INDEX = [("text", "c", ""), ("text_end", "S", ""), ("tensor_end", "T", ""), ("box_start", "B", ""), ("part", "K", "S")]
_INDEX += [("part_head", "K", ""), ("tensor_axes", "T", ""), ("tensor_shape", "TA", "")]
_PART = [*_INDEX[:3], ("tensor", "T2", "S"), ("tensor_dtype", "T", "dtypes"), *_INDEX[-2:]]
_PART += [("tensor_reach", "TA", ""), ("page_offset", "PA", ""), ("box", "Bw", "")]


def join_parts(read_columns: Callable[..., Any], top: Json, col: Json, text: list[str], data: dict[str, bytes]) -> None:
    """Add the tensors and boxes of the parts to an index: to its JSON, columns and strings.

    ``read_columns`` returns these three of any file; ``data`` are the bytes of the files by name.
    """
    _, found, _ = read_columns(data["index.safetensors"], _INDEX)
    names = [text[number] for number in found["part"]]
    files = {text[number] for number in col["file"]}
    taken = files | {"index.safetensors", "common.safetensors"}
    need(
        not col["tensor"] and len(taken | {*names}) == len(taken) + len(names), "tensors in the index, or a name twice"
    )
    need(all(name.endswith(".safetensors") for name in names), "the name of a part")
    for name, head in zip(names, found["part_head"], strict=True):
        own, part, strings = read_columns(data[name], _PART)
        axes = max(part["tensor_axes"], default=0)
        shapes = {"offset": (axes,), "extent": (axes,), "file": (), "start": ()}
        fields = [(n, _KINDS[kind], shape) for (n, shape), kind in zip(shapes.items(), own["row"], strict=True)]
        raw = np.array(part["box"], "u1").tobytes()
        need(raw == data[name][head:] and head + len(raw) == len(data[name]), "the rows are not where the part begins")
        need({len(row) for row in part["box"]} <= {np.dtype(fields).itemsize}, "rows of another size")
        rows = {n: np.frombuffer(raw, np.dtype(fields))[n] for n in shapes}
        need(all((rows[n] >= 0).all() for n in shapes) and (rows["file"] < len(files)).all(), "a place of a row")
        offset, extent, file, start = (rows[n].tolist() for n in shapes)
        need(type(own["page"]) is int and 0 < own["page"] < 1 << 31, "rows of a page")
        need(part["page_offset"] == offset[:: own["page"]], "the offset of a page")
        ends = pairwise([0, *part["tensor_end"]])
        reach = [[max(sizes) for sizes in zip([0] * axes, *extent[a:b], strict=True)] for a, b in ends]
        need(part["tensor_reach"] == reach, "the reach of a tensor")
        col["tensor"] += [[a + len(text), b + len(text)] for a, b in part["tensor"]]
        col["tensor_dtype"] += [number + len(top["dtypes"]) for number in part["tensor_dtype"]]
        col["tensor_end"] += [end + len(col["box_file"]) for end in part["tensor_end"]]
        col["box_start"] += [place * (1 if "unaligned" in top["required_features"] else 64) for place in start]
        added = {"box_offset": offset, "box_extent": extent, "box_file": file}
        for column in ("tensor_axes", "tensor_shape", *added):
            col[column] += {**part, **added}[column]
        text += strings
        top["dtypes"] = [*top["dtypes"], *own["dtypes"]]
