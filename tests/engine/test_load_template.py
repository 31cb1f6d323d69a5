from __future__ import annotations

from collections import UserDict, deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.engine.load_template import MISSING, LoadTemplate
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.mapping.unstored import OptionalEntries
from shardckpt.state_dict import split_for_save
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _tensor(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(1))


def _object(key: str) -> ShardedObject:
    return ShardedObject(key, None, (1,), (0,))


def _round_trip(nest: dict[str, object]) -> dict[str, object]:
    """What a load of the same form gives for what a save of it stored; a shard's value is its key."""
    _, common = split_for_save(nest)
    template = LoadTemplate(nest)
    return template.fill([shard.key for shard in template.shards], common)


def test_a_nest_comes_back_as_it_was() -> None:
    """Shards, common values and local objects find their places again, in dicts and in mixed lists."""
    nest = {
        "a": _tensor("a"),
        "b": [_tensor("b0"), 5, {"c": _tensor("c"), "d": 6}, _tensor("b3"), LocalNonpersistentObject("mine")],
        "e": [{"f": _tensor("f")}, {"g": 7}],
        "h": {},
        "i": [],
        "j": [[_tensor("j")], [8]],
    }
    assert _round_trip(nest) == {
        "a": "a",
        "b": ["b0", 5, {"c": "c", "d": 6}, "b3", "mine"],
        "e": [{"f": "f"}, {"g": 7}],
        "h": {},
        "i": [],
        "j": [["j"], [8]],
    }


def test_common_values_are_the_checkpoints() -> None:
    """Values of the wanted dict that are not sharded are only places; the checkpoint's win, and extra ones come too."""
    template = LoadTemplate({"x": 1, "l": [0], "gone": 9})
    assert template.fill([], {"x": 2, "l": [1, 2, 3], "more": {"y": 3}}) == {"x": 2, "l": [1, 2, 3], "more": {"y": 3}}


@table(
    ("wanted", "common", "expected"),
    [
        ([_object("a"), 5], [{"x": 1}, 7], ["a", 7]),
        ([5, _object("a"), 6], [7, "old", 8], [7, "a", 8]),
        ([_object("a"), _tensor("t"), 5], ["old", 7], ["a", "t", 7]),
        ([{"a": _object("a")}, _object("b"), 5], [{"a": 1}, "old", 7], [{"a": "a"}, "b", 7]),
        ([{"a": _object("a"), "n": 0}, _tensor("t"), [5, _object("b")]], [{"a": 1, "n": 2}, [7, "old"]],
         [{"a": "a", "n": 2}, "t", [7, "b"]]),
        ([_object("a"), _object("b")], ["old", "old"], ["a", "b"]),
        ([_object("a"), [0], {}], ["old", [1, 2, 3], {"more": 4}], ["a", [1, 2, 3], {"more": 4}]),
    ],
)  # fmt: skip
def test_values_beside_what_is_built_stay(wanted: list[Any], common: list[Any], expected: list[Any]) -> None:
    """Of a list in which a strategy builds some values, the other ones keep those of the checkpoint."""
    template = LoadTemplate({"l": wanted, "d": {"a": _object("d"), "b": 0}})
    built = {number for number, shard in enumerate(template.shards) if isinstance(shard, ShardedObject)}
    filled = template.fill(
        [shard.key for shard in template.shards],
        {"l": common, "d": {"a": "old", "b": 3}},
        in_common=built,
        replaces_any=True,
    )
    assert filled == {"l": expected, "d": {"a": "d", "b": 3}}


@table(
    ("wanted", "common", "reason"),
    [
        ([_object("a"), 5, 6], ["old", 7], r"has a list of 2 values at \['l'\]"),
        ([{"a": _object("a"), "n": 0}, 5], ["old", 7], r"has a str at \['l'\]\[0\]"),
        ({"a": _object("a"), "n": 0}, "old", r"has a str at \['l'\]"),
    ],
)
def test_a_container_that_does_not_fit_what_is_built_is_an_error(wanted: Any, common: Any, reason: str) -> None:
    """Values that have no place are not dropped."""
    template = LoadTemplate({"l": wanted})
    with pytest.raises(CheckpointingException, match=reason):
        template.fill([shard.key for shard in template.shards], {"l": common}, in_common={0}, replaces_any=True)


@table(
    ("wanted", "common", "place"),
    [
        ({"a": _object("a"), "t": _tensor("t"), "n": 0}, {"a": "old", "t": 9, "n": 1}, r"\['x'\]\['t'\]"),
        ([{"a": _object("a"), "t": _tensor("t")}, 5], [{"a": "old", "t": 9}, 7], r"\['x'\]\[0\]\['t'\]"),
        ([_object("a"), _tensor("t"), 5], ["old", 9, 7], r"\['x'\]\[1\]"),
    ],
)
def test_a_value_where_a_shard_was_not_built_is_an_error(wanted: Any, common: Any, place: str) -> None:
    """Without ``replaces_any`` no value of the checkpoint is dropped in silence, in a dict or in a list."""
    template = LoadTemplate({"x": wanted})
    (built,) = (number for number, shard in enumerate(template.shards) if isinstance(shard, ShardedObject))
    with pytest.raises(CheckpointingException, match=f"has a value at {place}"):
        template.fill([shard.key for shard in template.shards], {"x": common}, in_common={built})


