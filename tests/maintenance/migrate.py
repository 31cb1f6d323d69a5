"""What the tests of migrate share."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import CheckpointReader, CheckpointWriter, LoadStrategy, Migration, SaveStrategy, fingerprint, hookimpl
from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager
from tests.plugged import registered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardckpt import LoadContext, SaveContext


class SaveText(SaveStrategy):
    """Writes a tensor as text."""

    backend, version = "migrated-text", 1

    def save(self, shards: Any, common: Any, context: SaveContext) -> None:
        """Save."""
        context.writer.write("w.txt", json.dumps([shards[0].data.tolist(), self.version, common]).encode())
        context.writer.record_shards(shards)
        context.writer.known_fingerprints.update(fingerprint({"w": shards[0].data}))


class LoadText(LoadStrategy):
    """Reads version 2."""

    backend, version = "migrated-text", 2

    def _read(self, context: LoadContext) -> Any:
        return json.loads(context.reader.read("w.txt"))

    def load(self, wanted: Any, context: LoadContext) -> Any:
        """Load."""
        return [torch.tensor(self._read(context)[0]) for _ in wanted]

    def load_common(self, context: LoadContext) -> Any:
        """Load."""
        return self._read(context)[2]

    def load_index(self, context: LoadContext) -> Any:
        """List."""
        return [ShardedTensor.from_global_shape("w", torch.float32, (len(self._read(context)[0]),))]


class ToTwo(Migration):
    """Says version 2 in the file; fails, or dies, where an environment variable asks for it."""

    backend, from_version, to_version = "migrated-text", 1, 2

    def migrate(self, reader: CheckpointReader, writer: CheckpointWriter) -> None:
        """Migrate."""
        values, _, common = json.loads(reader.read("w.txt"))
        writer.write("w.txt", json.dumps([values, 2, common]).encode())
        if os.environ.get("MIGRATION") == "fail":
            raise KeyError("half-way")
        if os.environ.get("MIGRATION") == "die":
            os._exit(9)


class Plugin:
    """Brings them."""

    @hookimpl
    def shardckpt_register(self, registry: Any) -> None:
        """Register."""
        for one in (SaveText, LoadText, ToTwo):
            registry.add(one)


def register() -> None:
    """Register the plugin, once in a process."""
    if not get_plugin_manager().registry.migrations(ToTwo.backend):
        get_plugin_manager().register(Plugin(), "migrated-text")


def state(value: float) -> dict[str, Any]:
    """A tensor and common state."""
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value)), "step": int(value)}


def loaded(path: Path) -> tuple[float, int]:
    """What a checkpoint has: the sum, the step."""
    found = dc.load(state(0.0), path)
    return float(found["w"].sum()), found["step"]


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of version 1, with a foreign file beside its own, and the plugin that reads it."""
    with registered(Plugin()):
        dc.save(state(1.0), tmp_path / "old", (SaveText.backend, 1))
        (tmp_path / "old" / "notes.md").write_text("mine")
        yield tmp_path / "old"


def content(path: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {file.name: file.read_bytes() for file in path.iterdir()}
