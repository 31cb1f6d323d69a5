"""What plain DCP stored value by value, put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import CorruptCheckpointError, KeyMismatchError, UnsafePickleError
from shardckpt.mapping import ShardedObject
from shardckpt_torch_dist.dialects.nested_state import NestedState
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def load_object(path: Path, key: str) -> Any:
    """Load one object by its key."""
    return dist_checkpointing.load({"found": ShardedObject(key, None, (1,), (0,))}, path)["found"]


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A plain DCP directory of nested state."""
    state = {
        "a": {"b": 1, "b.c": 2, "list": [{"x": torch.arange(3)}, {"x": "text"}], "pair": (1, 2)},
        "ab": {"c": 3},
        "a-b": 4,
        "numbers": {3: "three", 5: "five"},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_key_gets_what_was_stored_below_it(nested: Path) -> None:
    """Dicts, lists, tensors and keys with dots come back as they were saved, and no sibling with them."""
    found = load_object(nested, "a")
    assert found["list"][0]["x"].equal(torch.arange(3))
    del found["list"][0]["x"]
    assert found == {"b": 1, "b.c": 2, "list": [{}, {"x": "text"}], "pair": (1, 2)}
    assert load_object(nested, "ab") == {"c": 3}
    assert load_object(nested, "a.list.1") == {"x": "text"}
    assert load_object(nested, "a-b") == 4
    assert load_object(nested, "numbers") == {"3": "three", "5": "five"}  # DCP's keys are text


def test_each_load_gets_its_own_copy(nested: Path) -> None:
    """Two objects of one load may share stored values, and changing one does not change the other."""
    wanted = {name: ShardedObject("a", None, (2,), (n,)) for n, name in enumerate(("one", "other"))}
    loaded = dist_checkpointing.load(wanted, nested)
    loaded["one"]["list"][1]["x"] = "changed"
    assert loaded["other"]["list"][1]["x"] == "text"


def test_a_key_below_which_nothing_is_stored_is_an_error(nested: Path) -> None:
    """The error names the key, and nothing is made up."""
    for key in ("c", "a.li", "a.b.c.d"):
        with pytest.raises(KeyMismatchError, match=key):
            load_object(nested, key)


def test_lists_of_keys_are_complete_without_them(nested: Path) -> None:
    """What can be built is not listed: a strict load of the tensors alone finds no key missing."""
    assert list(dist_checkpointing.load_sharded_metadata(nested)) == ["a.list.0.x"]


class Numbered(nn.Module):
    """A model whose parameters are named as parameter groups are: by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])

    def forward(self) -> torch.Tensor:
        """Return a number that depends on all parameters."""
        return sum((part.sum() for part in self.parts), torch.zeros(()))


@table("flatten", [False, True], ids=["nested", "flattened"])
@table("make", [lambda: Numbered().parts, Numbered], ids=["named 0", "named parts.0"])
def test_options_are_those_of_the_parameters_group(tmp_path: Path, make: Any, *, flatten: bool) -> None:
    """A parameter that is named like a group does not get that group's options, nor lose its own."""
    module = make()
    params = list(module.parameters())
    optimizer = torch.optim.SGD([{"params": [params[1]], "lr": 0.5}, {"params": [params[0]], "lr": 0.25}], momentum=0.9)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    stored = get_optimizer_state_dict(module, optimizer, options=options)
    dcp.save({"model": get_model_state_dict(module), "optimizer": stored}, checkpoint_id=tmp_path / "dcp", no_dist=True)

    other = make()
    first, second = other.parameters()
    resumed = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    load_into(dist_checkpointing.load(to_sharded_state_dict(other, resumed), tmp_path / "dcp"), other, resumed)
    assert [(group["lr"], group["momentum"]) for group in resumed.param_groups] == [(0.25, 0.9), (0.5, 0.9)]
    assert second.equal(params[1])


def test_the_names_of_a_group_are_read_once_for_all_its_parameters() -> None:
    """The options of each parameter cost their own values: a group of thousands has as many names."""
    names, group = ["a.w", "a.b", "c"], ("optimizer", "param_groups", 0)
    values: dict[tuple[str | int, ...], Any] = {(*group, "lr"): 0.5, (*group, "params"): names}
    read: list[Any] = []

    def read_value(path: tuple[str | int, ...]) -> Any:
        read.append(path[-1])
        return values[path]

    state = NestedState(values, {}, read_value)
    assert [state.build(f"optimizer.param_groups.{name}", {}) for name in names] == [{"lr": 0.5}] * 3
    assert read.count("params") == 1


def test_a_group_of_another_name_keeps_what_is_called_params(tmp_path: Path) -> None:
    """Only the names of an optimizer's numbered group are left out of its options, whatever else has the word."""
    dcp.save({"None": {"params": [1, 2], "lr": 0.5}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert load_object(tmp_path / "dcp", "None") == {"params": [1, 2], "lr": 0.5}
    assert load_object(tmp_path / "dcp", "None.params") == [1, 2]


class Hostile:
    """Unpickled, it would run code."""

    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_values_go_through_the_allow_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that names a forbidden function is refused, however the load asks for it."""
    dcp.save({"a": {"b": Hostile()}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UnsafePickleError, match="print"):
        load_object(tmp_path / "dcp", "a")
    assert capsys.readouterr().out == ""


def test_a_damaged_value_is_named(nested: Path) -> None:
    """A value whose bytes are gone is an error with its name."""
    data = nested / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CorruptCheckpointError, match=r"a\.b|__0_0"):
        load_object(nested, "a")
