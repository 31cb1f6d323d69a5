"""Files of checkpoints: reads and writes with digests, staging directories, and the rename that commits them."""

from shardckpt.storage.abilities import can_rename, has_local_files, on_store
from shardckpt.storage.buffers import BLOCK_BYTES, Buffer, BufferPool, block_pool
from shardckpt.storage.columns import Column, Columns, pack
from shardckpt.storage.commit import (
    check_target,
    commit_staging,
    create_staging,
    discard_staging,
    is_free,
    is_staging,
    list_replaced_checkpoints,
    list_staging_directories,
    publish_staging,
    replace_target,
    staging_directory,
    staging_path,
)
from shardckpt.storage.digest import (
    SEGMENT_BYTES,
    SMALL_RECORD,
    Digest,
    Segments,
    digest_function,
    digest_vote,
    negotiate_digest,
)
from shardckpt.storage.direct import count_parallel_files
from shardckpt.storage.directory import (
    RelativePath,
    detect_replacement,
    is_read_again,
    open_directory,
    real_path,
    replaced_error,
    retry_if_replaced,
    was_replaced,
)
from shardckpt.storage.filesystem import (
    allocated_bytes,
    check_file_name,
    close_file,
    file_size,
    is_there,
    naming,
    open_existing,
    open_new,
    read_file,
    read_into,
    sync_directory,
    sync_file,
)
from shardckpt.storage.identity import has_changed, is_of_save
from shardckpt.storage.leftovers import (
    Leftover,
    find_leftovers,
    find_spools,
    freed_bytes,
    remove_free,
    remove_leftover,
    spool_folder,
    why_kept,
)
from shardckpt.storage.new_file import NewFile
from shardckpt.storage.opcodes import check_pickle
from shardckpt.storage.owner import Owner, claim, release
from shardckpt.storage.packed_shards import PackedShards
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.remote import ListsFolders, RemoteFolder, RemotePath, attempt, mask_password
from shardckpt.storage.removal import clear_tombstones, delete_checkpoint, is_half_deleted, make_tombstone
from shardckpt.storage.rewrite import KeptItem, rewrite_file
from shardckpt.storage.scatter import Source, StoredArray, read_box
from shardckpt.storage.spans import Elements, Span, cut
from shardckpt.storage.staged_files import refuse_unrecorded
from shardckpt.storage.staging_names import NAME_MAX, STAGING, new_save_id, parse_temporary, stem, temporary_name
from shardckpt.storage.stream import FileStream, WriterPool
from shardckpt.storage.upload import Upload, is_under_way, upload_files
from shardckpt.storage.workers import Workers
from shardckpt.storage.writer import CheckpointWriter, FileWriter

__all__ = [
    "BLOCK_BYTES",
    "NAME_MAX",
    "SEGMENT_BYTES",
    "SMALL_RECORD",
    "STAGING",
    "Buffer",
    "BufferPool",
    "CheckpointReader",
    "CheckpointWriter",
    "Column",
    "Columns",
    "Digest",
    "Elements",
    "FileStream",
    "FileWriter",
    "KeptItem",
    "Leftover",
    "ListsFolders",
    "NewFile",
    "Owner",
    "PackedShards",
    "RelativePath",
    "RemoteFolder",
    "RemotePath",
    "Segments",
    "Source",
    "Span",
    "StoredArray",
    "Upload",
    "Workers",
    "WriterPool",
    "allocated_bytes",
    "attempt",
    "block_pool",
    "can_rename",
    "check_file_name",
    "check_pickle",
    "check_target",
    "claim",
    "clear_tombstones",
    "close_file",
    "commit_staging",
    "count_parallel_files",
    "create_staging",
    "cut",
    "delete_checkpoint",
    "detect_replacement",
    "digest_function",
    "digest_vote",
    "discard_staging",
    "file_size",
    "find_leftovers",
    "find_spools",
    "freed_bytes",
    "has_changed",
    "has_local_files",
    "is_free",
    "is_half_deleted",
    "is_of_save",
    "is_read_again",
    "is_staging",
    "is_there",
    "is_under_way",
    "list_replaced_checkpoints",
    "list_staging_directories",
    "make_tombstone",
    "mask_password",
    "naming",
    "negotiate_digest",
    "new_save_id",
    "on_store",
    "open_directory",
    "open_existing",
    "open_new",
    "pack",
    "parse_temporary",
    "publish_staging",
    "read_box",
    "read_file",
    "read_into",
    "real_path",
    "refuse_unrecorded",
    "release",
    "remove_free",
    "remove_leftover",
    "replace_target",
    "replaced_error",
    "retry_if_replaced",
    "rewrite_file",
    "spool_folder",
    "staging_directory",
    "staging_path",
    "stem",
    "sync_directory",
    "sync_file",
    "temporary_name",
    "upload_files",
    "was_replaced",
    "why_kept",
]
