"""The contract's part about the registry and the version gate: the reader of each format, and the texts of errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardckpt import dist_checkpointing
from shardckpt.maintenance.migrate import migrate_checkpoint
from shardckpt.manifest.models import Manifest
from shardckpt.manifest.names import MARKER_NAME
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.strategy import LoadStrategy, Recognises, SaveStrategy
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract import jobs
from shardckpt.testing.contract.claims import Claims
from shardckpt.testing.contract.rewriting import read_record, rewrite_format
from shardckpt.testing.contract.shards import make_tensor, whole_shard
from shardckpt.testing.contract.subject import Subject

if TYPE_CHECKING:
    from pathlib import Path

NEWEST = 1_000_000


class GateTests(Claims):
    """Backend, version, registry, migration."""

    def _load_error(self, path: Path, **options: object) -> tuple[str, str]:
        return jobs.error_of(dist_checkpointing.load, {}, path, **options)

    def test_the_pair(self) -> None:
        """The two strategies have the base classes, one backend, versions, and a release for older installations."""
        saver, loader = self.subject.make_saver(), self.subject.make_loader()
        check(isinstance(saver, SaveStrategy), f"{type(saver).__name__} is not a SaveStrategy")
        check(isinstance(loader, LoadStrategy), f"{type(loader).__name__} is not a LoadStrategy")
        check(saver.backend == loader.backend, f"backends differ: {saver.backend!r} and {loader.backend!r}")
        check(bool(saver.backend) and isinstance(saver.version, int), "backend or version is not set")
        check(loader.version >= saver.version, "the load strategy reads no version as new as the save strategy writes")
        if self.get_claim("names_oldest_reader"):
            check(
                bool(saver.reader), "SaveStrategy.reader is empty: it names the oldest release that reads this version"
            )

    def test_what_a_checkpoint_says(self, path: Path) -> None:
        """metadata.json and shardckpt.json name the strategy's backend, version and oldest reader."""
        self.save_version(path, 1)
        saver = self.subject.make_saver()
        marker = json.loads((path / MARKER_NAME).read_text())
        found = (marker["sharded_backend"], marker["sharded_backend_version"])
        check(found == self.subject.key, f"metadata.json says {found}, the strategy is {self.subject.key}")
        record = read_record(path)
        check((record.backend, record.version) == self.subject.key, "shardckpt.json says another backend or version")
        check(record.reader == saver.reader, f"shardckpt.json names the reader {record.reader!r}")

    def test_found_by_name(self, path: Path) -> None:
        """A registered strategy saves by its backend and version, and a load finds the reader by itself."""
        dist_checkpointing.save(jobs.make_version(1, with_objects=self.subject.with_objects), path, self.subject.key)
        state = jobs.make_version(-1, with_objects=self.subject.with_objects)
        del state["step"]
        jobs.check_version(dist_checkpointing.load(state, path), 1)
        loader = dist_checkpointing.get_default_load_sharded_strategy(path)
        check(type(loader) is type(self.subject.make_loader()), f"the load chose {type(loader).__name__}")

    def test_it_says_what_it_reads(self) -> None:
        """cannot_load gives None for its own version, and reasons for a version of the future and another backend."""
        loader, (backend, version) = self.subject.make_loader(), self.subject.key
        own = loader.cannot_load(Manifest(backend=backend, version=version))
        check(own is None, f"it does not read what its save strategy writes: {own}")
        for other in (Manifest(backend=backend, version=NEWEST), Manifest(backend="something-else", version=version)):
            reason = loader.cannot_load(other)
            check(
                isinstance(reason, str) and bool(reason),
                f"cannot_load({other.backend!r} of version {other.version}) is {reason!r}: say why not",
            )

    def test_a_newer_version(self, path: Path) -> None:
        """A checkpoint of a version of the future is refused, with the release that reads it."""
        self.save_version(path, 1)
        backend, _ = self.subject.key
        rewrite_format(path, backend, NEWEST)
        kind, text = self._load_error(path)
        check(kind == "VersionTooNewError", f"a checkpoint of version {NEWEST} raised {kind or 'nothing'}: {text}")
        check(self.subject.make_saver().reader in text, f"the error does not name the release that reads it: {text}")

    def test_another_backend(self, path: Path) -> None:
        """A checkpoint of another backend is refused if the caller names this strategy, unless it recognises it."""
        self.save_version(path, 1)
        rewrite_format(path, "something-else", 1)
        loader = self.subject.make_loader()
        kind, text = self._load_error(path, sharded_strategy=loader)
        if isinstance(loader, Recognises) and loader.recognises(path) == loader.version:
            check(not kind, f"the strategy recognises the files, and the load raised {kind}: {text}")
            return
        check(kind in ("StrategyMismatchError", "UnknownBackendError"), f"it raised {kind or 'nothing'}: {text}")
        check("something-else" in text, f"the error does not name the checkpoint's backend: {text}")

    def test_the_callers_policy(self, path: Path) -> None:
        """A caller whose accept= leaves the backend out gets an error that names it."""
        self.save_version(path, 1)
        kind, text = self._load_error(path, accept=["something-else"])
        check(
            kind == "RefusedByPolicyError", f"accept= leaves the backend out, and the load raised {kind or 'nothing'}"
        )
        check(self.subject.key[0] in text, f"the error does not name the backend: {text}")
        kind, text = self._load_error(path, accept=[self.subject.key])
        check(not kind, f"accept={[self.subject.key]} raised {kind}: {text}")

    def test_a_migration(self, path: Path) -> None:
        """The migration rewrites a checkpoint of the version before, with equal values and objects."""
        self.require("previous_save_strategy")
        self.require("migration")
        migration, (backend, version) = self.get_claim("migration"), self.subject.key
        previous = Subject(self.get_claim("previous_save_strategy"), self.get_claim("load_strategy"))
        check(previous.key == (backend, migration.from_version), f"previous_save_strategy writes {previous.key}")
        check(migration.to_version == version, f"the migration writes version {migration.to_version}, not {version}")
        tensor = make_tensor("w", self.get_claim("dtypes")[0])
        state = {**jobs.make_version(1, with_objects=self.subject.with_objects), "w": whole_shard("w", tensor.clone())}
        previous.save(state, path)
        new = path.with_name("migrated")
        registry = get_plugin_manager().registry
        with registry.preserved():
            if not registry.migrations(backend, migration.from_version):
                registry.add_migration(migration)
            done = migrate_checkpoint(path, new, version)
        check(done == (backend, migration.from_version, version), f"migrate_checkpoint did {done}")
        self.check_version(new, 1)
        check_same(self.subject.load({"w": whole_shard("w", tensor.clone().fill_(0))}, new)["w"], tensor, "'w'")
