"""Complete or absent: staging directories and uploads, the step that commits them, removals, and what a kill leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt.commit.commit import (
        check_target,
        commit_staging,
        create_staging,
        discard_staging,
        find_foreign,
        is_free,
        list_replaced_checkpoints,
        list_staging_directories,
        publish_staging,
        replace_target,
        staging_directory,
        staging_path,
    )
    from shardckpt.commit.deletion import delete_objects
    from shardckpt.commit.holds import (
        HOLDS_NAME,
        MARK_SECONDS,
        Hold,
        Holds,
        describe_process,
        find_holds_beside,
        hold_place,
        make_hold,
    )
    from shardckpt.commit.leftovers import (
        create_spool,
        find_leftovers,
        find_spools,
        freed_bytes,
        remove_free,
        remove_leftover,
        spool_folder,
        why_kept,
    )
    from shardckpt.commit.owner import Owner, claim_name, release_name
    from shardckpt.commit.removal import clear_tombstones, delete_checkpoint, is_half_deleted, make_tombstone
    from shardckpt.commit.resume import adopt_staging
    from shardckpt.commit.small_files import put_small_file, remove_temporaries
    from shardckpt.commit.staging_names import (
        NAME_MAX,
        STAGING,
        Leftover,
        get_save_id,
        is_temporary,
        new_save_id,
        parse_temporary,
        stem,
        temporary_name,
    )
    from shardckpt.commit.unfinished import Unfinished, find_unfinished, remove_unfinished, why_unfinished_kept
    from shardckpt.commit.upload import Upload, delete_if_failed, is_under_way, open_stream, upload_files

__getattr__ = lazy_getattr(
    __name__,
    {
        "commit": (
            "check_target",
            "commit_staging",
            "create_staging",
            "discard_staging",
            "find_foreign",
            "is_free",
            "list_replaced_checkpoints",
            "list_staging_directories",
            "publish_staging",
            "replace_target",
            "staging_directory",
            "staging_path",
        ),
        "deletion": ("delete_objects",),
        "holds": (
            "HOLDS_NAME",
            "MARK_SECONDS",
            "Hold",
            "Holds",
            "describe_process",
            "find_holds_beside",
            "hold_place",
            "make_hold",
        ),
        "leftovers": (
            "create_spool",
            "find_leftovers",
            "find_spools",
            "freed_bytes",
            "remove_free",
            "remove_leftover",
            "spool_folder",
            "why_kept",
        ),
        "owner": (
            "Owner",
            "claim_name",
            "release_name",
        ),
        "removal": (
            "clear_tombstones",
            "delete_checkpoint",
            "is_half_deleted",
            "make_tombstone",
        ),
        "resume": ("adopt_staging",),
        "small_files": ("put_small_file", "remove_temporaries"),
        "staging_names": (
            "NAME_MAX",
            "STAGING",
            "Leftover",
            "get_save_id",
            "is_temporary",
            "new_save_id",
            "parse_temporary",
            "stem",
            "temporary_name",
        ),
        "unfinished": (
            "Unfinished",
            "find_unfinished",
            "remove_unfinished",
            "why_unfinished_kept",
        ),
        "upload": (
            "Upload",
            "delete_if_failed",
            "is_under_way",
            "open_stream",
            "upload_files",
        ),
    },
)

__all__ = [
    "HOLDS_NAME",
    "MARK_SECONDS",
    "NAME_MAX",
    "STAGING",
    "Hold",
    "Holds",
    "Leftover",
    "Owner",
    "Unfinished",
    "Upload",
    "adopt_staging",
    "check_target",
    "claim_name",
    "clear_tombstones",
    "commit_staging",
    "create_spool",
    "create_staging",
    "delete_checkpoint",
    "delete_if_failed",
    "delete_objects",
    "describe_process",
    "discard_staging",
    "find_foreign",
    "find_holds_beside",
    "find_leftovers",
    "find_spools",
    "find_unfinished",
    "freed_bytes",
    "get_save_id",
    "hold_place",
    "is_free",
    "is_half_deleted",
    "is_temporary",
    "is_under_way",
    "list_replaced_checkpoints",
    "list_staging_directories",
    "make_hold",
    "make_tombstone",
    "new_save_id",
    "open_stream",
    "parse_temporary",
    "publish_staging",
    "put_small_file",
    "release_name",
    "remove_free",
    "remove_leftover",
    "remove_temporaries",
    "remove_unfinished",
    "replace_target",
    "spool_folder",
    "staging_directory",
    "staging_path",
    "stem",
    "temporary_name",
    "upload_files",
    "why_kept",
    "why_unfinished_kept",
]
