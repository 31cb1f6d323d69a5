"""Folders of other trainers by the names that these give their states: known ones, and ``rename=`` for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance import convert_checkpoint
from shardckpt.manager import CheckpointConfig, CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class _Counter:
    """A plain state."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def _train(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def _save(path: Path, nest: Callable[[Any, Any, Any], dict[str, Any]]) -> tuple[nn.Module, torch.optim.AdamW]:
    model, optimizer = _train(1)
    state = nest(get_model_state_dict(model), get_optimizer_state_dict(model, optimizer), {"seen": 7})
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return model, optimizer


def _resume(
    path: Path, also: dict[str, Any] | None = None, **settings: Any
) -> tuple[nn.Module, torch.optim.AdamW, _Counter]:
    model, optimizer = _train(0)
    states = {"model": model, "optimizer": optimizer, "data": (data := _Counter()), **(also or {})}
    config = CheckpointConfig(
        folder=str(path.parent / "steps"), initial_load_path=str(path), initial_load_model_only=False, **settings
    )
    with CheckpointManager(config, states) as manager:
        manager.load()
    return model, optimizer, data


_KNOWN: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "tutorial": lambda model, optimizer, data: {"model": model, "optim": optimizer, "data": data},
    "app": lambda model, optimizer, data: {"app": {"model": model, "optim": optimizer, "data": data}},
    "lightning": lambda model, optimizer, data: {"state_dict": model, "optimizer_0": optimizer, "data": data},
    "script": lambda m, o, data: {"model_state_dict": m, "optimizer_state_dict": o, "data": data},
}


@pytest.mark.parametrize("nest", _KNOWN.values(), ids=_KNOWN)
def test_the_usual_names_are_known(tmp_path: Path, nest: Callable[[Any, Any, Any], dict[str, Any]]) -> None:
    """A stock DCP folder of a tutorial, a trainer or a script loads into ``model`` and ``optimizer``, bit for bit."""
    saved, saved_optimizer = _save(tmp_path / "c", nest)
    model, optimizer, data = _resume(tmp_path / "c")
    assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), model.parameters(), strict=True))
    for one, other in zip(saved.parameters(), model.parameters(), strict=True):
        assert torch.equal(saved_optimizer.state[one]["exp_avg"], optimizer.state[other]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == saved_optimizer.param_groups[0]["lr"]
    assert data.seen == 7


def test_others_are_given(tmp_path: Path) -> None:
    """``rename`` takes the names of the folder, also of parts of a state."""
    saved, saved_optimizer = _save(
        tmp_path / "c", lambda model, optimizer, data: {"nets": {"gen": model}, "o": optimizer, "extra": {"it": data}}
    )
    model, optimizer, data = _resume(tmp_path / "c", rename={"nets.gen": "model", "extra.it": "data"})  # one optimizer
    assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), model.parameters(), strict=True))
    assert len(optimizer.state) == 4
    assert optimizer.param_groups[0]["lr"] == saved_optimizer.param_groups[0]["lr"]
    assert data.seen == 7


def test_an_error_names_what_the_folder_has(tmp_path: Path) -> None:
    """Of a state that is not there, of a name that is not there, and of one that is taken."""
    _save(tmp_path / "c", lambda model, optimizer, data: {"net": model, "optim": optimizer, "counter": data})
    names = "its names begin with counter, net, optim"
    with pytest.raises(CheckpointingException, match=rf"no state 'data', 'model'; {names}\. .*rename="):
        _resume(tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"'nett': did you mean net\? .* names are counter, net, opt"):
        _resume(tmp_path / "c", rename={"nett": "model"})
    with pytest.raises(CheckpointingException, match=r"named modle; did you mean model\? there are model, opt"):
        _resume(tmp_path / "c", rename={"net": "modle"})
    _save(tmp_path / "a", lambda m, o, data: {"app": {"model": m, "optim": o, "sched": data}})
    with pytest.raises(CheckpointingException, match=r"no state 'data'; .* with app\.model, app\.optim, app\.sched"):
        _resume(tmp_path / "a")
    _save(tmp_path / "d", lambda m, o, data: {"model": m, "optimizer": o, "data": data, "x": data})
    with pytest.raises(CheckpointingException, match=r"'x' cannot become 'data': the checkpoint has data\.seen"):
        _resume(tmp_path / "d", rename={"x": "data"})


