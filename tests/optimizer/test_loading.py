"""What is loaded, in which form, from whom; and what is refused."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as torchs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.optimizer_state import load_sharded_optimizer_state_dict
from tests.adapters.models import made_model
from tests.optimizer.loading import assert_same, train_steps
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which one has a tensor among its options."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": torch.tensor(0.003), "weight_decay": 0.2}]
    return torch.optim.AdamW(groups, lr=0.01)


def _job(layers: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made_model(1, layers)
    optimizer = _adamw(model)
    train_steps(model, optimizer)
    return model, optimizer


def _checkpoints(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same job saved by torch, nested and flattened, and by us: as modules, and as a state dict."""
    model, optimizer = _job()
    params, nested = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": params, "optimizer": nested}, checkpoint_id=folder / "nested")
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": params, "optimizer": flat}, checkpoint_id=folder / "flat")
    dist_checkpointing.save(to_sharded_state_dict({"model": params, "optimizer": nested}), folder / "dict")
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), folder / "modules")
    return model, optimizer


def _against_torch(folder: Path) -> None:
    """Ours against torch's own function, which cuts all tensors in rows over all ranks."""
    warnings.simplefilter("ignore")  # torch's of its own deprecated calls
    model, _ = _checkpoints(folder)
    params = get_model_state_dict(model)
    for name in ("nested", "flat"):
        reader = dcp.FileSystemReader(folder / name)
        expected = torchs(params, "optimizer", reader)["optimizer"]
        found = load_sharded_optimizer_state_dict(params, "optimizer", reader)["optimizer"]
        state = (
            _by_name(expected["state"]) if name == "nested" else {k[6:]: v for k, v in expected.items() if k[0] == "s"}
        )
        ours = _by_name(found["state"])
        assert ours.keys() == state.keys()
        for key, value in state.items():
            for offset, part in _parts(value):
                assert torch.equal(part, _narrowed(ours[key], offset, part.shape)), key
        if name == "nested":
            assert_same(found["param_groups"], expected["param_groups"])
            continue
        for group in found["param_groups"]:
            (param,) = group["params"]
            for option, value in group.items():
                assert option == "params" or value == expected[f"param_groups.{param}.{option}"]


