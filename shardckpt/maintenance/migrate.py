"""Rewriting a checkpoint of an old version as a newer one, through a plugin's migration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed import Comm
from shardckpt.engine import Identity, Operation, commit_files, locate
from shardckpt.errors import VersionTooOldError
from shardckpt.plugins import StrategyAction, get_plugin_manager, hold_checkpoint
from shardckpt.storage import CheckpointReader, retry_if_replaced

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from shardckpt.plugins import PluginManager
    from shardckpt.storage import CheckpointWriter


def migrate_checkpoint(
    old: str | os.PathLike[str], new: str | os.PathLike[str], to: int | None = None
) -> tuple[str, int, int]:
    """Write the checkpoint at ``old`` as a newer version at ``new``, completely or not at all. Not collective.

    Args:
        old: The checkpoint's directory or URL; it is not changed.
        new: Directory or URL of the rewritten checkpoint: absent or empty.
        to: Version to write; by default the newest to which there is a migration.

    Returns:
        The backend, the old version, and the new version.

    Raises:
        VersionTooOldError: no installed plugin has a migration from its version to ``to``.
        CheckpointingException: the old checkpoint cannot be read, or the new one not written.
    """
    return retry_if_replaced(
        lambda: _migrate(
            locate(old, get_plugin_manager()), locate(new, get_plugin_manager()), to, get_plugin_manager()
        ),
        old,
    )


def _migrate(source: Path, target: Path, to: int | None, plugins: PluginManager) -> tuple[str, int, int]:
    operation = Operation("migrate", target, Comm(alone=True), plugins)
    with operation.collective_span():
        place, manifest = hold_checkpoint(source, plugins)
        choices = plugins.registry.migrations(manifest.backend, manifest.version)
        chosen = next((m for m in choices if to in (None, m.to_version)), None)
        if chosen is None:
            found = ", ".join(f"{manifest.version} to {m.to_version}" for m in choices) or "none"
            raise VersionTooOldError(
                f"{source} is a {manifest.backend!r} checkpoint of version {manifest.version}; no installed plugin "
                f"has the requested migration (installed migrations: {found})"
            )
        oldest = _reader_of(manifest.backend, chosen.to_version, plugins)
        identity = Identity(manifest.backend, chosen.to_version, oldest)
        with CheckpointReader(place, manifest, verify=True) as reader:

            def write(writer: CheckpointWriter, _save_id: str) -> None:
                chosen.create().migrate(reader, writer)
                reader.check_unchanged()

            commit_files(operation, target, identity, write, overwrite=False)
    return manifest.backend, manifest.version, chosen.to_version


def _reader_of(backend: str, version: int, plugins: PluginManager) -> str:
    """Return the oldest release that reads a version, according to its save strategy."""
    entry = plugins.registry.find(StrategyAction.SAVE_SHARDED, backend, version)
    return str(entry.create().reader) if entry else ""


__all__ = ["migrate_checkpoint"]
