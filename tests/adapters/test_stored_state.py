"""A load takes the optimizer state that the checkpoint has: no step is taken, and no live state decides what comes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.adapters.dtensor import LayoutCache
from shardckpt.adapters.leaves import describe_object, describe_tree
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError
from shardckpt.optimizer_state import load_sharded_optimizer_state_dict
from tests.adapters.job import Job
from tests.adapters.same import is_same
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Momentum(torch.optim.Optimizer):
    """Momentum in float32, with a count that is a number; the classes below each cannot be stepped to see its state."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add the gradients to the momentum."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("momentum", torch.zeros_like(param, dtype=torch.float32)).add_(param.grad.float())
                    param.sub_(state["momentum"], alpha=group["lr"])


class Upcasts(Momentum):
    """Takes gradients of bfloat16, which parameters must allow."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        for param in params:
            param.grad_dtype = torch.bfloat16
        super().__init__(params)


class NoClosure(Momentum):
    """Has a step without an argument."""

    def step(self) -> None:  # type: ignore[override]
        """Add the gradients."""
        super().step()


class TrainMode(Momentum):
    """Must be told that it trains."""

    is_training = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add the gradients."""
        assert self.is_training, "call optimizer.train() first"
        super().step(closure)


STEPPED = {
    "a dtype of gradients": Upcasts,
    "no closure": NoClosure,
    "a mode": TrainMode,
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=4),
}


@table("make, stepped", [(make, stepped) for make in STEPPED.values() for stepped in (False, True)])
def test_no_step_is_needed(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer], stepped: bool) -> None:
    """Optimizers that no step of ours could fill go on as if never stopped."""
    job, resumed = Job(make), Job(make)
    job.train(0, 1)
    if stepped:
        resumed.train(5)
    job.save(tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.values(), job.values())
    for each in (job, resumed):
        each.train(2, 3)
    assert is_same(resumed.values(), job.values())


AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
CHANGED: dict[str, tuple[Any, Any]] = {
    "momentum, then none": (lambda p: SGD(p, momentum=0.9), SGD),
    "no momentum, then some": (SGD, lambda p: SGD(p, momentum=0.9)),
    "amsgrad, then not": (lambda p: AdamW(p, amsgrad=True), AdamW),
    "amsgrad since": (AdamW, lambda p: AdamW(p, amsgrad=True)),
    "lr a number since": (lambda p: AdamW(p, lr=torch.tensor(0.25)), lambda p: AdamW(p, lr=0.5)),
    "lr a tensor since": (lambda p: AdamW(p, lr=0.25), lambda p: AdamW(p, lr=torch.tensor(0.5))),
    "an option more": (lambda p: Momentum(p, d=torch.tensor(2.0), k=3), lambda p: Momentum(p, d=1.0, k=1)),
}


@table("saved, resumed, stepped", [(*pair, stepped) for pair in CHANGED.values() for stepped in (False, True)])
def test_what_is_stored_wins(tmp_path: Path, saved: Any, resumed: Any, stepped: bool) -> None:
    """State and options are those of the save, whatever type, dtype or number of them the optimizer has that loads."""
    job, other = Job(saved), Job(resumed)
    job.train(0, 1)
    if stepped:
        other.train(5)
    job.save(tmp_path / "c")
    other.load(tmp_path / "c")
    assert is_same(other.values(), job.values())


def test_another_class_gets_all(tmp_path: Path) -> None:
    """The state that another class of optimizer saved is not dropped: it stands in the state, as torch has it."""
    job, other = Job(AdamW), Job(SGD)
    job.train(0, 1)
    job.save(tmp_path / "c")
    other.load(tmp_path / "c")
    assert is_same(other.values()[-1]["state"], job.values()[-1]["state"])


EMPTY = {"params": [], "lr": 7.0, "weight_decay": 0.03}


@table("first, last", [(1, 0), (0, 1), (1, 1), (2, 0)])
def test_groups_without_parameters_keep_their_options(tmp_path: Path, first: int, last: int) -> None:
    """Those of each, by its number: a scheduler counts groups."""

    def make(shift: float) -> Callable[[Any], torch.optim.Optimizer]:
        empty = [{**EMPTY, "lr": EMPTY["lr"] + shift * number} for number in range(first + last)]
        return lambda params: AdamW([*empty[:first], {"params": list(params)}, *empty[first:]], lr=shift)

    job, resumed = Job(make(0.1)), Job(make(0.2))
    job.train(0)
    job.save(tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.values(), job.values())


