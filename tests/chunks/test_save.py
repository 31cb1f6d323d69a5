"""What a rank writes is sent to another process: what all saves by a plan have in common is pickled once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardckpt.chunks import ChunkWork
from shardckpt.chunks import save as planning
from shardckpt.chunks.save import GlobalFiles
from shardckpt.manifest import Lineage

if TYPE_CHECKING:
    import pytest

    from shardckpt.storage import CheckpointWriter


@dataclass(kw_only=True)
class _Work(ChunkWork[Any, Any]):
    """Writes nothing."""

    files: list[str]

    def write_files(self, writer: CheckpointWriter) -> None:
        """Nothing."""


def _fields(work: _Work) -> dict[str, Any]:
    return {name: value for name, value in vars(work).items() if name != "planned"}


def _send(work: _Work) -> _Work:
    return pickle.loads(pickle.dumps(work))  # type: ignore[no-any-return]


def test_what_saves_have_in_common_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second save by a plan sends its own values, and the pickle of the first for all that did not change."""
    files = GlobalFiles({"a": 1}, "first", b"common", Lineage())
    plan = _Work(tensors=[], keys=["k"], objects={}, aliases={"b": "k"}, files=["f"])
    first = replace(plan, objects={"o": 1}, global_files=files)
    assert _fields(_send(first)) == _fields(first)
    pickled: list[Any] = []
    real = planning.pickle_value
    monkeypatch.setattr(planning, "pickle_value", lambda value: pickled.append(value) or real(value))
    second = replace(plan, objects={"o": 2}, global_files=replace(files, save_id="second"))
    assert _fields(_send(second)) == _fields(second)
    assert not pickled
    for changed in (
        replace(second, files=["g"]),
        replace(second, aliases={}),
        replace(second, global_files=None),
        replace(second, global_files=replace(files, index={"a": 2})),
    ):
        assert _fields(_send(changed)) == _fields(changed)
        assert len(pickled) == 1
        pickled.clear()
