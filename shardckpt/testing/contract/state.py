"""The contract's part about objects and common state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from shardckpt import dist_checkpointing
from shardckpt.errors import ShardingError
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract import jobs
from shardckpt.testing.contract.claims import Claims, each
from shardckpt.testing.contract.shards import make_tensor, whole_shard

PLAIN: dict[str, Any] = {
    "numbers": {"int": 2**62, "negative": -5, "float": 0.1, "zero": 0, "true": True},
    "texts": {"text": "größe\n\"'", "empty": "", "long": "x" * 100_000},
    "nested": {"list": [1, [2, [3, {"deep": [None]}]]], "dict": {"": {"a.b/c": 1}}},
    "nothing": {"none": None, "list": [], "dict": {}},
}
PYTHON: dict[str, Any] = {
    "tuples": {"tuple": (1, (2,), ()), "list": [(1, 2)]},
    "bytes": {"bytes": b"\x00\xff", "empty": b""},
    "keys": {1: "one", (2, 3): "two", None: "three"},
    "sets and numbers": {"set": {1, 2}, "complex": 1j, "huge": 2**200},
}


class Record:
    """A class that no load knows."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def touch(path: str) -> str:
    """Make a file, as a hostile pickle does in these tests."""
    Path(path).write_text("a pickle ran this")
    return path


class Hostile:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return touch, (self.path,)