def test_a_group_that_no_optimizer_has_is_unused(tmp_path: Path) -> None:
    """Options of a group whose parameters no optimizer has any more are not left out in silence, without state too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    head = torch.optim.SGD(model[1].parameters(), lr=0.25)
    both = torch.optim.SGD(model[1].parameters(), lr=0.25)
    both.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
    dist_checkpointing.save(to_sharded_state_dict(model, both), tmp_path / "c")
    with pytest.raises(
        KeyMismatchError, match=r"unused keys .*: 1 \(1 of optimizer\): optimizer\.param_groups\.\(group"
    ):
        dist_checkpointing.load(to_sharded_state_dict(model, head), tmp_path / "c", on_unused="error")
    dist_checkpointing.load(to_sharded_state_dict(model, both), tmp_path / "c", on_unused="error")
    one = torch.optim.SGD(model.parameters(), lr=1.0)  # cut otherwise: all are asked for, and must agree
    with pytest.raises(CheckpointingException, match="saved with different values of lr"):
        load_into(dist_checkpointing.load(to_sharded_state_dict(model, one), tmp_path / "c"), model, one)


def test_groups_may_be_cut_otherwise(tmp_path: Path) -> None:
    """Groups that are split, joined or in another order get the options that their parameters had."""

    def grouped(*numbers: list[int], lr: float = 0.0) -> Callable[[Any], torch.optim.Optimizer]:
        def make(params: Any) -> torch.optim.Optimizer:
            listed = list(params)
            return AdamW(
                [{"params": [listed[n] for n in each], "lr": lr or 0.1 * (each[0] % 2 + 1)} for each in numbers]
            )

        return make

    job = Job(grouped([0, 2], [1, 3]))
    job.train(0)
    job.save(tmp_path / "c")
    for groups in ([[3], [2], [1], [0]], [[1, 3], [2, 0]]):
        resumed = Job(grouped(*groups, lr=5.0))
        resumed.load(tmp_path / "c")
        assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.1 * (each[0] % 2 + 1) for each in groups]
        for one, other in zip(resumed.model.parameters(), job.model.parameters(), strict=True):
            assert is_same(resumed.optimizer.state[one], job.optimizer.state[other])


def test_options_by_parameter_are_read(tmp_path: Path) -> None:
    """Until 27 November 2026 each parameter had an object with its options, and tensors among them under its name."""
    job, resumed = Job(lambda p: AdamW(p, lr=torch.tensor(0.25), weight_decay=0.5)), Job(AdamW)
    job.train(0)
    described, rate = to_sharded_state_dict(job.model, job.optimizer), torch.tensor(0.25)
    options = {name: value for name, value in job.optimizer.param_groups[0].items() if name not in ("params", "lr")}
    described["optimizer"]["param_groups"] = {
        name: {
            "values": describe_object(options, f"optimizer.param_groups.{name}", True),
            "tensors": describe_tree(
                {"lr": rate}, f"optimizer.param_groups.{name}", True, objects=True, cache=LayoutCache()
            ),
        }
        for name, _ in job.model.named_parameters()
    }
    dist_checkpointing.save(described, tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.values(), job.values())


class Masters(AdamW):
    """Has entries of its own in its state dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.masters: dict[int, torch.Tensor] = {}
        self.k = 0

    def step(self, closure: Any = None) -> Any:
        """Count, and keep copies."""
        super().step(closure)
        self.k += 1
        self.masters = {n: p.detach().double() * self.k for n, p in enumerate(self.param_groups[0]["params"])}

    def state_dict(self) -> Any:
        """Both."""
        return {**super().state_dict(), "masters": self.masters, "k": self.k}

    def load_state_dict(self, state_dict: Any) -> None:
        """Both."""
        self.masters, self.k = state_dict["masters"], state_dict["k"]
        super().load_state_dict(state_dict)