def test_a_list_of_plain_dcp_keeps_what_is_not_asked_for_as_an_object(tmp_path: Path) -> None:
    """An object that is built of a list's entry leaves the rest of the list in the result."""
    saved = {"l": [{"x": 1, "y": 2}, 7, torch.ones(2)], "d": {"a": {"p": 1}, "b": 3}}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    wanted = {
        "l": [ShardedObject("l.0", None, (1,), (0,)), 0, ShardedTensor.from_rank_offsets("l.2", torch.zeros(2))],
        "d": {"a": ShardedObject("d.a", None, (1,), (0,))},
    }
    loaded = dc.load(wanted, tmp_path)
    assert torch.equal(loaded["l"].pop(), torch.ones(2))
    assert loaded == {"l": [{"x": 1, "y": 2}, 7], "d": {"a": {"p": 1}, "b": 3}}


def test_factories_merge_what_was_loaded() -> None:
    """A factory's place gets its merged value, and none if a part of it was not loaded."""
    factory = ShardedTensorFactory("f", torch.zeros(2), lambda *_: [_tensor("p"), _tensor("q")], "+".join)  # type: ignore[arg-type]
    template = LoadTemplate({"f": factory, "t": _tensor("t")})
    assert [shard.key for shard in template.shards] == ["p", "q", "t"]
    assert template.fill(["p", "q", "t"], {}) == {"f": "p+q", "t": "t"}
    assert template.fill(["p", MISSING, "t"], {}) == {"t": "t"}


@table(
    ("leaf", "kind"),
    [
        ((_tensor("w"), 2), "tuple"),
        (({"w": [_tensor("w")]},), "tuple"),
        (MappingProxyType({"w": _tensor("w")}), "mappingproxy"),
        (UserDict(w=_tensor("w")), "UserDict"),
        (deque([_tensor("w")]), "deque"),
    ],
)
def test_a_leaf_with_a_shard_in_it_is_refused(leaf: Any, kind: str) -> None:
    """Nothing would fill it: the stored value would take its place, or none."""
    with pytest.raises(ShardingError, match=rf"\['t'\] is a {kind} with a ShardedTensor in it"):
        LoadTemplate({"t": leaf})


def test_a_factory_may_build_plain_values_too() -> None:
    """What a factory builds besides shards is handed to its merge_fn as it was built."""
    factory = ShardedTensorFactory(
        "f", torch.zeros(2), lambda *_: {"p": _tensor("p"), "n": 3}, lambda x: (x["p"], x["n"])
    )  # type: ignore[arg-type,return-value]
    assert LoadTemplate({"f": factory}).fill(["p"], {}) == {"f": ("p", 3)}


def test_a_plain_value_among_optional_entries_stays() -> None:
    """A caller may put any value in the place of an entry: a zero and a tensor are values as others are."""
    wanted = OptionalEntries({"a": _tensor("p.a"), "n": 0, "t": torch.zeros(2), "empty": {}}, "p.")
    template = LoadTemplate({"o": wanted})
    assert template.left_out == ["p.a", "p.empty"]
    assert template.find_ignored_tensors({}) == ["['o']['t']"]


def test_a_missing_value_leaves_its_place_out() -> None:
    """What the checkpoint does not have is not in the result."""
    template = LoadTemplate({"a": _tensor("a"), "l": [_tensor("b"), _tensor("c")], "d": {"e": _tensor("e")}})
    assert template.fill([MISSING, MISSING, "c", MISSING], {}) == {"l": ["c"]}


@table(
    ("wanted", "common"),
    [
        ({"a": _tensor("a")}, {"a": 1}),
        ({"a": {"b": _tensor("b")}}, {"a": 1}),
        ({"a": [_tensor("b"), 1]}, {"a": [1, 2, 3]}),
        ({"a": [{"b": _tensor("b"), "n": 0}]}, {"a": [{"n": 1}, {"n": 2}]}),
        ({"a": [_tensor("b")]}, {"a": {"b": 1}}),
    ],
)
def test_a_common_state_of_another_form_is_an_error(wanted: dict[str, object], common: dict[str, object]) -> None:
    """A common value where a shard is wanted, or lists that do not fit, are never merged by guess."""
    template = LoadTemplate(wanted)
    with pytest.raises(CheckpointingException, match="common state"):
        template.fill(["x"] * len(template.shards), common)
