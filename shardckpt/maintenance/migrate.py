"""Rewriting a checkpoint of an old version as a newer one, through a plugin's migration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed.comm import Comm
from shardckpt.engine.integrity import refuse_damage
from shardckpt.engine.lazy import StoredCheckpoint
from shardckpt.engine.locations import is_same_place, locate, refuse_overlap
from shardckpt.engine.operation import Operation
from shardckpt.engine.space import Forecast, count_stored_bytes
from shardckpt.engine.transaction import CheckpointHeader, Transaction
from shardckpt.errors import CannotLoadError, CheckpointingException, PluginError, VersionTooOldError, listed
from shardckpt.maintenance.sources import open_staged
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.plugins.entries import StrategyAction
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import check_policy, choose_reader, hold_checkpoint
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.sums import read_fingerprints
from shardckpt.strategy import LoadContext
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shardckpt.manifest.models import Manifest
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.storage.writer import CheckpointWriter


def migrate_checkpoint(
    old: str | os.PathLike[str], new: str | os.PathLike[str], to: int | None = None, *, overwrite: bool = False
) -> tuple[str, int, int]:
    """Write a checkpoint as a newer version of its format, completely or not at all. Not collective.

    The values must stay: fingerprints that the old checkpoint has stored are compared with those of the new one, which
    gets them, too.

    Args:
        old: The checkpoint: a directory or a URL. It does not change, unless it is ``new``, too.
        new: The target, which must be absent or empty; with ``overwrite`` it may be a checkpoint, also ``old``.
        to: The version to write; by default the newest to which there is a migration.
        overwrite: Replace the checkpoint at ``new`` in one step, when the new one is complete and durable. Until then,
            and after any error, it is unchanged.

    Returns:
        The backend, the old version and the new version. They are equal if ``new`` is ``old`` and has the newest
        version that is installed: it stays as it is.

    Raises:
        UnknownBackendError: No installed plugin knows the backend.
        VersionTooOldError: No installed plugin has a migration from this version to ``to``.
        PluginError: No installed strategy reads the result; or it has other values than the stored fingerprints say;
            or it lacks items of the old index, which is compared where a strategy that reads it is installed.
        CannotLoadError: ``old`` has the newest version already, and ``new`` is another place.
        CheckpointingException: Any other failure. Nothing is committed.
    """
    check_annotated(migrate_checkpoint, locals())
    plugins = get_plugin_manager()
    return retry_if_replaced(
        lambda: _migrate(locate(old, plugins), locate(new, plugins), to, plugins, overwrite=overwrite), old
    )


def _no_migration_error(source: Path, manifest: Manifest, to: int | None, plugins: PluginManager) -> CannotLoadError:
    """Return the error for a checkpoint without a migration; the version gate's if nothing installed reads it."""
    migrations = plugins.registry.migrations(manifest.backend)
    newest = _find_newest_version(manifest, plugins)
    what = f"{source} is a {manifest.backend!r} checkpoint of version {manifest.version}"
    if (newest is None and not migrations) or (newest is not None and newest < manifest.version):
        choose_reader(source, manifest, plugins)  # raises, with the package to install
    if _is_newest(manifest, to, plugins):
        return CannotLoadError(
            f"{what} already, the newest that is installed: nothing was written. Use it as it is, or copy it; --to "
            "BACKEND writes another format"
        )
    found = ", ".join(f"{m.from_version} to {m.to_version}" for m in migrations) or "none"
    return VersionTooOldError(
        f"{what}; no installed plugin has a migration from version {manifest.version}"
        f"{'' if to is None else f' to {to}'} (installed migrations of {manifest.backend!r}: {found})"
    )


def _find_newest_version(manifest: Manifest, plugins: PluginManager) -> int | None:
    """Return the newest version of a checkpoint's backend that an installed strategy reads; None without one."""
    entries = plugins.registry.entries(StrategyAction.LOAD_SHARDED, manifest.backend)
    return max((entry.version for entry in entries), default=None)


def _is_newest(manifest: Manifest, to: int | None, plugins: PluginManager) -> bool:
    """Return whether a checkpoint has the version that is asked for, the newest that is installed."""
    return to in (None, manifest.version) and manifest.version == _find_newest_version(manifest, plugins)