class Wrapper(torch.optim.Optimizer):
    """Has its state in an optimizer inside, and a state dict of its own structure."""

    def __init__(self, params: Any) -> None:
        self.inside = AdamW(params)
        super().__init__(self.inside.param_groups, {})
        self.param_groups = self.inside.param_groups
        self.slow: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step inside."""
        self.inside.step()
        self.slow = [param.detach() / 2 for param in self.param_groups[0]["params"]]

    def state_dict(self) -> Any:
        """Of the optimizer inside, and more."""
        return {"base": self.inside.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        """Of both."""
        self.inside.load_state_dict(state_dict["base"])
        self.slow = state_dict["slow"]


@pytest.mark.parametrize("make", [Masters, Wrapper])
def test_entries_of_a_class_come_back(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """What a state dict has beside state and groups is stored too, with keys of any type."""
    job, resumed = Job(make), Job(make)
    job.train(0, 1)
    job.save(tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.values(), job.values())
    for each in (job, resumed):
        each.train(2)
    assert is_same(resumed.values(), job.values())


def test_entries_that_were_not_saved_are_kept_or_named(tmp_path: Path) -> None:
    """A class that has more since keeps its own; one whose whole state is its own structure refuses another's."""
    job = Job(AdamW)
    job.train(0)
    job.save(tmp_path / "c")
    resumed = Job(Masters)
    resumed.train(1)
    resumed.load(tmp_path / "c")
    assert resumed.optimizer.k == 1  # type: ignore[attr-defined]
    assert is_same(resumed.optimizer.state[resumed.model[0].weight], job.optimizer.state[job.model[0].weight])
    with pytest.raises(KeyMismatchError, match="optimizer 0 has a state dict of its own structure"):
        Job(Wrapper).load(tmp_path / "c")


@table("value", [torch.tensor([3.0]), {"k": 5, "of": {1: torch.ones(2)}}, 7])
def test_state_of_no_parameter_comes_back(tmp_path: Path, value: Any) -> None:
    """Classes that count for all parameters at once do it under a key of their own."""
    job, resumed = Job(AdamW), Job(AdamW)
    job.train(0)
    job.optimizer.state["all"] = value
    job.save(tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.optimizer.state["all"], value)  # type: ignore[index]
    assert is_same(resumed.values(), job.values())


CONTAINERS: dict[str, Any] = {
    "a list of tensors": [torch.ones(2), torch.zeros(3, dtype=torch.float64)],
    "an empty list": [],
    "an empty dict": {},
    "integers": {0: torch.ones(2), 1: {2: "x"}},
    "dots": {"a.b": torch.ones(1), "a": {"c": 1}},
    "lists of dicts": [{"m": torch.ones(4, 4)}, {"m": None}],
    "an ordered dict": OrderedDict(b=torch.ones(1), a=2),
    "names": {"left": {"q": torch.eye(4), "n": 3}},
    "no tensors": [[1, 2], ["x"]],
}


@pytest.mark.parametrize("stepped", [False, True])
@table("value", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_are_those_of_the_save(tmp_path: Path, value: Any, stepped: bool) -> None:
    """Lists, keys that are no names, and nested state come back as they were, into fresh optimizers too."""
    job, resumed = Job(Momentum), Job(Momentum)
    job.train(0)
    if stepped:
        resumed.train(1)
    job.optimizer.state[job.model[0].weight]["mine"] = value
    job.save(tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.values(), job.values())


def test_checkpoints_without_forms_load_into_lists(tmp_path: Path) -> None:
    """Until 27 November 2026 lists of state were stored by position alone: the live optimizer says that it is one."""
    job, resumed = Job(STEPPED["LBFGS"]), Job(STEPPED["LBFGS"])
    for each in (job, resumed):
        each.train(0, 1)
    described = to_sharded_state_dict(job.model, job.optimizer)
    state = {"0.weight": job.optimizer.state[job.model[0].weight]}
    described["optimizer"]["state"] = describe_tree(state, "optimizer.state", True, objects=True, cache=LayoutCache())
    dist_checkpointing.save(described, tmp_path / "c")
    fresh = Job(STEPPED["LBFGS"])
    resumed.train(2, 3)
    for each in (resumed, fresh):
        each.load(tmp_path / "c")
        assert is_same(each.values(), job.values())


def test_stock_dcp_folders_fill_fresh_optimizers(tmp_path: Path) -> None:
    """Numbers that DCP stores one by one are state like tensors."""
    job, resumed = Job(Momentum), Job(Momentum)
    job.train(0, 1)
    state = {
        "model": get_model_state_dict(job.model),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer),
    }
    dcp.save(state, checkpoint_id=tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.values(), job.values())