def _by_name(state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{name}.{slot}": value for name, slots in state.items() for slot, value in slots.items()}


def _parts(value: Any) -> list[tuple[Any, torch.Tensor]]:
    if not hasattr(value, "local_shards"):
        return [((0,) * value.dim(), value)]
    return [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]


def _narrowed(whole: torch.Tensor, offset: Any, shape: Any) -> torch.Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def test_plain_layouts_have_the_values_that_torchs_function_gives(ranks: Ranks, tmp_path: Path) -> None:
    """On 3 ranks, nested and flattened: every row that torch gives a rank is in our plain tensors, and options too."""
    ranks.run(3, _against_torch, tmp_path)


@table("name", ["nested", "flat", "dict", "modules"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_way_of_saving_gives_one_form(tmp_path: Path, name: str) -> None:
    """Saved by torch or by us, nested, flattened or as modules: state by parameter, which torch hands to an optimizer.

    Options that were saved by parameter fill any other grouping; groups that were saved as such are those they were.
    """
    model, optimizer = _checkpoints(tmp_path)
    expected = get_optimizer_state_dict(model, optimizer)
    found = load_sharded_optimizer_state_dict(get_model_state_dict(model), "optimizer", tmp_path / name)
    assert set(found) == {"optimizer"}
    assert set(found["optimizer"]) == {"state", "param_groups"}
    assert_same(found["optimizer"]["state"], expected["state"])
    options = {param: {**g, "params": None} for g in found["optimizer"]["param_groups"] for param in g["params"]}
    assert_same(options, {param: {**g, "params": None} for g in expected["param_groups"] for param in g["params"]})

    other = made_model(2)
    theirs, trained = _adamw(other), [param for param in other.parameters() if param.requires_grad]
    if name in ("flat", "modules"):
        theirs = torch.optim.AdamW([{"params": [param]} for param in trained], lr=3.0)
    set_optimizer_state_dict(other, theirs, found["optimizer"])
    assert_same(get_optimizer_state_dict(other, theirs)["state"], expected["state"])
    lrs = {param: float(group["lr"]) for group in theirs.param_groups for param in group["params"]}
    assert [lrs[param] for param in trained] == pytest.approx([0.01] * 2 + [0.003] * (len(trained) - 2))


def test_optimizers_without_state_get_their_options(tmp_path: Path) -> None:
    """Where no parameter has state, parameters with equal options share a group, as torch takes them."""
    model = made_model(1)
    dist_checkpointing.save(
        to_sharded_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.05)), tmp_path / "ckpt"
    )
    found = load_sharded_optimizer_state_dict(get_model_state_dict(model), "optimizer", tmp_path / "ckpt")["optimizer"]
    assert found["state"] == {}
    assert [len(group["params"]) for group in found["param_groups"]] == [len(list(model.parameters()))]

    other = torch.optim.SGD(model.parameters(), lr=1.0)
    set_optimizer_state_dict(model, other, found)
    assert other.param_groups[0]["lr"] == 0.05


class _Counting(torch.optim.SGD):
    """Keeps a number that is no tensor, and a nest."""

    def step(self, closure: Any = None) -> None:
        """Count."""
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["count"] = self.state[param].get("count", 0) + 1
                    self.state[param]["blocks"] = {"left": torch.ones(2), "right": torch.zeros(2)}


def test_state_that_is_no_tensor(tmp_path: Path) -> None:
    """Numbers and nests in a parameter's state come back, from objects and from common state alike."""
    model = made_model(1, layers=1)
    optimizer = _Counting([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    train_steps(model, optimizer, steps=3)
    nested = get_optimizer_state_dict(model, optimizer)
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "objects")
    dist_checkpointing.save(to_sharded_state_dict({"optimizer": nested}), tmp_path / "common")
    for name in ("objects", "common"):
        found = load_sharded_optimizer_state_dict(get_model_state_dict(model), "optimizer", tmp_path / name)
        assert_same(found["optimizer"]["state"], nested["state"])
        assert found["optimizer"]["state"]["0.up.weight"]["count"] == 3


def test_lists_of_state_come_back_as_lists(tmp_path: Path) -> None:
    """Of a list, plain DCP's keys have the positions: it is a list again, as in every other load of the folder."""
    state = {"w": {"past": [torch.ones(2), torch.zeros(2)], "count": 3}}
    dcp.save({"optimizer": {"state": state, "param_groups": []}}, checkpoint_id=tmp_path / "c")
    found = load_sharded_optimizer_state_dict({"w": torch.zeros(2)}, "optimizer", tmp_path / "c")["optimizer"]
    assert_same(found["state"], state)


def _named_key(directory: Path) -> None:
    model, _ = _job()
    load_sharded_optimizer_state_dict(get_model_state_dict(model), f"optim{dist.get_rank()}", directory)


def test_ranks_must_mean_the_same_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    """Another key on another rank is the same error on all of them."""
    model, optimizer = _job()
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "ckpt")
    outcomes = ranks.outcomes(2, _named_key, tmp_path / "ckpt")

    assert len({outcome.message for outcome in outcomes}) == 1
    assert "ranks disagree on optimizer_key" in outcomes[0].message


class _OwnPlanner(dcp.DefaultLoadPlanner):
    """A planner of a caller's own."""


def test_a_planner_is_taken_where_it_changes_nothing(tmp_path: Path) -> None:
    """The default planner of torch is as good as none; another is refused, and what is neither path nor reader."""
    model, optimizer = _job()
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "ckpt")
    params = get_model_state_dict(model)
    found = load_sharded_optimizer_state_dict(params, "optimizer", str(tmp_path / "ckpt"), dcp.DefaultLoadPlanner())
    assert found["optimizer"]["state"]
    for planner in (_OwnPlanner(), dcp.DefaultLoadPlanner(flatten_state_dict=False)):
        with pytest.raises(CheckpointingException, match="Planner would not be called"):
            load_sharded_optimizer_state_dict(params, "optimizer", tmp_path / "ckpt", planner)
    with pytest.raises(CheckpointingException, match="cannot load through a dict"):
        load_sharded_optimizer_state_dict(params, "optimizer", {})
    with pytest.raises(CheckpointingException, match=r"model_state_dict=an object of type Sequential: expected a dict"):
        load_sharded_optimizer_state_dict(model, "optimizer", tmp_path / "ckpt")  # type: ignore[arg-type]


