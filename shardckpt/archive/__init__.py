"""Write ``torch.save`` archives, and read them without ``torch.load``: pickles go through an allow-list."""

from shardckpt.archive.lazy_tensors import LazyTensor
from shardckpt.archive.objects import check_loadable, decode_object, encode_object, make_archive
from shardckpt.archive.payload import StoredPayload
from shardckpt.archive.pickle_policy import describe
from shardckpt.archive.reader import Archive
from shardckpt.archive.tensor_pickles import resolve_lazy_view
from shardckpt.archive.unpickle import load_metadata
from shardckpt.archive.writer import ARCHIVE_ALIGN, make_frame, make_frame_of_length, row_major_strides

__all__ = [
    "ARCHIVE_ALIGN",
    "Archive",
    "LazyTensor",
    "StoredPayload",
    "check_loadable",
    "decode_object",
    "describe",
    "encode_object",
    "load_metadata",
    "make_archive",
    "make_frame",
    "make_frame_of_length",
    "resolve_lazy_view",
    "row_major_strides",
]
