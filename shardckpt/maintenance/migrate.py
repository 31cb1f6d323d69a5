"""Rewriting a checkpoint of an old version as a newer one, through a plugin's migration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed import Comm
from shardckpt.engine import Identity, Operation, commit_files, locate
from shardckpt.errors import VersionTooOldError
from shardckpt.plugins import StrategyAction, hold_checkpoint, host
from shardckpt.storage import CheckpointReader, retry_if_replaced

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from shardckpt.plugins import PluginHost
    from shardckpt.storage import CheckpointWriter


def migrate_checkpoint(
    old: str | os.PathLike[str], new: str | os.PathLike[str], to: int | None = None
) -> tuple[str, int, int]:
    """Write the checkpoint at ``old`` as a newer version at ``new``, whole or not at all.

    Args:
        old: The checkpoint, or its URL; it stays as it is.
        new: Directory or URL of the rewritten one: absent or empty.
        to: Version to write; by default the newest that there is a migration to.

    Returns:
        Backend, version of the old, version of the new.

    Raises:
        VersionTooOldError: no installed plugin has such a migration.
    """
    return retry_if_replaced(lambda: _migrated(locate(old, host()), locate(new, host()), to, host()), old)


def _migrated(source: Path, target: Path, to: int | None, plugins: PluginHost) -> tuple[str, int, int]:
    operation = Operation("migrate", target, Comm(alone=True), plugins)
    with operation.collective_span():
        place, manifest = hold_checkpoint(source, plugins)
        choices = plugins.registry.migrations(manifest.backend, manifest.version)
        chosen = next((m for m in choices if to in (None, m.to_version)), None)
        if chosen is None:
            found = ", ".join(f"{manifest.version} to {m.to_version}" for m in choices) or "none"
            raise VersionTooOldError(
                f"{source} is a {manifest.backend!r} checkpoint of version {manifest.version}; no installed plugin "
                f"has the migration that is asked for (installed for it: {found})"
            )
        oldest = _reader_of(manifest.backend, chosen.to_version, plugins)
        identity = Identity(manifest.backend, chosen.to_version, oldest)
        with CheckpointReader(place, manifest, verify=True) as reader:

            def write(writer: CheckpointWriter, _save_id: str) -> None:
                chosen.create().migrate(reader, writer)
                reader.check_unchanged()

            commit_files(operation, target, identity, write, overwrite=False)
    return manifest.backend, manifest.version, chosen.to_version


def _reader_of(backend: str, version: int, plugins: PluginHost) -> str:
    """The oldest release that reads the version, as its save strategy says."""
    entry = plugins.registry.find(StrategyAction.SAVE_SHARDED, backend, version)
    return str(entry.create().reader) if entry else ""


__all__ = ["migrate_checkpoint"]
