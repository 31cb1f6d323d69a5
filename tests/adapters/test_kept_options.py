"""Options of groups may keep their live values while the moments load."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import CheckpointingException
from tests.adapters.job import Job
from tests.adapters.kept_options import resume_sharded
from tests.adapters.same import is_same
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

AdamW = torch.optim.AdamW


def _load(job: Job, path: Path, keep: Any) -> None:
    loaded = dist_checkpointing.load(to_sharded_state_dict(job.model, job.optimizer), path)
    load_into(loaded, job.model, job.optimizer, keep_options=keep)


def _save(path: Path, **options: Any) -> Job:
    job = Job(lambda params: AdamW(params, **{"lr": 0.1, "weight_decay": 0.3, "betas": (0.5, 0.6), **options}))
    job.train(0, 1)
    job.save(path)
    return job


@pytest.mark.parametrize(
    ("keep", "lr", "weight_decay", "betas"),
    [
        ((), 0.1, 0.3, (0.5, 0.6)),
        (("lr",), 0.01, 0.3, (0.5, 0.6)),
        ("lr", 0.01, 0.3, (0.5, 0.6)),
        (["lr", "weight_decay"], 0.01, 0.0, (0.5, 0.6)),
        ("all", 0.01, 0.0, (0.9, 0.95)),
    ],
)
def test_named_options_keep_their_live_values(
    tmp_path: Path, keep: Any, lr: float, weight_decay: float, betas: tuple[float, float]
) -> None:
    """The others, and all moments, are those of the save."""
    job = _save(tmp_path / "c")
    other = Job(lambda params: AdamW(params, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95)))
    _load(other, tmp_path / "c", keep)
    (group,) = other.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (lr, weight_decay, betas)
    assert is_same(other.values()[-1]["state"], job.values()[-1]["state"])


def test_a_kept_tensor_is_the_same_object(tmp_path: Path) -> None:
    """A learning rate that is a tensor, of which graphs have the address, is neither copied nor filled."""
    _save(tmp_path / "c", lr=torch.tensor(0.1))
    own = torch.tensor(0.01)
    other = Job(lambda params: AdamW(params, lr=own))
    _load(other, tmp_path / "c", "lr")
    assert other.optimizer.param_groups[0]["lr"] is own
    assert own == torch.tensor(0.01)


def test_an_option_that_no_group_has_is_refused(tmp_path: Path) -> None:
    """The error lists the options that there are, and nothing changes before it."""
    _save(tmp_path / "c")
    other = Job(lambda params: AdamW(params, lr=0.01))
    loaded = dist_checkpointing.load(to_sharded_state_dict(other.model, other.optimizer), tmp_path / "c")
    before = copy.deepcopy(other.optimizer.state_dict())
    with pytest.raises(CheckpointingException, match=r"'learning_rate', 'params'.*no option.*amsgrad.*'lr'.*'weight_"):
        load_into(loaded, other.model, other.optimizer, keep_options=("lr", "learning_rate", "params"))
    assert is_same(other.optimizer.state_dict(), before)


def test_options_of_no_optimizer_are_refused() -> None:
    """Without an optimizer there is nothing to keep."""
    model = nn.Linear(2, 2)
    for keep in ("lr", "all"):
        with pytest.raises(CheckpointingException, match=r"keep_options.*there are none"):
            load_into(dict(model.state_dict()), model, keep_options=keep)


def test_what_is_kept_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line has the kept values and, where others were saved, those."""
    _save(tmp_path / "c")
    other = Job(lambda p: AdamW([{"params": [each]} for each in p], lr=0.01, weight_decay=0.3))
    with caplog.at_level(logging.INFO, "shardckpt.adapters"):
        _load(other, tmp_path / "c", ("lr", "weight_decay"))
    (text,) = [record.getMessage() for record in caplog.records if "keep_options" in record.getMessage()]
    assert "lr=0.01 (saved: 0.1)" in text
    assert "weight_decay=0.3" in text
    assert "weight_decay=0.3 (" not in text


def test_groups_need_not_agree_about_what_is_kept(tmp_path: Path) -> None:
    """Parameters that were saved with different values of a kept option may be in one group."""
    job = Job(lambda p: AdamW([{"params": [each], "lr": 0.1 * (n + 1)} for n, each in enumerate(p)]))
    job.train(0)
    job.save(tmp_path / "c")
    other = Job(lambda params: AdamW(params, lr=0.01))
    with pytest.raises(CheckpointingException, match="different values of lr"):
        other.load(tmp_path / "c")
    _load(other, tmp_path / "c", ["lr"])
    assert other.optimizer.param_groups[0]["lr"] == 0.01
    assert is_same(other.values()[-1]["state"], job.values()[-1]["state"])


def test_a_group_that_lacks_a_kept_option_gets_the_saved_one(tmp_path: Path) -> None:
    """Only live values are kept: what a scheduler had added to a group comes back into one without it."""
    job = Job(lambda params: AdamW(params, lr=0.1))
    job.optimizer.param_groups[0]["initial_lr"] = 0.5
    job.save(tmp_path / "c")
    other = Job(lambda params: AdamW(params, lr=0.01))
    _load(other, tmp_path / "c", "all")
    assert (other.optimizer.param_groups[0]["lr"], other.optimizer.param_groups[0]["initial_lr"]) == (0.01, 0.5)