def test_casts_of_a_class_are_undone_in_lists(tmp_path: Path) -> None:
    """A load_state_dict that calls torch's casts what stands in lists, too."""

    class Calls(Momentum):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)

    job, resumed = Job(Calls), Job(Calls)
    for each in (job, resumed):
        each.model.bfloat16()
    state = {"h": [torch.tensor(1.001)], "q": [{"n": torch.tensor([257])}]}
    job.optimizer.state[job.model[0].weight].update(copy.deepcopy(state))
    job.save(tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.optimizer.state[resumed.model[0].weight], state)


def test_memory_of_two_is_loaded_into_once(tmp_path: Path) -> None:
    """Live state that shares memory, with a parameter or other state, gets its own where the save had other values."""
    job, resumed = Job(Momentum), Job(Momentum)
    for each in (job, resumed):
        each.train(0)
    weight = job.model[0].weight
    job.optimizer.state[weight].update(a=torch.ones(4, 4), b=torch.zeros(4, 4), anchor=torch.full((4, 4), 5.0))
    other = torch.empty(4, 4)
    mine = resumed.model[0].weight
    resumed.optimizer.state[mine].update(a=other, b=other, anchor=mine.detach())
    job.save(tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.values(), job.values())


def test_lazy_modules_load_with_their_optimizer(tmp_path: Path) -> None:
    """Before its first forward pass a lazy module loads with the state of its optimizer, and trains on alike."""
    saved, loaded = (nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()) for _ in range(2))
    saved(torch.zeros(2, 3))
    optimizers = [torch.optim.Adam(model.parameters()) for model in (saved, loaded)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()

    step(saved, optimizers[0])
    dist_checkpointing.save(to_sharded_state_dict(saved, optimizers[0]), tmp_path / "c")
    state = dist_checkpointing.load(to_sharded_state_dict(loaded, optimizers[1]), tmp_path / "c")
    load_into(state, loaded, optimizers[1])
    for _ in range(2):
        assert is_same(optimizers[1].state_dict(), optimizers[0].state_dict())
        assert is_same(loaded.state_dict(), saved.state_dict())
        step(saved, optimizers[0])
        step(loaded, optimizers[1])


def test_optimizers_without_parameters_are_told_apart(tmp_path: Path) -> None:
    """Two that are empty keep the options of each: by their position."""
    model = nn.Linear(2, 2)

    def made(*rates: float) -> list[torch.optim.Optimizer]:
        return [AdamW([{"params": [], "lr": rate}]) for rate in rates]

    empty = nn.Module()
    saved, loaded = made(0.7, 0.2), made(0.0, 0.0)
    parts = [model, empty]
    own = torch.optim.SGD(model.parameters())
    dist_checkpointing.save(to_sharded_state_dict(parts, own, *saved), tmp_path / "c")
    load_into(dist_checkpointing.load(to_sharded_state_dict(parts, own, *loaded), tmp_path / "c"), parts, own, *loaded)
    assert [each.param_groups[0]["lr"] for each in loaded] == [0.7, 0.2]


def test_hooks_may_name_parameters(tmp_path: Path) -> None:
    """A state dict whose hook has put names in the place of numbers is stored as it is, and handed back."""

    def name_them(optimizer: Any, state_dict: Any) -> Any:
        state = {f"p{number}": value for number, value in state_dict["state"].items()}
        groups = [{**group, "params": [f"p{n}" for n in group["params"]]} for group in state_dict["param_groups"]]
        return {"state": state, "param_groups": groups}

    def number_them(optimizer: Any, state_dict: Any) -> Any:
        state = {int(name[1:]): value for name, value in state_dict["state"].items()}
        groups = [{**group, "params": [int(n[1:]) for n in group["params"]]} for group in state_dict["param_groups"]]
        return {"state": state, "param_groups": groups}

    job, resumed = Job(AdamW), Job(AdamW)
    for each in (job, resumed):
        each.optimizer.register_state_dict_post_hook(name_them)
        each.optimizer.register_load_state_dict_pre_hook(number_them)
    job.train(0, 1)
    job.save(tmp_path / "c")
    resumed.load(tmp_path / "c")
    assert is_same(resumed.values(), job.values())


@table("state", [{"(form)": [torch.ones(1)]}, {"x": [("shardckpt: a tensor", "float32", (1,))]}])
def test_what_would_be_taken_for_a_form_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    """A save does not write what a load would misread."""
    job = Job(AdamW)
    job.optimizer.state[job.model[0].weight].update(state)
    with pytest.raises(ShardingError, match=r"which is taken|which stands for a tensor"):
        job.save(tmp_path / "c")


@table("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_state_keeps_its_bits(tmp_path: Path, kind: str) -> None:
    """States of torchao are stored by the tensors inside: nothing is quantized anew at a resume."""
    low_bit = pytest.importorskip("torchao.optim")

    class Wide(Job):
        def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Linear(4, 2048), nn.Linear(2048, 4))
            self.optimizer = make(self.model.parameters())

    job, resumed = (Wide(getattr(low_bit, kind)) for _ in range(2))
    with torch.compiler.set_stance("force_eager"):  # a compiler is a process
        job.train(0, 1)
        before = job.optimizer.state_dict()["state"]
        assert any(type(value) is not torch.Tensor for state in before.values() for value in state.values())
        job.save(tmp_path / "c")
        resumed.load(tmp_path / "c")
        after = resumed.optimizer.state_dict()["state"]
        for number, state in before.items():
            for name, value in state.items():
                other = after[number][name]
                assert type(other) is type(value)
                for inside in getattr(value, "tensor_attrs", ()):
                    assert is_same(getattr(other, inside), getattr(value, inside))
        for each in (job, resumed):
            each.train(2)
        assert is_same([*resumed.model.parameters()], [*job.model.parameters()])


def test_a_class_that_is_not_imported_is_named(tmp_path: Path) -> None:
    """A checkpoint does not decide what is imported: the error says which module has the class."""
    from shardckpt.adapters import wrappers

    job = Job(AdamW)
    job.optimizer.state[job.model[0].weight]["x"] = [
        {wrappers.CLASS: "nowhere.Packed", "inner": {}, "context": None, "shape": (1,), "stride": (1,)}
    ]
    job.save(tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"nowhere\.Packed, which is not imported: import nowhere"):
        job.load(tmp_path / "c")


class SharedDefault(Momentum):
    """All groups have one list, a default, in which each step is counted."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, counts=[0, 0])


def test_groups_that_share_a_list_share_it_again(tmp_path: Path) -> None:
    """A default that is a list is one object for all groups, of which each sees what the others put there."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return model, SharedDefault([{"params": [*layer.parameters()]} for layer in model])

    job, fresh = start(), start()
    job[1].param_groups[0]["counts"][1] = 5
    dist_checkpointing.save(to_sharded_state_dict(*job), tmp_path / "c")
    load_into(dist_checkpointing.load(to_sharded_state_dict(*fresh), tmp_path / "c"), *fresh)
    first, second = (group["counts"] for group in fresh[1].param_groups)
    assert first == [0, 5]
    assert first is second


def _start_many(order: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of many layers, each with a group of its own; the groups in one order or the other."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    groups = [{"params": [*layer.parameters()], "lr": 0.1} for layer in model][::order]
    return model, torch.optim.SGD(groups)


def test_options_of_many_groups_are_one_object(tmp_path: Path) -> None:
    """Hundreds of groups cost as few objects as one; their options come back by parameter, in any order of groups."""
    model, optimizer = _start_many(1)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = float(number)
    state = to_sharded_state_dict(model, optimizer)
    assert [name.partition(" ")[0] for name in state["optimizer"]["param_groups"]] == ["(groups"]
    dist_checkpointing.save(state, tmp_path / "c")
    for order in (1, -1):
        other, fresh = _start_many(order)
        load_into(dist_checkpointing.load(to_sharded_state_dict(other, fresh), tmp_path / "c"), other, fresh)
        assert [group["lr"] for group in fresh.param_groups][::order] == [float(number) for number in range(20)]
    found = load_sharded_optimizer_state_dict(model.state_dict(), "optimizer", tmp_path / "c")["optimizer"]
    assert sorted(group["lr"] for group in found["param_groups"]) == [float(number) for number in range(20)]
