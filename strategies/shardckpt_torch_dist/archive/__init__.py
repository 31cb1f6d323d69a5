"""Write ``torch.save`` archives, and read them without ``torch.load``: pickles go through an allow-list."""

from shardckpt_torch_dist.archive.pickle_policy import brief
from shardckpt_torch_dist.archive.pickling import archived, check_loadable, pickled
from shardckpt_torch_dist.archive.reader import Archive, StoredPayload, load_bytes
from shardckpt_torch_dist.archive.tensor_pickles import resolved
from shardckpt_torch_dist.archive.unpickle import load_metadata
from shardckpt_torch_dist.archive.writer import ARCHIVE_ALIGN, fitted, of_length, row_major

__all__ = [
    "ARCHIVE_ALIGN",
    "Archive",
    "StoredPayload",
    "archived",
    "brief",
    "check_loadable",
    "fitted",
    "load_bytes",
    "load_metadata",
    "of_length",
    "pickled",
    "resolved",
    "row_major",
]