def _migrate(
    source: Path, target: Path, to: int | None, plugins: PluginManager, *, overwrite: bool
) -> tuple[str, int, int]:
    operation = Operation("migrate", target, Comm(alone=True), plugins)
    with operation.collective_span():
        refuse_overlap([source], target, in_place=True)
        place, manifest = hold_checkpoint(source, plugins)
        check_policy(source, manifest)
        choices = plugins.registry.migrations(manifest.backend, manifest.version)
        chosen = next((m for m in choices if to in (None, m.to_version)), None)
        if chosen is None and is_same_place(source, target) and _is_newest(manifest, to, plugins):
            return manifest.backend, manifest.version, manifest.version
        if chosen is None:
            raise _no_migration_error(source, manifest, to, plugins)
        entry = plugins.registry.find(StrategyAction.SAVE_SHARDED, manifest.backend, chosen.to_version)
        oldest_reader = str(entry.create().reader) if entry else ""
        header = CheckpointHeader(manifest.backend, chosen.to_version, oldest_reader, manifest.lineage)
        record = manifest.record
        if record is not None:  # the bytes of another library's checkpoint are not counted
            operation.start_progress(lambda: sum(record.list_files().values()))
        with CheckpointReader(place, manifest, verify=True, crcs="parts") as reader:
            refuse_damage(source, reader, plugins)  # the rewritten files have digests
            index = _read_index(source, reader, plugins)
            before, fingerprints = _describe(index), read_fingerprints(reader)
            if before:
                fingerprints = {key: value for key, value in fingerprints.items() if key in before}
            needed = count_stored_bytes(index)
            if not index and record is not None:  # which bytes are tensors' is unknown: nearly all are
                needed = sum(record.list_files().values())

            def write(writer: CheckpointWriter, _save_id: str) -> None:
                migration = chosen.create()
                operation.attribute_to(migration)
                migration.migrate(reader, writer)
                writer.known_fingerprints.update(fingerprints)
                reader.check_unchanged()  # else the new checkpoint might be made of two saves, with correct digests

            def check(staging: Path, files: Path) -> None:
                what = f"the migration {chosen.name} of {source} to version {chosen.to_version}"
                _refuse_loss(what, before, fingerprints, staging, files, plugins)

            Transaction(operation, target, header, overwrite=overwrite, check=check, forecast=Forecast(needed)).run(
                write
            )
    return manifest.backend, manifest.version, chosen.to_version


def _read_index(source: Path, reader: CheckpointReader, plugins: PluginManager) -> Sequence[ShardedBase]:
    """Return the index of the old checkpoint; empty where nothing installed reads its version any more."""
    try:
        strategy = choose_reader(source, reader.manifest, plugins)
    except CannotLoadError:
        return ()
    return list(strategy.load_index(LoadContext(reader, Comm(alone=True))))


def _describe(index: Iterable[ShardedBase]) -> dict[str, str]:
    """Return the tensors and objects of an index by name, with the properties that a migration must keep."""
    return {
        shard.unique_key if isinstance(shard, ShardedObject) else shard.key: (
            f"{shard.dtype} {tuple(shard.global_shape)}" if isinstance(shard, ShardedTensor) else "object"
        )
        for shard in index
    }


def _refuse_loss(
    what: str,
    before: dict[str, str],
    fingerprints: dict[str, str],
    staging: Path,
    files: Path,
    plugins: PluginManager,
) -> None:
    """Raise PluginError if nothing installed reads the result, or it lacks items or values of the old checkpoint.

    ``before`` are the old items as :func:`_describe` returns them; ``fingerprints`` are those that it has stored.
    """
    try:
        with open_staged(staging, files, plugins) as opened:
            after = _describe(opened.index())
            values = StoredCheckpoint(opened).compute_fingerprints(fingerprints.keys() & after.keys())
            absent = fingerprints.keys() - after.keys()
            others = StoredCheckpoint(opened).compute_fingerprints(after.keys() - values.keys()) if absent else {}
    except CannotLoadError as exc:
        raise PluginError(
            f"{what} wrote a format that no installed plugin reads; nothing was committed. Install the LoadStrategy "
            "of that version, too, or name another version (--to)"
        ) from exc
    except CheckpointingException as exc:
        raise PluginError(f"{what} wrote an unreadable checkpoint; nothing was committed: {exc}") from exc
    lost = {key: f"{entry}, now {after.get(key, 'absent')}" for key, entry in before.items() if after.get(key) != entry}
    changed = {
        key: "other values than its stored fingerprint says, which the migration changed, or which were wrong before"
        for key, value in values.items()
        if value != fingerprints[key]
    }
    gone = {key: "no tensor has its values" for key in absent if fingerprints[key] not in others.values()}
    if faults := gone | changed | lost:
        shown = listed([f"{key}: {fault}" for key, fault in sorted(faults.items())])
        raise PluginError(f"{what} does not keep all stored items; nothing was committed: {shown}")
