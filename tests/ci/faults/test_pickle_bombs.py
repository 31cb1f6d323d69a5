"""A pickle takes time and memory by its size, whatever it asks for, and none ends the process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardckpt import dist_checkpointing
from tests.faults import samples
from tests.faults.bombs import ANYWHERE, METADATA, OBJECTS, VIEWS
from tests.faults.hostile import OBJECT_KEY, Foreign, archive
from tests.faults.programs import run_in_new_interpreter

_STORAGE = {"0": bytes(16)}


#: (kind of file, name of the payload): the file's name in errors.
CASES = {
    **{(".metadata", name): ".metadata" for name in (*ANYWHERE, *METADATA)},
    **{("common.pt", name): "common.pt" for name in ("nested tuples as a key", "a far memo place", "colliding keys")},
    **{("object", name): OBJECT_KEY for name in (*ANYWHERE, *OBJECTS)},
}


def _put(foreign: Foreign, place: str, name: str) -> None:
    pickled = {**ANYWHERE, **METADATA, **OBJECTS, **VIEWS}[name]
    if place == "object":
        foreign.put_object(archive(pickled, _STORAGE))
    else:
        foreign.put(place, pickled if place == ".metadata" else archive(pickled, _STORAGE))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """What a fork of a process of its own reports of every case."""
    root = tmp_path_factory.mktemp("bombs")
    dist_checkpointing.save(samples.state_dict(1), root / "base")
    cases = [*CASES, *(("object", name) for name in VIEWS)]
    directories = {case: root / str(number) for number, case in enumerate(cases)}
    for (place, name), directory in directories.items():
        _put(Foreign(root / "base", directory), place, name)
    done = run_in_new_interpreter("bombs", text=json.dumps([str(root / "base"), *map(str, directories.values())]))
    assert done.returncode == 0, done.stderr[-4000:]
    reports = json.loads(done.stdout)
    assert reports[str(root / "base")]["kind"] == ""
    return {case: reports[str(directory)] for case, directory in directories.items()}


@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_refused_at_once(found: dict[tuple[str, str], Any], case: tuple[str, str]) -> None:
    """The load is refused by an error that names the file, within 64 MiB and the 20 s of CPU that the process has."""
    report = found[case]
    assert report["kind"] in ("CorruptCheckpointError", "UnsafePickleError"), report
    assert CASES[case] in report["message"]
    assert report["grown"] < 64


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_small(found: dict[tuple[str, str], Any], name: str) -> None:
    """A negated view of a few bytes takes a few bytes, whatever its shape."""
    report = found["object", name]
    assert report["kind"] == ""
    assert report["grown"] < 64