def test_names_that_do_not_fit_are_explained(tmp_path: Path) -> None:
    """A key under which nothing is, and a model of other names, are errors that show what there is."""
    model, optimizer = _job()
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "ckpt")
    params = get_model_state_dict(model)
    with pytest.raises(KeyMismatchError, match=r"no state of an optimizer 'optim'; .* are model, optimizer: "):
        load_sharded_optimizer_state_dict(params, "optim", tmp_path / "ckpt")
    other = {f"_orig_mod.{name}": value for name, value in params.items()}
    found = r"the checkpoint has .*state\.0\.down\.bias\.exp_avg.* has _orig_mod\.0\.down"
    with pytest.raises(KeyMismatchError, match=found):
        load_sharded_optimizer_state_dict(other, "optimizer", tmp_path / "ckpt")


def test_by_numbers_is_not_by_names(tmp_path: Path) -> None:
    """An optimizer's own state dict numbers parameters: the error tells of get_optimizer_state_dict."""
    model, optimizer = _job()
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "ckpt")
    with pytest.raises(KeyMismatchError, match=r"state\.0\.exp_avg.*own state_dict\(\) has numbers"):
        load_sharded_optimizer_state_dict(get_model_state_dict(model), "optimizer", tmp_path / "ckpt")


def test_an_optimizer_may_lie_deeper_and_have_more(tmp_path: Path) -> None:
    """``optimizer_key`` may be a path, and what the optimizer has beside state and groups comes along."""
    model, optimizer = _job()
    nested: dict[str, Any] = get_optimizer_state_dict(model, optimizer)  # type: ignore[assignment]
    more = {**nested, "scale": {"growth": torch.tensor([2.0, 3.0]), "every": 5}}
    dist_checkpointing.save(to_sharded_state_dict({"train": {"optimizer": more}}), tmp_path / "ckpt")
    found = load_sharded_optimizer_state_dict(get_model_state_dict(model), "train.optimizer", tmp_path / "ckpt")
    assert_same(found["train.optimizer"], more)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    """State cannot be put where its parameter is if that is nowhere: the error says what to do first."""
    model, optimizer = _job()
    dist_checkpointing.save(to_sharded_state_dict(model, optimizer), tmp_path / "ckpt")
    with pytest.raises(ShardingError, match=r"exp_avg.*meta device.*to_empty"):
        load_sharded_optimizer_state_dict(model.to("meta").state_dict(), "optimizer", tmp_path / "ckpt")


@table(
    ("common", "tensors", "named"),
    [
        ({"param_groups": [{"params": ["w"]}]}, ("param_groups.3.lr",), "param_groups.3.lr"),
        ({"param_groups": {"w": 3}}, (), "param_groups.w"),
        ({"param_groups.w": 3}, (), "param_groups.w"),
        ({"state": {"w": 3}}, (), "state.w"),
        ({"state": {"gone": {"step": 1}}}, (), "state.gone.step"),
        ({}, ("state.w",), "state.w"),
    ],
)
def test_what_has_no_place_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, common: dict[str, Any], tensors: tuple[str, ...], named: str
) -> None:
    """Options of a group that is not there, and values where a parameter has a dict, are not left out in silence."""
    keys = [f"optimizer.{name}" for name in ("state.w.exp_avg", *tensors)]
    shards = {key: ShardedTensor.from_rank_offsets(key, torch.ones(3)) for key in keys}
    dist_checkpointing.save({**shards, "optimizer": common}, tmp_path / "c")
    loaded = load_sharded_optimizer_state_dict({"w": torch.zeros(3)}, "optimizer", tmp_path / "c")["optimizer"]
    assert caplog.messages[-1].endswith(f": {named}"), caplog.messages
    assert set(loaded["state"]["w"]) == {"exp_avg"}
    assert loaded["param_groups"] in ([], common.get("param_groups"))


def test_options_that_are_one_value_of_the_common_state(tmp_path: Path) -> None:
    """A flat name without an option has a dict of all of them."""
    shard = ShardedTensor.from_rank_offsets("optimizer.state.w.exp_avg", torch.ones(3))
    state = {"shard": shard, "optimizer": {"param_groups.w": {"lr": 0.5}}}
    dist_checkpointing.save(state, tmp_path / "c")
    loaded = load_sharded_optimizer_state_dict({"w": torch.zeros(3)}, "optimizer", tmp_path / "c")["optimizer"]
    assert loaded["param_groups"] == [{"lr": 0.5, "params": ["w"]}]