class StateTests(Claims):
    """Values that are no tensors."""

    def _object(self, path: Path, value: Any, **options: Any) -> Any:
        self.subject.save({"o": ShardedObject("o", copy.deepcopy(value), (1,), (0,))}, path, **options)
        return self.subject.load({"o": ShardedObject("o", None, (1,), (0,))}, path, **options)["o"]

    def test_objects_are_stored_or_refused(self, path: Path) -> None:
        """The class has the contract's claim about objects, and objects that it does not store are refused by name."""
        claimed, saver = self.get_claim("supports_objects"), self.subject.make_saver()
        check(
            saver.supports_objects is bool(claimed),
            f"supports_objects is {claimed} in the contract, and {saver.supports_objects} in {type(saver).__name__}: "
            "set it to False in both if it stores no ShardedObjects, so that the core refuses them",
        )
        if claimed:
            return
        state = {"o": ShardedObject("rng state", 1, (1,), (0,)), "w": whole_shard("w", torch.ones(2))}
        try:
            self.subject.save(state, path)
        except ShardingError as error:
            text = str(error)
            check("rng state" in text and type(saver).__qualname__ in text, f"the error names neither: {text}")
        else:
            check(False, "a ShardedObject was saved, which supports_objects = False denies")
        check(not path.exists(), "the refused save left something")

    @each("name", [*PLAIN])
    def test_object(self, path: Path, name: str) -> None:
        """An object of plain values comes back equal, with the types of its values."""
        self.require("supports_objects")
        found = self._object(path, PLAIN[name])
        check(repr(found) == repr(PLAIN[name]), f"the object is {found!r:.300}")

    @each("name", [*PYTHON])
    def test_object_of_python_values(self, path: Path, name: str) -> None:
        """An object of tuples, bytes, sets and dicts with any keys comes back equal."""
        self.require("supports_objects")
        self.require("supports_python_values")
        found = self._object(path, PYTHON[name])
        check(found == PYTHON[name], f"the object is {found!r:.300}")

    def test_tensors_in_objects_and_common_state(self, path: Path) -> None:
        """A tensor inside an object or the common state comes back with its dtype and values, on the CPU."""
        self.require("supports_objects")
        self.require("supports_python_values")
        tensors = {dtype: make_tensor("t", dtype, (3, 2)) for dtype in (torch.float32, torch.bfloat16, torch.bool)}
        state = {"o": ShardedObject("o", [*tensors.values()], (1,), (0,)), "common": [*tensors.values()]}
        self.subject.save(state, path)
        loaded = self.subject.load({"o": ShardedObject("o", None, (1,), (0,))}, path)
        for expected, one, other in zip(tensors.values(), loaded["o"], loaded["common"], strict=True):
            check_same(one, expected, "a tensor in an object")
            check_same(other, expected, "a tensor in the common state")

    def test_grid_of_objects(self, path: Path) -> None:
        """Objects of one key are found by their places in the grid, in any order."""
        self.require("supports_objects")
        places = [(i, j) for i in range(2) for j in range(3)]
        self.subject.save({"o": [ShardedObject("o", {"at": [*place]}, (2, 3), place) for place in places]}, path)
        wanted = [ShardedObject("o", None, (2, 3), place) for place in reversed(places)]
        loaded = self.subject.load({"o": wanted}, path)["o"]
        check(loaded == [{"at": [*place]} for place in reversed(places)], f"the objects are {loaded!r}")

    @each("key", ["a/b", "../up", "shard_0_1", "größe", "a b"])
    def test_key_of_an_object(self, path: Path, key: str) -> None:
        """The key of an object may be any text."""
        self.require("supports_objects")
        self.subject.save(
            {"o": ShardedObject(key, {"key": key}, (1,), (0,)), "w": whole_shard(key, torch.ones(2))}, path
        )
        loaded = self.subject.load(
            {"o": ShardedObject(key, None, (1,), (0,)), "w": whole_shard(key, torch.zeros(2))}, path
        )
        check(loaded["o"] == {"key": key}, f"the object {key!r} is {loaded['o']!r}")
        check(loaded["w"].tolist() == [1.0, 1.0], f"the tensor of the same key {key!r} is {loaded['w']!r}")

    @each("name", [*PLAIN])
    def test_common_state(self, path: Path, name: str) -> None:
        """Common state of plain values comes back equal, with tensors in the state, with the types of its values."""
        self.subject.save({"w": whole_shard("w", torch.ones(2)), "common": copy.deepcopy(PLAIN[name])}, path)
        loaded = self.subject.load({"w": whole_shard("w", torch.zeros(2))}, path)
        check(repr(loaded["common"]) == repr(PLAIN[name]), f"the common state is {loaded['common']!r:.300}")
        again = dist_checkpointing.load_common_state_dict(path)["common"]
        check(repr(again) == repr(PLAIN[name]), f"load_common gives another common state: {again!r:.300}")

    @each("name", [*PYTHON])
    def test_common_state_of_python_values(self, path: Path, name: str) -> None:
        """Common state of tuples, bytes, sets and dicts with any keys comes back equal, or the save refuses its key."""
        state = {"common": copy.deepcopy(PYTHON[name])}
        if not self.get_claim("supports_python_values"):
            kind, text = jobs.error_of(self.subject.save, state, path)
            if kind:
                check("common" in text, f"the error of the save does not name the key 'common': {text}")
                return
        else:
            self.subject.save(state, path)
        found = self.subject.load({}, path)["common"]
        check(found == PYTHON[name], f"the common state is {found!r:.300} after a save that refused nothing")

    def test_content_metadata(self, path: Path) -> None:
        """The content metadata of a save is found again."""
        self.subject.save({"w": whole_shard("w", torch.ones(2))}, path, content_metadata={"kind": "model", "n": 3})
        found = dist_checkpointing.load_content_metadata(path)
        check(found == {"kind": "model", "n": 3}, f"the content metadata is {found!r}")

    def test_an_unknown_class(self, path: Path) -> None:
        """An object of a class that no load accepts is refused with the class's name, by the save or by the load."""
        self.require("supports_objects")
        self.require("claims_safety")
        kind, text = jobs.error_of(self._object, path, {"r": Record(5)})
        check(bool(kind), "an object of an unknown class was saved and loaded without allow_globals")
        check("Record" in text, f"the error does not name the class Record: {text}")
        if self.get_claim("supports_python_values") and self.get_claim("supports_allowed_classes"):
            found = self._object(path.with_name("allowed"), {"r": Record(5)}, allow_globals=[Record])
            check(found == {"r": Record(5)}, f"with allow_globals=[Record] the object is {found!r}")

    @each("place", ["object", "common state"])
    def test_a_pickle_runs_nothing(self, path: Path, tmp_path: Path, place: str) -> None:
        """A pickled object that calls a function when it is loaded is refused, and the function is not called."""
        self.require("claims_safety")
        sentinel = tmp_path / "sentinel"
        hostile = Hostile(str(sentinel))
        if place == "object":
            self.require("supports_objects")
            state: dict[str, Any] = {"o": ShardedObject("o", hostile, (1,), (0,))}
            wanted: dict[str, Any] = {"o": ShardedObject("o", None, (1,), (0,))}
        else:
            state, wanted = {"common": hostile}, {}
        kind, _ = jobs.error_of(self.subject.save, state, path, allow_globals=[touch])
        sentinel.unlink(missing_ok=True)  # the save may try to load its own pickles
        if not kind:
            kind, _ = jobs.error_of(self.subject.load, wanted, path)
            check(bool(kind), f"a pickle in the {place} was loaded that calls a function")
        check(not sentinel.exists(), f"a pickle in the {place} has run a function: that may be any program")

    def test_the_callers_state_stays(self, path: Path) -> None:
        """A save changes nothing of the caller's: dict, tensors, descriptions, objects."""
        state = jobs.make_version(5, with_objects=self.subject.with_objects)
        shards = {key: value for key, value in state.items() if hasattr(value, "key")}
        before = {key: (copy.deepcopy(vars(shard)), id(shard.data)) for key, shard in shards.items()}
        keys = [*state]
        self.subject.save(state, path)
        check([*state] == keys, "the save has changed the keys of the caller's dict")
        for key, shard in shards.items():
            fields, identity = before[key]
            check(state[key] is shard, f"the save has replaced the caller's shard {key!r}")
            check(id(shard.data) == identity, f"the save has replaced the data of the caller's shard {key!r}")
            for name, value in fields.items():
                found = getattr(shard, name)
                if isinstance(value, torch.Tensor):
                    check_same(found, value, f"after the save the caller's tensor {key!r}")
                else:
                    check(found == value, f"the save has changed {name} of the caller's shard {key!r} to {found!r}")
