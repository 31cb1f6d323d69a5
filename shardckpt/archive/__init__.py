"""Write ``torch.save`` archives, and read them without ``torch.load``: pickles go through an allow-list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.archive.checksums import check_memory, clear_crcs, summed, write_crcs
    from shardckpt.archive.dict_names import list_dict_names
    from shardckpt.archive.lazy_reads import LazyReads, refuse_expanded
    from shardckpt.archive.lazy_tensors import LazyTensor
    from shardckpt.archive.objects import check_loadable, decode_object, encode_object, make_archive, refuse_unloadable
    from shardckpt.archive.opcodes import check_pickle
    from shardckpt.archive.payload import StoredPayload
    from shardckpt.archive.payload_reads import read_payload
    from shardckpt.archive.pickle_policy import describe
    from shardckpt.archive.reader import Archive
    from shardckpt.archive.tensor_pickles import resolve_lazy_view
    from shardckpt.archive.unpickle import load_metadata
    from shardckpt.archive.writer import (
        ARCHIVE_ALIGN,
        DeclaredTensor,
        make_frame,
        make_frame_of_length,
        make_state_dict_frame,
        row_major_strides,
    )

# lazy: what an archive is made of can be looked at without torch, which takes seconds to import
__getattr__ = lazy_getattr(
    __name__,
    {
        "checksums": ("check_memory", "clear_crcs", "summed", "write_crcs"),
        "dict_names": ("list_dict_names",),
        "lazy_reads": ("LazyReads", "refuse_expanded"),
        "lazy_tensors": ("LazyTensor",),
        "objects": ("check_loadable", "decode_object", "encode_object", "make_archive", "refuse_unloadable"),
        "opcodes": ("check_pickle",),
        "payload": ("StoredPayload",),
        "payload_reads": ("read_payload",),
        "pickle_policy": ("describe",),
        "reader": ("Archive",),
        "tensor_pickles": ("resolve_lazy_view",),
        "unpickle": ("load_metadata",),
        "writer": (
            "ARCHIVE_ALIGN",
            "DeclaredTensor",
            "make_frame",
            "make_frame_of_length",
            "make_state_dict_frame",
            "row_major_strides",
        ),
    },
)

__all__ = [
    "ARCHIVE_ALIGN",
    "Archive",
    "DeclaredTensor",
    "LazyReads",
    "LazyTensor",
    "StoredPayload",
    "check_loadable",
    "check_memory",
    "check_pickle",
    "clear_crcs",
    "decode_object",
    "describe",
    "encode_object",
    "list_dict_names",
    "load_metadata",
    "make_archive",
    "make_frame",
    "make_frame_of_length",
    "make_state_dict_frame",
    "read_payload",
    "refuse_expanded",
    "refuse_unloadable",
    "resolve_lazy_view",
    "row_major_strides",
    "summed",
    "write_crcs",
]
