"""Optimizer state comes back as it was saved: bits, dtype and type of each value, of frozen parameters too."""

from __future__ import annotations

import copy
import math
from collections import deque, namedtuple
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from tests.adapters.job import Job
from tests.adapters.same import is_same
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Pair = namedtuple("Pair", "first second")  # noqa: PYI024 any namedtuple

#: Of torch's own, but LBFGS, which has no state to ask for before a step, and SparseAdam, which takes sparse gradients.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Adam, amsgrad": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True),
    "Adam, fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1, t0=1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "high precision": lambda params: HighPrecision(params),  # noqa: PLW0108 defined below
}


class HighPrecision(torch.optim.Optimizer):
    """Keeps a float32 master, a counter and a large integer beside parameters of any dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the masters, and round them to the parameters."""
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state.update(
                    master=param.detach().clone().float(), count=torch.tensor(1000.0), seen=torch.tensor(300001)
                )
            state["master"] -= self.param_groups[0]["lr"] * param.grad.float() / 3
            state["count"] += 1
            param.copy_(state["master"])


@pytest.mark.parametrize("stepped", [False, True])
@table("name, dtype", [(name, dtype) for name in OPTIMIZERS for dtype in (torch.float32, torch.bfloat16)])
def test_state_keeps_bits_and_dtypes(tmp_path: Path, name: str, dtype: torch.dtype, stepped: bool) -> None:
    """State, options and the next steps are those of the job that was not interrupted, for any dtype of weights."""
    job, resumed = Job(OPTIMIZERS[name], dtype), Job(OPTIMIZERS[name], dtype)
    job.train(0, 1)
    if stepped:
        resumed.train(7)
    job.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    assert is_same(resumed.values(), job.values())
    for each in (job, resumed):
        each.train(2, 3, 4)
    assert is_same(resumed.values(), job.values())


@table("at_save, at_load", [((0,), (0,)), ((0,), ()), ((), (0,)), ((0, 1), (0,))])
def test_state_of_frozen_parameters_comes_back(
    tmp_path: Path, at_save: tuple[int, ...], at_load: tuple[int, ...]
) -> None:
    """A parameter may be frozen when it is saved or loaded: once unfrozen it goes on from where it was."""
    job, resumed = Job(OPTIMIZERS["AdamW"]), Job(OPTIMIZERS["AdamW"], frozen=at_load)
    job.train(0, 1)
    job.freeze(*at_save)
    job.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    assert is_same(resumed.values(), job.values())
    for each in (job, resumed):
        each.freeze()
        each.train(2, 3)
    assert is_same(resumed.values(), job.values())


VALUES = ["ema", deque([1, 2], maxlen=3), (1, 2.5), b"ab", None, True, 2**80, range(3), torch.float16, {"mode": "x"}]


@table("value", [*VALUES, (torch.ones(2), 3), [1, "x", torch.ones(1)]])
def test_values_of_any_type_keep_it(tmp_path: Path, value: Any) -> None:
    """What is no tensor keeps its own type: torch's load_state_dict makes the text of a generator of a str."""
    job, resumed = Job(OPTIMIZERS["AdamW"]), Job(OPTIMIZERS["AdamW"])
    for each in (job, resumed):
        each.train(0)
    job.optimizer.state[job.model[0].weight]["mine"] = value
    resumed.optimizer.state[resumed.model[0].weight]["mine"] = copy.deepcopy(value)
    job.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    assert is_same(resumed.values(), job.values())


def test_the_optimizers_own_load_runs(tmp_path: Path) -> None:
    """Hooks, and a load_state_dict of the class, see the state and the groups, and may add to them."""
    job, resumed = Job(OPTIMIZERS["AdamW"]), Job(OPTIMIZERS["AdamW"])
    job.train(0)
    job.save(tmp_path / "saved")
    seen = []

    class Own(torch.optim.AdamW):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            seen.append(("class", len(self.state), self.param_groups[0]["lr"]))

    resumed.optimizer = Own(resumed.model.parameters(), lr=0.7)
    resumed.optimizer.register_load_state_dict_post_hook(lambda own: seen.append(("hook", len(own.state), 0.1)))
    resumed.load(tmp_path / "saved")
    assert seen == [("hook", 4, 0.1), ("class", 4, 0.1)]


