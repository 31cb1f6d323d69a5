"""Encode the index of all ranks' plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.planning import make_column, make_matrix
from shardckpt.storage import PackedColumns
from shardckpt_safetensors.index_names import BLOCK_SCALES, CODECS, FEATURE, HEADER, UNALIGNED
from shardckpt_safetensors.index_parts import ALIGN, encode_tensors, find_alignment
from shardckpt_safetensors.names import StringTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.chunks import MergedPlan
    from shardckpt_safetensors.index_header import IndexHeader
    from shardckpt_safetensors.index_parts import PartHead


class EncodedIndex(NamedTuple):
    """The index of all ranks' plans, without the parts that differ between saves by one plan.

    Attributes:
        columns: The columns.
        dtypes: The names of the dtypes in them.
        codecs: The names of the codecs in them.
        features: The required features that they need.
        has_scales: Whether they say what scales a tensor.
    """

    columns: PackedColumns
    dtypes: list[str]
    codecs: list[str]
    features: list[str]
    has_scales: bool

    def to_bytes(self, header: IndexHeader) -> bytes:
        """Return the bytes of the index; its required features, scales, dtypes and codecs replace the header's."""
        others = {*header.optional_features} - {BLOCK_SCALES}
        optional = {*others, BLOCK_SCALES} if self.has_scales else others
        used = {
            "required_features": self.features,
            "optional_features": sorted(optional),
            "dtypes": self.dtypes,
            "codecs": self.codecs,
        }
        return self.columns.to_bytes({HEADER: header.model_copy(update=used).model_dump_json()})


def encode_index(plan: MergedPlan, parts: Mapping[str, PartHead] | None = None) -> EncodedIndex:
    """Encode the merged plan as the columns of the index, which FORMAT.md describes.

    In the merged plan the location of a box is file and start, that of an object file, start, size and codec. If the
    tensors are in parts, and not in the plan, ``parts`` has the head of each part, by name. Aliases and scales of the
    plan then have numbers of tensors of the parts.
    """
    strings = StringTable()
    files = make_column([strings.add(name) for name in plan.files])
    tensors, dtypes, boxes, locations = encode_tensors(plan, strings)
    objects = make_matrix([tuple(row) for row in plan.objects.values()], 4, 0)
    codecs = sorted(set(objects[:, 3].tolist()))
    columns = {
        "file": files,
        **tensors,
        "box_offset": boxes.offset,
        "box_extent": boxes.extent,
        "box_file": locations[:, 0],
        "box_start": locations[:, 1],
        "alias": strings.add_names(plan.aliases),
        "alias_tensor": make_column([*plan.aliases.values()]),
        "object": strings.add_names(plan.objects),
        "object_codec": torch.searchsorted(make_column(codecs), objects[:, 3].contiguous()),
        "object_file": objects[:, 0],
        "object_start": objects[:, 1],
        "object_nbytes": objects[:, 2],
    }
    heads = [] if parts is None else [*parts.values()]
    if plan.scales:
        most = max([boxes.offset.shape[1], *(head.axes for head in heads)])
        columns |= {
            "scaled": make_column([*plan.scales]),
            "scaled_by": make_column([by for by, _ in plan.scales.values()]),
            "scaled_block": make_matrix([block for _, block in plan.scales.values()], most, 1),
        }
    if parts is not None:
        columns |= {
            "part": make_column([strings.add(name) for name in parts]),
            "part_head": make_column([head.nbytes for head in heads]),
        }
    packed = PackedColumns.pack({**strings.columns(), **columns})
    features = [] if parts is None else [FEATURE]
    if {find_alignment(plan.locations), *(head.unit for head in heads)} != {ALIGN}:
        features.append(UNALIGNED)
    return EncodedIndex(packed, dtypes, [CODECS[number] for number in codecs], features, bool(plan.scales))
