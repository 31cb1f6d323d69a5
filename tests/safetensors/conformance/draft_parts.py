"""A draft whose index is in parts, written from FORMAT.md alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.safetensors.conformance.draft import WIDTHS, Draft, narrow, pack_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BOX = ("box_offset", "box_extent", "box_file", "box_start")


@dataclass
class Part:
    """A part that is being written.

    Attributes:
        about: Its JSON.
        columns: Its columns by name, with those of boxes in place of ``box``.
        shift: Bytes by which ``part_head`` is wrong.
        unit: Bytes by which its rows count the starts of payloads.
    """

    about: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    shift: int = 0
    unit: int = 64

    def pack(self) -> tuple[bytes, int, int]:
        """Return the file, the bytes before its rows, and those of a page."""
        fields = [values if values.ndim > 1 else values[:, None] for values in map(self.columns.__getitem__, _BOX)]
        fields[3] = fields[3] // self.unit
        self.about.setdefault("row", [narrow(values) for values in fields])
        dtypes = [np.dtype(WIDTHS[kind]) for kind in self.about["row"]]
        cells = [
            np.frombuffer(v.astype(d).tobytes(), "u1").reshape(len(v), v.shape[1] * d.itemsize)
            for v, d in zip(fields, dtypes, strict=True)
        ]
        box = np.concatenate(cells, 1)
        columns = {name: values for name, values in self.columns.items() if name not in _BOX}
        order = sorted(columns, key=lambda name: -np.dtype(WIDTHS[narrow(columns[name])]).itemsize)
        entries: list[tuple[str, str, Sequence[int], bytes]] = [
            (name, narrow(v), v.shape, v.astype(WIDTHS[narrow(v)]).tobytes()) for name in order for v in [columns[name]]
        ]
        entries.append(("box", "U8", box.shape, box.tobytes()))
        data = pack_safetensors(entries, {"shardckpt": json.dumps(self.about)})
        return data, len(data) - box.size, box.shape[1] * max(1, self.about["page"])


def cut_index(draft: Draft, *bounds: int, page: int = 2, change: Callable[[list[Part]], object] | None = None) -> None:
    """Move the tensors of an index to parts.

    Args:
        draft: The checkpoint, before its index is written.
        bounds: The tensors at which the second part begins, the third, and so on.
        page: Rows of a page.
        change: Changes the parts before they are written.
    """
    col, text = draft.columns, draft.get_text()
    count = len(col["tensor_end"])
    places = [0, *col["tensor_end"].tolist()]
    required = draft.about.get("required_features", [])
    unit = 1 if "unaligned" in required else 64
    parts = []
    for low, high in itertools.pairwise([0, *bounds, count]):
        first, last = places[low], places[high]
        strings: dict[bytes, int] = {}
        pairs = [[strings.setdefault(text[n], len(strings)) for n in pair] for pair in col["tensor"][low:high].tolist()]
        axes = int(col["tensor_axes"][low:high].max(initial=0))
        offset, extent = (col[name][first:last, :axes] for name in _BOX[:2])
        ends = [place - first for place in places[low : high + 1]]
        reach = [extent[a:b].max(0, initial=0) for a, b in itertools.pairwise(ends)]
        columns = {
            "text_end": np.array(list(itertools.accumulate(map(len, strings))), "i8"),
            "tensor": np.array(pairs, "i8").reshape(-1, 2),
            "tensor_dtype": col["tensor_dtype"][low:high],
            "tensor_axes": col["tensor_axes"][low:high],
            "tensor_shape": col["tensor_shape"][low:high, :axes],
            "tensor_end": np.array(ends[1:], "i8"),
            "tensor_reach": np.array(reach, "i8").reshape(high - low, axes),
            "page_offset": offset[::page],
            "text": np.frombuffer(b"".join(strings), "u1").astype("i8"),
            "box_offset": offset,
            "box_extent": extent,
            **{name: col[name][first:last] for name in _BOX[2:]},
        }
        about = {"dtypes": draft.about["dtypes"], "page": page}
        parts.append(Part(about, {name: values.copy() for name, values in columns.items()}, unit=unit))
    if change is not None:
        change(parts)
    heads = []
    for number, part in enumerate(parts):
        name = f"index_{number}.safetensors"
        data, head, width = part.pack()
        draft.files[name] = data
        starts = [*range(head, len(data), width), len(data)]
        draft.lengths[name] = [head, *(b - a for a, b in itertools.pairwise(starts))]
        heads.append(head + part.shift)
    names = [f"index_{number}.safetensors".encode() for number in range(len(parts))]
    draft.set_text([*text, *names])
    for name in [name for name in col if name.startswith(("tensor", "box"))]:
        col[name] = np.zeros((0, *((2,) if name == "tensor" else (0,) * (col[name].ndim - 1))), "i8")
    col["part"] = np.arange(len(parts)) + len(text)
    col["part_head"] = np.array(heads)
    draft.about |= {"required_features": [*required, "index_parts"], "dtypes": []}
