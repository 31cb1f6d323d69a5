from __future__ import annotations

import argparse
import collections
import copy
import datetime as dt
import enum
import io
import pathlib
import pickle
import random
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.archive.reader import load_bytes
from shardckpt.errors import UnsafePickleError
from shardckpt.mapping import ShardedObject
from tests.faults.hostile import MARK, archive, build_on, call, named
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Mine:
    """A class that no allow-list knows."""

    x: int


class Colour(enum.Enum):
    """An enum that no allow-list knows."""

    RED = 1


PLAIN = {
    "numbers": [1, 2.5, 3 + 4j, True, None, 10**30],
    "texts": ("a", b"bytes", bytearray(b"ba"), "ü"),
    "sets": {1, 2},
    "frozen": frozenset({"x"}),
    "ordered": collections.OrderedDict(a=1),
    "default": collections.defaultdict(list, {"k": [1]}),
    "deque": collections.deque([1, 2], maxlen=3),
    "counter": collections.Counter("aab"),
    "namespace": argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=1)),
    "simple": SimpleNamespace(a=[1]),
    "timezone": [dt.datetime(2026, 11, 21, tzinfo=dt.timezone.utc), dt.time(8), dt.timezone(dt.timedelta(hours=1))],
    "singletons": [..., NotImplemented],
    "time": dt.datetime(2026, 11, 21, 8, 0, tzinfo=dt.timezone.utc).replace(tzinfo=None),
    "delta": dt.timedelta(seconds=5),
    "torch": [torch.float8_e4m3fn, torch.Size((1, 2)), torch.device("cpu")],
    "random": random.Random(3).getstate(),
    "slice": slice(1, 2),
    "range": range(3),
}

ARRAYS: dict[str, Any] = {
    **{
        kind: np.arange(6).astype(kind).reshape(2, 3)
        for kind in ("?", "i1", "u2", "<i4", ">i8", "f2", ">f4", "f8", "c8")
    },
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "text": np.array(["a", "bc", ""]),
    "bytes": np.array([b"a", b"bc"]),
    "raw": np.array([b"ab"], dtype="V2"),
    "dates": np.array(["2026-11-21"], dtype="M8[D]"),
    "spans": np.array([1, 2], dtype="m8[25s]"),
    "big-endian spans": np.array([1, 2], dtype=">m8[ms]"),
    "objects": np.array([{"x": 1}, None, "a"], dtype=object),
    "Fortran's objects": np.array([["a", 1], [None, 2]], dtype=object, order="F"),
    "record": np.array([(1, (2.0, 3.0), b"x")], dtype=[("a", ">i4"), ("b", "f8", (2,)), ("c", "S3")]),
    "titles": np.zeros(2, dtype=[(("first", "a"), "i4"), ("b", "f8")]),
    "gaps": np.zeros(2, np.dtype({"names": ["a"], "formats": ["i2"], "offsets": [4], "itemsize": 16})),
    "empty": np.empty((0, 3)),
    "no axes": np.array(2.5),
    "scalar": np.float32(1.5),
    "date": np.datetime64("2026-11-21"),
    "no text": np.str_(""),
    "no bytes": np.void(b""),
}


def _stored(value: Any, path: Path, **options: Any) -> Any:
    dc.save({"o": ShardedObject("o", value, (1,), (0,)), "common": value}, path)
    loaded = dc.load({"o": ShardedObject("o", None, (1,), (0,))}, path, **options)
    return loaded["o"], loaded["common"]


@table("name", sorted(PLAIN))
def test_plain_values_come_back_equal(tmp_path: Path, name: str) -> None:
    """What training states are made of needs no leave: as object and as common state it comes back as it was."""
    for got in _stored(PLAIN[name], tmp_path / "c"):
        assert got == PLAIN[name]
        assert isinstance(got, type(PLAIN[name]))