def test_groups_without_parameters_keep_theirs(tmp_path: Path) -> None:
    """An empty group keeps the named options, and gets the others."""

    def make(lr: float) -> Job:
        empty = {"params": [], "lr": 10 * lr, "weight_decay": lr}
        return Job(lambda params: AdamW([empty, {"params": list(params)}], lr=lr))

    make(0.1).save(tmp_path / "c")
    other = make(0.01)
    _load(other, tmp_path / "c", "lr")
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.01]
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.1


class Wrapper(torch.optim.Optimizer):
    """Has an optimizer inside, and a state dict of its own structure; its groups are those of the first moment."""

    def __init__(self, inner: torch.optim.Optimizer, *, alias: bool) -> None:
        self.inner, self._alias, self.count = inner, alias, 0
        self._groups = inner.param_groups

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Those of the optimizer inside; a list that was taken once goes stale, as in some packages."""
        return self._groups if self._alias else self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer inside."""
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count, and let the other step."""
        self.count += 1
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside, and the count."""
        return {"inner": [self.inner.state_dict()], "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both."""
        self.inner.load_state_dict(state_dict["inner"][0])
        self.count = state_dict["count"]


@pytest.mark.parametrize("alias", [False, True])
def test_optimizers_inside_others_keep_theirs(tmp_path: Path, alias: bool) -> None:
    """The groups of a wrapped optimizer keep the named options, those of the optimizer inside and those shown."""
    job = Job(lambda params: Wrapper(AdamW(params, lr=0.1, weight_decay=0.3), alias=alias))
    job.train(0, 1)
    job.save(tmp_path / "c")
    other = Job(lambda params: Wrapper(AdamW(params, lr=0.01, weight_decay=0.0), alias=alias))
    _load(other, tmp_path / "c", ["lr"])
    wrapper: Any = other.optimizer
    assert wrapper.count == 2
    assert (wrapper.inner.param_groups[0]["lr"], wrapper.param_groups[0]["lr"]) == (0.01, 0.01)
    assert wrapper.inner.param_groups[0]["weight_decay"] == 0.3
    assert is_same(wrapper.inner.state_dict()["state"], job.optimizer.inner.state_dict()["state"])  # type: ignore[attr-defined]


class Doubling(AdamW):
    """Shows what its groups are while it loads."""

    seen: float

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep what a class would compute from an option."""
        super().load_state_dict(state_dict)
        self.seen = self.param_groups[0]["lr"]


def test_a_class_sees_the_kept_options_while_it_loads(tmp_path: Path) -> None:
    """What a class makes of its options in load_state_dict, it makes of those that it keeps."""
    _save(tmp_path / "c")
    other = Job(lambda params: Doubling(params, lr=0.01))
    _load(other, tmp_path / "c", "lr")
    assert other.optimizer.seen == 0.01  # type: ignore[attr-defined]


def test_an_option_of_one_of_several_optimizers_is_enough(tmp_path: Path) -> None:
    """Of several optimizers, those that have a named option keep it; the others load all."""

    def make(lr: float, momentum: float) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        sgd = torch.optim.SGD(model[0].parameters(), lr=lr, momentum=momentum)
        return model, sgd, AdamW(model[1].parameters(), lr=lr)

    dist_checkpointing.save(to_sharded_state_dict(*make(0.1, 0.9)), tmp_path / "c")
    model, sgd, adamw = make(0.01, 0.5)
    loaded = dist_checkpointing.load(to_sharded_state_dict(model, sgd, adamw), tmp_path / "c")
    load_into(loaded, model, sgd, adamw, keep_options=["momentum"])
    assert sgd.param_groups[0]["momentum"] == 0.5
    assert (sgd.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.1, 0.1)


@table("flattened, keep", [(flat, keep) for flat in (False, True) for keep in ("lr", "all")])
def test_options_of_dcp_are_kept_alike(tmp_path: Path, flattened: bool, keep: str) -> None:
    """Of what plain DCP saved, nested or with options by parameter, the moments load and the named options stay."""
    job = Job(lambda params: AdamW(params, lr=0.1, weight_decay=0.3))
    job.train(0, 1)
    form = StateDictOptions(flatten_optimizer_state_dict=flattened)
    state = get_optimizer_state_dict(job.model, job.optimizer, options=form)
    dcp.save({"model": get_model_state_dict(job.model), "optimizer": state}, checkpoint_id=tmp_path / "c")
    other = Job(lambda params: AdamW(params, lr=0.01, weight_decay=0.0))
    _load(other, tmp_path / "c", keep)
    (group,) = other.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.01, 0.0 if keep == "all" else 0.3)
    assert is_same(other.values()[-1]["state"], job.values()[-1]["state"])


def test_sharded_optimizers_keep_theirs(ranks: Ranks, tmp_path: Path) -> None:
    """Under FSDP2 each rank keeps the named option and loads the other."""
    assert ranks.run(2, resume_sharded, tmp_path / "c") == [[0.25, 0.5]] * 2