@pytest.mark.parametrize("rename", [{}, {"": "model"}], ids=["known", "given"])
def test_a_bare_model_is_read(tmp_path: Path, rename: dict[str, str]) -> None:
    """Of a model at the top level the error names the states that are not there and the call; with that it loads."""
    _save(tmp_path / "c", lambda model, _o, _d: model)
    with pytest.raises(
        CheckpointingException, match=r"no state 'data', 'optimizer'.*=\['data', 'optimizer'\]: the"
    ) as e:
        _resume(tmp_path / "c", rename=rename)
    assert "rename={'net': 'model'}" in str(e.value)
    model, optimizer, _ = _resume(tmp_path / "c", rename=rename, exclude_from_loading=["data", "optimizer"])
    assert torch.equal(model[0].weight, _train(1)[0][0].weight)  # type: ignore[index]
    assert torch.equal(optimizer.state[model[0].weight]["step"], torch.ones(()))  # type: ignore[index]


def test_the_exact_rename_is_said(tmp_path: Path) -> None:
    """Where the model's tensors are below another name, the error has it; turned round, ``rename`` is refused."""
    _save(tmp_path / "c", lambda model, o, data: {"nets": {"gen": model}, "optimizer": o, "data": data})
    with pytest.raises(
        CheckpointingException, match=r"has model: CheckpointConfig\(rename=\{'nets\.gen': 'model'\}\)$"
    ):
        _resume(tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"'' names no state\. .*before them: rename=\{'': 'model'\}$"):
        _resume(tmp_path / "c", rename={"model": ""})


def test_two_things_cannot_get_one_name(tmp_path: Path) -> None:
    """Neither of two states, nor a state and a part of another, silently counts."""
    weights = {"0.weight": torch.ones(3, 2)}
    dcp.save({"net": weights, "ema": weights}, checkpoint_id=tmp_path / "c", no_dist=True)
    for names in ({"net": "model", "ema": "model"}, {"net": "model", "ema.0": "model.0"}):
        with pytest.raises(CheckpointingException, match=r"'net\.0\.weight' and 'ema\.0\.weight' cannot both become"):
            _resume(tmp_path / "c", rename=names)


def test_what_was_renamed_is_not_there_by_its_old_name(tmp_path: Path) -> None:
    """A plain state of the old name does not silently get the same values."""
    _save(tmp_path / "c", lambda m, o, data: {"model": m, "optimizer": o, "extra": data})
    with pytest.raises(CheckpointingException, match="no state 'extra'"):
        _resume(tmp_path / "c", rename={"extra": "data"}, also={"extra": _Counter()})


class _Nested(nn.Module):
    """A model all of whose tensors are below children that have the names of states."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.ModuleDict({"model": nn.Linear(2, 3), "state": nn.Linear(3, 1)})


def test_a_model_of_its_own_names_may_have_such_children(tmp_path: Path) -> None:
    """A folder of bare names is read by these, though ``net.model`` looks like a state and ``net.state`` like one's."""
    saved, model = _Nested(0), _Nested(1)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path / "c", no_dist=True)
    config = CheckpointConfig(folder=str(tmp_path / "steps"), initial_load_path=str(tmp_path / "c"))
    states = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with CheckpointManager(config, states) as manager:
        manager.load()
    assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), model.parameters(), strict=True))


