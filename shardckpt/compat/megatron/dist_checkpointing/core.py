"""megatron.core.dist_checkpointing.core."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields

from shardckpt.dist_checkpointing import check_is_distributed_checkpoint
from shardckpt.engine.locations import locate, locate_local
from shardckpt.errors import CheckpointingException
from shardckpt.manifest.models import Marker
from shardckpt.manifest.names import MARKER_LIMIT
from shardckpt.manifest.names import MARKER_NAME as CONFIG_FNAME
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import parse_file
from shardckpt.storage.filesystem import sync_directory, wrap_os_errors
from shardckpt.storage.writer import CheckpointWriter

_UNFINISHED = f"{CONFIG_FNAME}.unfinished"


@dataclass
class CheckpointingConfig:
    """The content of ``metadata.json``."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def maybe_load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig | None:
    """Return the content of ``metadata.json`` without unknown fields; None if there is none."""
    path = locate(checkpoint_dir, get_plugin_manager()) / CONFIG_FNAME
    if not path.exists():
        return None
    found = parse_file(Marker.parse, path, MARKER_LIMIT)
    return CheckpointingConfig(**found.model_dump(include={field.name for field in fields(CheckpointingConfig)}))


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write ``metadata.json`` atomically. A save writes its own: this is for directories of other origin."""
    directory = locate_local(checkpoint_dir, "write metadata.json into")
    with wrap_os_errors("write to", directory):
        # left by an attempt that was interrupted
        (directory / _UNFINISHED).unlink(missing_ok=True)
    with CheckpointWriter(directory, 0) as writer:
        writer.write(_UNFINISHED, Marker(**asdict(config)).dump())
    with wrap_os_errors(f"rename {_UNFINISHED} to", directory / CONFIG_FNAME):
        os.rename(directory / _UNFINISHED, directory / CONFIG_FNAME)
    sync_directory(directory)


__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]
