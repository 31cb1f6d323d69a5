from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from shardckpt import state_dict as sd
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.compat.megatron.dist_checkpointing.utils import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_sharded_tensors,
    replace_prefix_for_sharding,
)
from shardckpt.errors import ShardingError
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable


def _tensor(key: str, size: int = 2) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(size))


def test_leaves_in_order_and_tuples_are_leaves() -> None:
    """Only dict and list are containers."""
    assert list(sd.nested_values({"a": [1, (2, 3)], "b": {"c": 4}})) == [1, (2, 3), 4]
    assert list(sd.nested_items({"a": [7]})) == [(("a", 0), 7)]


def test_extract_matching_values_splits_without_changing() -> None:
    """Matches and rest keep their places; empty containers stay in the rest."""
    nest = {"a": 1, "b": [2, "x", []], "c": {"d": "y"}, "e": {}}
    before = copy.deepcopy(nest)
    match, rest = sd.extract_matching_values(nest, lambda v: isinstance(v, int))
    assert match == {"a": 1, "b": [2]}
    assert rest == {"b": ["x", []], "c": {"d": "y"}, "e": {}}
    match, _ = sd.extract_matching_values(nest, lambda v: isinstance(v, str), return_lists_as_dicts=True)
    assert match == {"b": {1: "x"}, "c": {"d": "y"}}
    assert nest == before


def test_diff_names_every_place() -> None:
    """Paths only left, only right, and the types where leaves differ; tensors are compared by value."""
    left = {"a": 1, "b": {"c": torch.ones(2), "d": 2}, "e": [1, 2]}
    right = {"b": {"c": torch.zeros(2), "d": 2.0}, "e": [1, 2, 3], "f": 0}
    only_left, only_right, mismatch = sd.diff(left, right)
    assert only_left == [("a",)]
    assert only_right == [("f",), ("e", 2)]
    assert mismatch == [(("b", "c"), torch.Tensor, torch.Tensor)]
    assert sd.diff(left, left) == ([], [], [])


def test_values_are_compared_by_their_kind() -> None:
    """NaN equals NaN; arrays and tensors compare by elements, dtypes and shapes; what cannot be compared differs."""
    nan = float("nan")
    equal = [
        nan,
        complex(nan, 1),
        (1, nan),
        [torch.tensor([nan])],
        {"a": (np.array([1.0, nan]),)},
        np.float32(nan),
        {1},
    ]
    assert [sd.are_equal(value, copy.deepcopy(value)) for value in equal] == [True] * len(equal)
    differ = [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        (np.arange(3), np.arange(4)),
        (np.array([1.0, nan]), np.array([2.0, nan])),
        ((1, torch.ones(1)), (1, torch.zeros(1))),
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, [1]),
        (torch.ones(1), 1),
        (nan, 1.0),
    ]
    assert [sd.are_equal(*pair) for pair in differ] == [False] * len(differ)


def test_maps_in_and_out_of_place() -> None:
    """The outplace map leaves its argument alone, the inplace map returns it."""
    nest = {"a": [1, {"b": 2}]}
    assert sd.dict_list_map_outplace(lambda v: v + 1, nest) == {"a": [2, {"b": 3}]}
    assert nest == {"a": [1, {"b": 2}]}
    assert sd.dict_list_map_inplace(lambda v: v * 10, nest) is nest
    assert nest == {"a": [10, {"b": 20}]}


