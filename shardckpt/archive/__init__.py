"""Write ``torch.save`` archives, and read them without ``torch.load``: pickles go through an allow-list."""

from shardckpt.archive.lazy_tensors import LazyTensor
from shardckpt.archive.objects import check_loadable, decode_object, encode_object, make_archive
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

__all__ = [
    "ARCHIVE_ALIGN",
    "Archive",
    "DeclaredTensor",
    "LazyTensor",
    "StoredPayload",
    "check_loadable",
    "check_pickle",
    "decode_object",
    "describe",
    "encode_object",
    "load_metadata",
    "make_archive",
    "make_frame",
    "make_frame_of_length",
    "make_state_dict_frame",
    "read_payload",
    "resolve_lazy_view",
    "row_major_strides",
]
