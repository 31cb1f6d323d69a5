"""Write ``torch.save`` archives, and read them without ``torch.load``: pickles go through an allow-list."""

from shardckpt_torch_dist.archive.pickle_policy import describe
from shardckpt_torch_dist.archive.pickling import check_loadable, make_archive, make_loadable_archive
from shardckpt_torch_dist.archive.reader import Archive, StoredPayload, load_bytes
from shardckpt_torch_dist.archive.tensor_pickles import resolve_lazy_view
from shardckpt_torch_dist.archive.unpickle import load_metadata
from shardckpt_torch_dist.archive.writer import ARCHIVE_ALIGN, make_frame, make_frame_of_length, row_major_strides

__all__ = [
    "ARCHIVE_ALIGN",
    "Archive",
    "StoredPayload",
    "check_loadable",
    "describe",
    "load_bytes",
    "load_metadata",
    "make_archive",
    "make_frame",
    "make_frame_of_length",
    "make_loadable_archive",
    "resolve_lazy_view",
    "row_major_strides",
]