def test_merge_puts_nests_together() -> None:
    """Dicts by key, lists by place, and dicts of indices into lists."""
    assert sd.merge({"a": {"b": 1}}, {"a": {"c": 2}, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}
    assert sd.merge([{"a": 1}, {}], [{"b": 2}, {"c": 3}]) == [{"a": 1, "b": 2}, {"c": 3}]
    assert sd.merge([{"a": 1}], {0: {"b": 2}, 1: 5}) == [{"a": 1, "b": 2}, 5]


@table(("x1", "x2"), [({"a": 1}, {"a": 2}), ([1], [1, 2]), ([1], {3: 1})])
def test_merge_refuses_two_values_at_one_place(x1: object, x2: object) -> None:
    """A duplicate leaf and lists that do not fit are ValueErrors that name the place."""
    with pytest.raises(ValueError, match="merge"):
        sd.merge(x1, x2)


def test_map_reduce_groups() -> None:
    """Values are grouped by key and reduced."""
    assert sd.map_reduce([1, 2, 3, 4], lambda x: x % 2, lambda x: x * 10, sum) == {1: 40, 0: 60}


def test_factories_apply_and_merge() -> None:
    """A factory becomes its shards in place, and its loaded shards become one value again."""
    factory = ShardedTensorFactory(
        "w",
        torch.zeros(4),
        lambda k, t, r, _: {"x": _tensor(f"{k}.x"), "y": _tensor(f"{k}.y")},
        lambda d: d["x"] + d["y"],
    )
    nest = {"m": [factory, 1]}
    factories = {"m": {0: factory}}
    sd.apply_factories(nest)
    assert [leaf.key for leaf in sd.nested_values(nest["m"][0])] == ["w.x", "w.y"]
    loaded = {"m": [{"x": torch.ones(2), "y": torch.ones(2)}, 1]}
    merged = sd.apply_factory_merges(loaded, factories)
    assert merged["m"][0].tolist() == [2, 2]
    with pytest.raises(ValueError, match="nothing was loaded"):
        sd.apply_factory_merges({"m": []}, factories)


def test_extractions_by_kind() -> None:
    """Every kind of leaf is found by its own function."""
    nest = {
        "t": _tensor("t"),
        "o": ShardedObject("o", 1, (1,), (0,)),
        "f": ShardedTensorFactory("f", torch.zeros(1), lambda *_: [], lambda x: x),
        "n": LocalNonpersistentObject(1),
        "c": 5,
    }
    assert set(extract_sharded_tensors(nest)[0]) == {"t"}
    assert set(sd.extract_sharded_tensors_and_factories(nest)[0]) == {"t", "f"}
    assert set(sd.extract_sharded_base(nest)[0]) == {"t", "o", "f"}


def test_prefixes() -> None:
    """Prefixes of keys are added, replaced and mapped; a key without the old prefix is an error and nothing changes."""
    nest = {"a": _tensor("x.a"), "b": [_tensor("y.b")]}
    add_prefix_for_sharding(nest, "m.")
    assert [leaf.key for leaf in sd.nested_values(nest)] == ["m.x.a", "m.y.b"]
    with pytest.raises(ValueError, match="lacks"):
        replace_prefix_for_sharding(nest, "m.x.", "q.")
    assert [leaf.key for leaf in sd.nested_values(nest)] == ["m.x.a", "m.y.b"]
    replace_prefix_for_sharding(nest, "m.", "")
    apply_prefix_mapping(nest, {"x.": "1.", "y.": "2."})
    assert [leaf.key for leaf in sd.nested_values(nest)] == ["1.a", "2.b"]


def test_a_prefix_of_a_shard_that_is_there_twice_changes_once() -> None:
    """A load that asks for one shard under two names asks for its new key."""
    shard = _tensor("old.a")
    nest = {"a": shard, "b": [shard]}
    add_prefix_for_sharding(nest, "m.")
    assert shard.key == "m.old.a"
    replace_prefix_for_sharding(nest, "m.old.", "newer.")
    assert shard.key == "newer.a"


def test_split_for_save_leaves_the_caller_alone() -> None:
    """Factories are built, local objects dropped, and neither the nest nor the descriptions are the caller's."""
    tensor = _tensor("t")
    factory = ShardedTensorFactory("f", torch.zeros(1), lambda k, *_: [_tensor(k)], lambda x: x)
    nest = {"t": tensor, "f": factory, "n": LocalNonpersistentObject(3), "c": {"d": 1}}
    sharded, common = sd.split_for_save(nest)
    shards = list(sd.nested_values(sharded))
    assert [shard.key for shard in shards] == ["t", "f"]
    assert common == {"c": {"d": 1}}
    assert nest["t"] is tensor
    assert nest["f"] is factory
    assert shards[0] is not tensor
    common["c"]["d"] = 2
    assert nest["c"] == {"d": 1}


@table("wrap", [tuple, lambda values: ({"x": 1}, tuple(values))])
def test_shards_in_tuples_are_refused(wrap: Callable[[list[object]], object]) -> None:
    """Tuples are leaves: a shard in one would be pickled as common state of one rank, so it is an error at the save."""
    with pytest.raises(ShardingError, match=r"\['deep'\]\[0\] is a tuple with a ShardedTensor in it.*use these"):
        sd.split_for_save({"deep": [wrap([_tensor("t")])]})


def test_a_shard_that_was_changed_after_it_was_described_is_refused() -> None:
    """A description that no longer fits its data is found before anything is written."""
    shard = _tensor("t")
    shard.data = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(ShardingError, match=r"data has dtype torch\.bfloat16"):
        sd.split_for_save({"t": shard})


@table(
    ("given", "kind"),
    [
        (Counter(a=1), Counter),
        (type("Own", (Counter,), {})(a=1), dict),
        (defaultdict(list, a=1), dict),
        (OrderedDict(a=1), dict),
    ],
)
def test_a_counter_stays_one(given: dict[str, int], kind: type) -> None:
    """A described Counter stays one, as MultiStepLR needs it; of any other class is a dict."""
    described = to_sharded_state_dict({"a": given})["a"]
    assert described == given
    assert type(described) is kind