class _Transformer(nn.Module):
    """A model with a child ``model`` and a head beside it, as those of transformers have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model, self.lm_head = nn.Linear(2, 3), nn.Linear(3, 1)


def test_bare_names_may_begin_with_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``dcp.save(model.state_dict())`` of such a model is loaded, and what is unused beside its head is said."""
    saved, model = _Transformer(0), _Transformer(1)
    dcp.save({**saved.state_dict(), "lm_head.scale": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
    config = CheckpointConfig(folder=str(tmp_path / "steps"), initial_load_path=str(tmp_path / "c"))
    with CheckpointManager(config, {"model": model}) as manager:
        manager.load()
    assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), model.parameters(), strict=True))
    assert "lm_head.scale" in caplog.text


class _Parts(_Counter):
    """A plain state that keeps all that it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.all = state


def test_a_part_moves_into_a_state_that_is_there(tmp_path: Path) -> None:
    """What ``rename`` puts into a state does not get lost for its other parts, whichever comes first."""
    for name, common in (("a", {"it": 1, "data": {"seen": 2}}), ("b", {"data": {"seen": 2}, "it": 1})):
        dist_checkpointing.save(common, tmp_path / name)
        config = CheckpointConfig(
            folder=str(tmp_path / "steps"),
            initial_load_path=str(tmp_path / name),
            initial_load_model_only=False,
            rename={"it": "data.it"},
        )
        with CheckpointManager(config, {"data": (data := _Parts())}) as manager:
            manager.load()
        assert data.all == {"seen": 2, "it": 1}


def test_a_value_has_no_parts(tmp_path: Path) -> None:
    """A name below one that the checkpoint has as a plain value is refused in words."""
    dist_checkpointing.save({"data": 5, "it": 1}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"nothing can become 'data\.x': 'data' has no parts"):
        _resume(tmp_path / "c", rename={"it": "data.x"})


def _save_by_dcp(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def _save_by_torch(path: Path, state: dict[str, Any]) -> None:
    torch.save(state, path.with_suffix(".pt"))
    convert_checkpoint(path.with_suffix(".pt"), path, ("torch_dist", 1))


@pytest.mark.parametrize("save", [_save_by_dcp, _save_by_torch], ids=["dcp", "torch.save"])
@pytest.mark.parametrize("name", ["optimizer", "optim"])
def test_numbers_of_parameters_are_read_in_their_order(
    tmp_path: Path, save: Callable[[Path, dict[str, Any]], None], name: str
) -> None:
    """What ``optimizer.state_dict()`` has saved, by numbers, loads as its ``load_state_dict`` would take it."""
    saved, saved_optimizer = _train(1)
    save(tmp_path / "c", {"model": saved.state_dict(), name: saved_optimizer.state_dict(), "data": {"seen": 7}})
    model, optimizer, _ = _resume(tmp_path / "c")
    for one, other in zip(saved.parameters(), model.parameters(), strict=True):
        assert one.equal(other)
        assert all(value.equal(optimizer.state[other][slot]) for slot, value in saved_optimizer.state[one].items())
    assert optimizer.param_groups[0]["lr"] == saved_optimizer.param_groups[0]["lr"]


def test_numbers_of_other_groups_are_refused(tmp_path: Path) -> None:
    """An optimizer of other groups than those whose parameters are numbered is an error that counts both."""
    model, _ = _train(1)
    optimizer = torch.optim.AdamW([{"params": [*part.parameters()]} for part in model.children()])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": {"seen": 7}}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointingException, match=r"groups of 2 and 2 parameters; those .* have 4\. Build"):
        _resume(tmp_path / "c")
    _resume(tmp_path / "c", exclude_from_loading=["optimizer"])


def test_numbers_in_another_order_are_refused(tmp_path: Path) -> None:
    """Moments whose shape is not that of the parameter in their place are an error that names both."""
    model, _ = _train(1)
    optimizer = torch.optim.AdamW(reversed([*model.parameters()]))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": {"seen": 7}}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointingException, match=r"exp_avg of number 0 has .* \(2,\); .* '0\.weight' of \(3, 2\)"):
        _resume(tmp_path / "c")