def test_a_class_that_counts_parameters_keeps_bits(tmp_path: Path) -> None:
    """A load_state_dict that looks at the numbers of parameters gets them, and what torch casts below it is undone."""

    class Counts(HighPrecision):
        def load_state_dict(self, state_dict: Any) -> None:
            assert [*state_dict["state"]] == [0, 1, 2, 3]
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state["count"] = state["count"] * 2

    job, resumed = Job(OPTIMIZERS["AdamW"], torch.bfloat16), Job(OPTIMIZERS["AdamW"], torch.bfloat16)
    job.optimizer, resumed.optimizer = (Counts(each.model.parameters()) for each in (job, resumed))
    job.train(0, 1)
    for state in job.optimizer.state.values():
        state["nested"] = {"mode": "x", "mean": torch.tensor([1.2345678]), "odd": torch.tensor([1.2345678, math.nan])}
    job.save(tmp_path / "saved")
    resumed.train(7)
    for state in resumed.optimizer.state.values():
        state["nested"] = {"mode": "", "mean": torch.zeros(1), "odd": torch.zeros(2)}
    resumed.load(tmp_path / "saved")
    for state in resumed.optimizer.state.values():
        odd = state["nested"].pop("odd")
        assert odd.dtype == torch.float32
        assert odd[0] == torch.tensor(1.2345678)
        assert odd[1].isnan()
    for state in job.optimizer.state.values():
        del state["nested"]["odd"]
        state["count"] = (state["count"] * 2).to(torch.bfloat16)  # the class made another value of what it was given
    assert is_same(resumed.values(), job.values())


def test_parameters_that_were_not_saved_keep_their_state(tmp_path: Path) -> None:
    """With ``strict=False`` a new layer keeps its weights, its state and, in a group of its own, its options."""
    job, resumed = Job(OPTIMIZERS["AdamW"]), Job(OPTIMIZERS["AdamW"])
    job.train(0, 1)
    job.save(tmp_path / "saved")
    resumed.model.append(nn.Linear(4, 4))
    resumed.optimizer.add_param_group({"params": list(resumed.model[2].parameters()), "lr": 0.3})
    resumed.train(5)
    before = copy.deepcopy([resumed.optimizer.state[each] for each in resumed.model[2].parameters()])
    template = to_sharded_state_dict(resumed.model, resumed.optimizer)
    loaded = dist_checkpointing.load(template, tmp_path / "saved", strict="log_all")
    load_into(loaded, resumed.model, resumed.optimizer, strict=False)
    assert is_same([resumed.optimizer.state[each] for each in resumed.model[2].parameters()], before)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.1, 0.3]
    for one, other in zip(job.model.parameters(), resumed.model.parameters(), strict=False):
        assert is_same(resumed.optimizer.state[other], job.optimizer.state[one])


def test_modules_that_change_their_state_dict_keep_it_too(tmp_path: Path) -> None:
    """Parameters have their names whatever a hook or a class does to the module's state dict."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"calls": 3}

    job, resumed = Job(OPTIMIZERS["high precision"], torch.bfloat16), Job(OPTIMIZERS["high precision"], torch.bfloat16)
    for each in (job, resumed):
        each.model.append(Extra(4, 4, dtype=torch.bfloat16))
        each.optimizer = HighPrecision(each.model.parameters())
    job.train(0, 1)
    job.save(tmp_path / "saved")
    resumed.model[2].requires_grad_(False)
    resumed.load(tmp_path / "saved")
    assert is_same(resumed.values(), job.values())


def test_names_of_parameters_are_no_option_of_each(tmp_path: Path) -> None:
    """Optimizers of named parameters: two stages load into one part, which keeps its own names, or has none."""
    stages = [nn.ModuleDict({name: nn.Linear(2, 2)}) for name in ("first", "second")]
    optimizers = [torch.optim.AdamW(each.named_parameters(), lr=0.3) for each in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        sum(parameter.sum() for parameter in stage.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
    dist_checkpointing.save(to_sharded_state_dict(stages, *optimizers), tmp_path / "saved")
    whole = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "second")})
    for named in (True, False):
        optimizer = torch.optim.AdamW(whole.named_parameters() if named else whole.parameters())
        loaded = dist_checkpointing.load(to_sharded_state_dict(whole, optimizer), tmp_path / "saved")
        load_into(loaded, whole, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.3
        names = optimizer.param_groups[0].get("param_names")
        assert names == ([name for name, _ in whole.named_parameters()] if named else None)
        assert is_same(optimizer.state[whole["second"].weight], optimizers[1].state[stages[1]["second"].weight])
