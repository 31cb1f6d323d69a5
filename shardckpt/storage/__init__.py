"""Bytes of checkpoints: files and objects, read and written with digests.

An author of a strategy needs the 33 names in README.md's table; the others are for the rooms above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr
from shardckpt.manifest import MOST_LEVELS, parse_json  # the records' room needs it, too

if TYPE_CHECKING:
    from shardckpt.storage.abilities import can_rename, has_local_files, on_store
    from shardckpt.storage.buffers import BLOCK_BYTES, Buffer, BufferPool, block_pool
    from shardckpt.storage.column_file import ColumnFile
    from shardckpt.storage.columns import INTEGERS, Column, Columns, PackedColumns, narrow_dtype, pack_columns
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
    from shardckpt.storage.file_writer import FileWriter
    from shardckpt.storage.filesystem import (
        check_file_name,
        file_size,
        is_there,
        make_folders,
        name_siblings,
        open_new,
        put_file,
        refuse_linked_folders,
        sync_directory,
        sync_file,
        sync_tree,
        wrap_os_errors,
    )
    from shardckpt.storage.fingerprint_file import combine_fingerprints, parse_fingerprints
    from shardckpt.storage.identity import has_changed, is_of_save
    from shardckpt.storage.input_file import open_existing, read_file
    from shardckpt.storage.journal import JOURNAL_NAME, NOTE_BYTES, FileProgress, Journal
    from shardckpt.storage.memory_budget import (
        LEAST_READING,
        LEAST_WRITING,
        check_memory_budget,
        find_least_upload,
        fit_parts,
        limit_uploads,
        parse_memory_budget,
        parse_size,
        plan_upload,
        show_budget,
        show_mib,
    )
    from shardckpt.storage.new_file import NewFile
    from shardckpt.storage.object_stream import ObjectStream
    from shardckpt.storage.packed_shards import PackedShards
    from shardckpt.storage.parse_cache import ParseCache
    from shardckpt.storage.places import find_url, list_folders, list_names, remove_file
    from shardckpt.storage.range_reads import RangeRead
    from shardckpt.storage.reader import CheckpointReader, Crcs, Take
    from shardckpt.storage.recorded_file import read_recorded_file
    from shardckpt.storage.remote import (
        HasFolders,
        ListsFolders,
        RemoteFolder,
        RemotePath,
        attempt,
        list_objects,
    )
    from shardckpt.storage.resumable import ResumableWriter
    from shardckpt.storage.safetensors_header import (
        HEADER_LIMIT,
        LENGTH_BYTES,
        FileEntry,
        HeaderEntry,
        encode_header,
        header_length,
        parse_head,
    )
    from shardckpt.storage.scatter import Source, StoredArray, find_range, read_box
    from shardckpt.storage.shared_file import SharedFile, cut_segments
    from shardckpt.storage.spans import Elements, Span, cut_spans
    from shardckpt.storage.staged_files import FilePart, refuse_unrecorded
    from shardckpt.storage.store_abilities import (
        AbortsUploads,
        CopiesObjects,
        CreatesObjects,
        DeletesMany,
        LimitsUploads,
        ObjectWriter,
        PendingUpload,
        ReadsInto,
        ReplacesObjects,
        StreamsWrites,
        TellsTimes,
    )
    from shardckpt.storage.store_errors import find_problem, mask_password, mask_secrets
    from shardckpt.storage.stream import FileStream, WriterPool
    from shardckpt.storage.sums import (
        add_sums,
        pack_fingerprints,
        read_fingerprints,
        split_sums,
        sum_shards,
    )
    from shardckpt.storage.workers import Workers
    from shardckpt.storage.writer import CheckpointWriter, WriteTimes

__getattr__ = lazy_getattr(
    __name__,
    {
        "abilities": (
            "can_rename",
            "has_local_files",
            "on_store",
        ),
        "buffers": (
            "BLOCK_BYTES",
            "Buffer",
            "BufferPool",
            "block_pool",
        ),
        "column_file": ("ColumnFile",),
        "columns": (
            "INTEGERS",
            "Column",
            "Columns",
            "PackedColumns",
            "narrow_dtype",
            "pack_columns",
        ),
        "digest": (
            "SEGMENT_BYTES",
            "SMALL_RECORD",
            "Digest",
            "Segments",
            "digest_function",
            "digest_vote",
            "negotiate_digest",
        ),
        "direct": ("count_parallel_files",),
        "directory": (
            "RelativePath",
            "detect_replacement",
            "is_read_again",
            "open_directory",
            "real_path",
            "replaced_error",
            "retry_if_replaced",
            "was_replaced",
        ),
        "file_writer": ("FileWriter",),
        "fingerprint_file": ("combine_fingerprints", "parse_fingerprints"),
        "filesystem": (
            "check_file_name",
            "file_size",
            "is_there",
            "make_folders",
            "name_siblings",
            "open_new",
            "put_file",
            "refuse_linked_folders",
            "sync_directory",
            "sync_file",
            "sync_tree",
            "wrap_os_errors",
        ),
        "identity": (
            "has_changed",
            "is_of_save",
        ),
        "input_file": ("open_existing", "read_file"),
        "journal": (
            "JOURNAL_NAME",
            "NOTE_BYTES",
            "FileProgress",
            "Journal",
        ),
        "memory_budget": (
            "LEAST_READING",
            "LEAST_WRITING",
            "check_memory_budget",
            "find_least_upload",
            "fit_parts",
            "limit_uploads",
            "parse_memory_budget",
            "parse_size",
            "plan_upload",
            "show_budget",
            "show_mib",
        ),
        "new_file": ("NewFile",),
        "object_stream": ("ObjectStream",),
        "packed_shards": ("PackedShards",),
        "range_reads": ("RangeRead",),
        "places": ("find_url", "list_folders", "list_names", "remove_file"),
        "reader": (
            "CheckpointReader",
            "Crcs",
            "Take",
        ),
        "parse_cache": ("ParseCache",),
        "recorded_file": ("read_recorded_file",),
        "remote": (
            "HasFolders",
            "ListsFolders",
            "RemoteFolder",
            "RemotePath",
            "attempt",
            "list_objects",
        ),
        "resumable": ("ResumableWriter",),
        "safetensors_header": (
            "HEADER_LIMIT",
            "LENGTH_BYTES",
            "FileEntry",
            "HeaderEntry",
            "encode_header",
            "header_length",
            "parse_head",
        ),
        "scatter": (
            "Source",
            "StoredArray",
            "find_range",
            "read_box",
        ),
        "shared_file": (
            "SharedFile",
            "cut_segments",
        ),
        "spans": (
            "Elements",
            "Span",
            "cut_spans",
        ),
        "staged_files": (
            "FilePart",
            "refuse_unrecorded",
        ),
        "store_abilities": (
            "AbortsUploads",
            "CopiesObjects",
            "CreatesObjects",
            "DeletesMany",
            "LimitsUploads",
            "ObjectWriter",
            "PendingUpload",
            "ReadsInto",
            "ReplacesObjects",
            "StreamsWrites",
            "TellsTimes",
        ),
        "store_errors": ("find_problem", "mask_password", "mask_secrets"),
        "stream": (
            "FileStream",
            "WriterPool",
        ),
        "sums": (
            "add_sums",
            "pack_fingerprints",
            "read_fingerprints",
            "split_sums",
            "sum_shards",
        ),
        "workers": ("Workers",),
        "writer": (
            "CheckpointWriter",
            "WriteTimes",
        ),
    },
)

__all__ = [
    "BLOCK_BYTES",
    "HEADER_LIMIT",
    "INTEGERS",
    "JOURNAL_NAME",
    "LEAST_READING",
    "LEAST_WRITING",
    "LENGTH_BYTES",
    "MOST_LEVELS",
    "NOTE_BYTES",
    "SEGMENT_BYTES",
    "SMALL_RECORD",
    "AbortsUploads",
    "Buffer",
    "BufferPool",
    "CheckpointReader",
    "CheckpointWriter",
    "Column",
    "ColumnFile",
    "Columns",
    "CopiesObjects",
    "Crcs",
    "CreatesObjects",
    "DeletesMany",
    "Digest",
    "Elements",
    "FileEntry",
    "FilePart",
    "FileProgress",
    "FileStream",
    "FileWriter",
    "HasFolders",
    "HeaderEntry",
    "Journal",
    "LimitsUploads",
    "ListsFolders",
    "NewFile",
    "ObjectStream",
    "ObjectWriter",
    "PackedColumns",
    "PackedShards",
    "ParseCache",
    "PendingUpload",
    "RangeRead",
    "ReadsInto",
    "RelativePath",
    "RemoteFolder",
    "RemotePath",
    "ReplacesObjects",
    "ResumableWriter",
    "Segments",
    "SharedFile",
    "Source",
    "Span",
    "StoredArray",
    "StreamsWrites",
    "Take",
    "TellsTimes",
    "Workers",
    "WriteTimes",
    "WriterPool",
    "add_sums",
    "attempt",
    "block_pool",
    "can_rename",
    "check_file_name",
    "check_memory_budget",
    "combine_fingerprints",
    "count_parallel_files",
    "cut_segments",
    "cut_spans",
    "detect_replacement",
    "digest_function",
    "digest_vote",
    "encode_header",
    "file_size",
    "find_least_upload",
    "find_problem",
    "find_range",
    "find_url",
    "fit_parts",
    "has_changed",
    "has_local_files",
    "header_length",
    "is_of_save",
    "is_read_again",
    "is_there",
    "limit_uploads",
    "list_folders",
    "list_names",
    "list_objects",
    "make_folders",
    "mask_password",
    "mask_secrets",
    "name_siblings",
    "narrow_dtype",
    "negotiate_digest",
    "on_store",
    "open_directory",
    "open_existing",
    "open_new",
    "pack_columns",
    "pack_fingerprints",
    "parse_fingerprints",
    "parse_head",
    "parse_json",
    "parse_memory_budget",
    "parse_size",
    "plan_upload",
    "put_file",
    "read_box",
    "read_file",
    "read_fingerprints",
    "read_recorded_file",
    "real_path",
    "refuse_linked_folders",
    "refuse_unrecorded",
    "remove_file",
    "replaced_error",
    "retry_if_replaced",
    "show_budget",
    "show_mib",
    "split_sums",
    "sum_shards",
    "sync_directory",
    "sync_file",
    "sync_tree",
    "was_replaced",
    "wrap_os_errors",
]