def test_random_states_tensors_and_streams_come_back_equal(tmp_path: Path) -> None:
    """Numpy's random state, tensors and streams are plain too."""
    state, tensor = np.random.RandomState(1).get_state(), torch.arange(5, dtype=torch.bfloat16)
    got, _ = _stored({"random": state, "tensor": tensor, "stream": io.BytesIO(b"data")}, tmp_path / "c")
    assert all(np.array_equal(a, b) for a, b in zip(got["random"], state, strict=True))
    assert torch.equal(got["tensor"], tensor)
    assert got["stream"].read() == b"data"


@table(
    "value",
    [pathlib.Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:/a"), pathlib.Path()],
    ids=["path", "posix", "windows", "empty"],
)
def test_paths_keep_their_class(tmp_path: Path, value: pathlib.PurePath) -> None:
    """A path comes back as what it was: one of this system with its methods, a pure one without."""
    for got in _stored(value, tmp_path / "c"):
        assert got == value
        assert type(got) is type(value)


def test_paths_of_another_system_are_pure(tmp_path: Path) -> None:
    """A path of a class that cannot be made here comes back as a pure one, with the same parts."""
    pickled = b"cpathlib\nWindowsPath\n(S'c:'\nS'a'\ntR."
    assert load_bytes(archive(pickled), "it") == pathlib.PureWindowsPath("c:", "a")


@table("value", [Mine(3), Colour.RED], ids=["dataclass", "enum"])
def test_other_classes_need_leave(tmp_path: Path, value: Any) -> None:
    """Save and load refuse with the global's name and both forms of leave, and allow_globals= lets it through."""
    kind = type(value)
    with pytest.raises(UnsafePickleError, match=rf"test_unpickle\.{kind.__name__}"):
        dc.save({"common": value}, tmp_path / "c")
    allowed = [kind, getattr] if kind is Colour else [kind]
    dc.save({"common": value}, tmp_path / "c", allow_globals=allowed)
    path = rf"{kind.__module__}.{kind.__name__}"
    with pytest.raises(
        UnsafePickleError, match=rf"test_unpickle\.{kind.__name__}.*allow_globals=\[{kind.__name__}\]"
    ) as e:
        dc.load_common_state_dict(tmp_path / "c")
    assert f'[(it, "{path}")]' in str(e.value)
    assert dc.load_common_state_dict(tmp_path / "c", allow_globals=allowed)["common"] == value


def test_torchs_safe_globals_are_honoured(tmp_path: Path) -> None:
    """What the user registered with torch.serialization is allowed here too."""
    dc.save({"common": Mine(1)}, tmp_path / "c", allow_globals=[Mine])
    with torch.serialization.safe_globals([Mine]):
        assert dc.load_common_state_dict(tmp_path / "c")["common"] == Mine(1)
    with torch.serialization.safe_globals([(Mine, f"{Mine.__module__}.Mine")]):
        assert dc.load_common_state_dict(tmp_path / "c")["common"] == Mine(1)


def test_what_torch_registers_itself_is_not_allowed() -> None:
    """Torch's own entries in its registry (DTensor's internals) are no leave of the user's."""
    entries = [g for g in torch.serialization.get_safe_globals() if not isinstance(g, tuple)]
    registered = [entry for entry in entries if entry.__module__.startswith("torch.")]  # other packages add their own
    assert registered
    for entry in registered:
        with pytest.raises(UnsafePickleError, match=entry.__name__):
            load_bytes(archive(b"\x80\x02" + named(entry.__module__, entry.__qualname__) + b"."), "it")


@table("protocol", range(6))
@table("name", sorted(ARRAYS))
def test_arrays_of_every_kind(name: str, protocol: int) -> None:
    """Arrays and scalars of every dtype and order come back as they were, from every protocol, shared ones shared."""
    value = ARRAYS[name]
    first, again, dtype = load_bytes(archive(pickle.dumps([value, value, value.dtype], protocol)), "it")
    assert first is again
    assert type(first) is type(value)
    assert first.dtype == dtype == value.dtype
    assert first.shape == value.shape
    assert repr(first) == repr(value)
    assert first.flags.f_contiguous == value.flags.f_contiguous


def test_arrays_resolve_wherever_they_stand() -> None:
    """No unfinished array stays in namespaces, tuples, stand-ins' states or keys."""
    array = np.arange(3)
    nested = {"n": argparse.Namespace(a=array), "s": SimpleNamespace(a=(array,)), np.int64(7): [array, {"x": array}]}
    got = load_bytes(archive(pickle.dumps(nested, 2)), "it")
    assert list(got)[2] == 7
    for found in (got["n"].a, got["s"].a[0], got[7][0], got[7][1]["x"]):
        assert found is got["n"].a
        assert found.tolist() == [0, 1, 2]


def test_numpy_is_ours_even_if_allowed() -> None:
    """Allowing numpy's own classes, as torch.load needs it, does not let a pickle near them."""
    allowed = [np.ndarray, np.dtype, np._core.multiarray._reconstruct, np._core.multiarray.scalar]
    assert load_bytes(archive(pickle.dumps(np.arange(3), 2)), "it", allowed).tolist() == [0, 1, 2]
    with pytest.raises(UnsafePickleError, match=r"numpy\.ndarray"):
        load_bytes(archive(call("numpy", "ndarray", (1,), "O", bytes(8))), "it", allowed)


def test_what_was_loaded_can_be_saved_again(tmp_path: Path) -> None:
    """Loaded values pickle by the names that they had: they can be saved, loaded by us and by others again."""
    dc.save({"common": PLAIN}, tmp_path / "a")
    loaded = dc.load_common_state_dict(tmp_path / "a")
    dc.save(loaded, tmp_path / "b")
    assert dc.load_common_state_dict(tmp_path / "b")["common"] == PLAIN
    assert b"shardckpt" not in pickle.dumps(loaded)


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class in a module of Megatron that the process has imported."""
    module = ModuleType("megatron.sample")
    kind = type("Config", (), {"__module__": "megatron.sample"})
    module.Config = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.sample", module)
    return kind


def test_stand_ins_are_saved_as_what_they_stand_for(megatron: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the real class is imported a stand-in pickles as it; elsewhere the error names it and the way out."""
    real = megatron()
    real.x = [1]
    stand_in = load_bytes(archive(pickle.dumps(real, 2)), "it")
    assert type(stand_in) is not megatron
    again = pickle.loads(pickle.dumps(stand_in, 2))
    assert type(again) is megatron
    assert again.x == [1]
    assert load_bytes(archive(pickle.dumps(stand_in, 2)), "it").x == [1]
    assert copy.deepcopy(stand_in).x == [1]
    monkeypatch.delitem(sys.modules, "megatron.sample")
    with pytest.raises(pickle.PicklingError, match=r"megatron\.sample\.Config .*stub.*import megatron\.sample"):
        pickle.dumps(stand_in)
    with pytest.raises(pickle.PicklingError, match=r"megatron\.sample\.Config"):
        pickle.dumps(type(stand_in))


def _count_of(state: Any) -> Any:
    """A class's methods that store nothing but a state, and make an attribute of it."""
    return {"__getstate__": lambda _: state, "__setstate__": lambda self, found: vars(self).update(made_of=found)}


@table("state", [0, False, "", {}, []])
def test_stand_ins_give_the_real_class_any_state(megatron: type, state: Any) -> None:
    """A state of a class's own that is empty or zero is not dropped: its __setstate__ gets it."""
    for name, method in _count_of(state).items():
        setattr(megatron, name, method)
    stand_in = load_bytes(archive(pickle.dumps(megatron(), 2)), "it")
    again = pickle.loads(pickle.dumps(copy.deepcopy(stand_in), 2))
    assert type(again) is megatron
    assert (again.made_of, type(again.made_of)) == (state, type(state))


@table("state", [{}, {"x": 1, "y": 2}])
def test_what_is_set_of_a_stand_in_is_saved(megatron: type, state: dict[str, int]) -> None:
    """An attribute that the user sets is saved as a stored one is, and one that could not be saved is an error."""
    real = megatron()
    vars(real).update(state)
    stand_in = load_bytes(archive(pickle.dumps(real, 2)), "it")
    stand_in.x = 7
    assert stand_in.x == 7
    assert vars(pickle.loads(pickle.dumps(stand_in, 2))) == {**state, "x": 7}
    with pytest.raises(AttributeError, match=r"'origin' of the stub for megatron\.sample\.Config cannot be set"):
        stand_in.origin = "another"
    member = type(stand_in).for_member("A")
    with pytest.raises(AttributeError, match="'name' of the stub"):
        member.name = "B"


def test_a_copy_of_a_stand_in_is_one(megatron: type) -> None:
    """A shallow copy runs nothing of the real class, and is changed alone."""
    real = megatron()
    real.x = [1]
    stand_in = load_bytes(archive(pickle.dumps(real, 2)), "it")
    copied = copy.copy(stand_in)
    assert type(copied) is type(stand_in)
    assert copied.x is stand_in.x
    copied.x = 2
    assert stand_in.x == [1]


class Outer:
    """A class that has another."""

    class Inner:
        """The other one."""


def test_a_class_in_a_class_is_allowed_by_its_name() -> None:
    """The text that an error has for allow_globals= is one name, wherever its module ends."""
    data = archive(pickle.dumps(Outer.Inner(), 4))
    with pytest.raises(UnsafePickleError) as caught:
        load_bytes(data, "it")
    (name,) = caught.value.refused
    assert type(load_bytes(data, "it", [(Outer.Inner, name)])) is Outer.Inner


@table("allowed", [[Outer.Inner], [Outer, Outer.Inner]])
def test_a_class_in_a_class_is_allowed_in_pickles_of_torch(allowed: list[type]) -> None:
    """Protocol 2, torch.save's, has it as an attribute of the outer class, which need not be allowed."""
    inner = Outer.Inner()
    inner.x = 7
    loaded = load_bytes(archive(pickle.dumps(inner, 2)), "it", allowed)
    assert type(loaded) is Outer.Inner
    assert vars(loaded) == {"x": 7}
    with pytest.raises(UnsafePickleError, match=rf"asks for {__name__}\.Outer\.Inner.*allow_globals="):
        load_bytes(archive(pickle.dumps(inner, 2)), "it", [Outer])
    with pytest.raises(UnsafePickleError, match=rf"makes an object of <itself not in allow_globals: {__name__}\.Outer"):
        load_bytes(archive(pickle.dumps(Outer(), 2)), "it", [Outer.Inner])


def test_object_names_of_old(tmp_path: Path) -> None:
    """Megatron 0.6 and 0.7 left extents out of the names of objects: they are found by the names of today."""
    dc.save({"o": ShardedObject("key", {"x": 1}, (1,), (0,))}, tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata.pop("key/shard_0_1")
    metadata.state_dict_metadata["key/shard_0_"] = entry
    (index, info), *_ = metadata.storage_data.items()
    metadata.storage_data = {type(index)("key/shard_0_"): info}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    (tmp_path / "c" / "shardckpt.json").unlink()
    assert dc.load({"o": ShardedObject("key", None, (1,), (0,))}, tmp_path / "c")["o"] == {"x": 1}


def test_a_changed_default_device_does_not_matter(tmp_path: Path) -> None:
    """Under torch.device("meta") tensors in objects are read into memory as ever."""
    dc.save({"common": {"full": torch.arange(5), "empty": torch.empty(0)}}, tmp_path / "c")
    with torch.device("meta"):
        got = dc.load_common_state_dict(tmp_path / "c")["common"]
    assert got["full"].tolist() == [0, 1, 2, 3, 4]
    assert got["empty"].device.type == "cpu"


@table("slots", [False, True])
def test_an_allowed_class_cannot_be_changed(slots: bool) -> None:
    """Leave to make objects of a class is no leave to change the class itself."""
    with pytest.raises(UnsafePickleError, match="change"):
        load_bytes(archive(build_on(Mine.__module__, "Mine", slots=slots)), "it", [Mine])
    assert not hasattr(Mine, MARK)
