"""States that a CheckpointManager does not take: each is refused with what to give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import CheckpointingException, ConfigurationError
from shardckpt.manager import CheckpointConfig, CheckpointManager, PerRank
from tests.manager.training import Progress
from tests.states import error_of
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

_MODEL = torch.nn.Linear(2, 2)
_OPTIMIZER = torch.optim.AdamW(_MODEL.parameters())
_TAKEN = r"takes modules, their optimizers, PerRank\(...\), .* by name: \{'model': model, 'optimizer': optimizer\}$"


@table(
    "states, said",
    [
        (_MODEL, r"the states are an object of type Linear: give it by name, as \{'model': ...\}; .*" + _TAKEN),
        (_OPTIMIZER, f"the states are an object of type AdamW: .*{_TAKEN}"),
        ([_MODEL, _OPTIMIZER], f"the states are an object of type list: .*{_TAKEN}"),
        (None, f"the states are None: .*{_TAKEN}"),
        (_MODEL.state_dict(), r"tensors, as state_dict\(\) returns them \(weight, bias\): give the module itself, "),
        (
            {"model": _MODEL.state_dict()},
            f"'model' is an object of type OrderedDict: give the object that has this .*{_TAKEN}",
        ),
        (
            {"model": _MODEL, "optimizer": _OPTIMIZER.state_dict()},
            "'optimizer' is .* dict: give the object that has this",
        ),
        ({"model": _MODEL, "step": 3}, f"'step' is 3: .* the step is stored .manager.loaded_step.; .*{_TAKEN}"),
        ({"model": _MODEL, "optimizer": None}, f"'optimizer' is None: leave it out, or give its object; .*{_TAKEN}"),
        ({"model": torch.nn.Linear}, f"'model' is the class Linear: give an object of it; .*{_TAKEN}"),
        ({"model": _MODEL, "ema": torch.ones(2)}, "'ema' is .* Tensor: give the module or object that has it"),
        ({"model": _MODEL, 3: Progress()}, "3 cannot be the name of a state: give other text, as 'model'"),
    ],
)
def test_a_state_of_another_kind_is_refused(tmp_path: Path, states: Any, said: str) -> None:
    """What was given, what a manager takes, and how it is written: not one line of Python's."""
    with pytest.raises(CheckpointingException, match=said) as caught:
        CheckpointManager(CheckpointConfig(folder=tmp_path), states)
    assert type(caught.value) is CheckpointingException


class _State:
    """A state that is a dict."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


def test_one_key_at_two_places_is_named_by_the_users_places(tmp_path: Path) -> None:
    """Of states whose dotted keys collide, the error says where the user's own dicts have them."""
    states = {"a": _State({"b.c": torch.ones(2)}), "a.b": _State({"lr": 0.1, "c": torch.ones(2)})}
    said = r"at \['a'\]\['b.c'\] and at \['a.b'\]\['c'\]: "
    with (
        CheckpointManager(CheckpointConfig(folder=tmp_path), states) as manager,
        pytest.raises(CheckpointingException, match=said),
    ):
        manager.save(1, True)


@table(
    "reshard, said",
    [
        (True, "True cannot be called"),
        (lambda states, rank: states[rank], "too many positional arguments.: reshard=...: a function .states, rank, w"),
    ],
)
def test_what_cannot_reshard_is_refused_before_a_save(reshard: Any, said: str) -> None:
    """And not by the resume that needs it; a function of three arguments is taken."""
    with pytest.raises(ConfigurationError, match=said):
        PerRank(Progress(), reshard)
    PerRank(Progress(), lambda *given: given[0][0])


@table(
    "settings, is_said",
    [({}, True), ({"load_only": True}, False), ({"exclude_from_loading": ("data",)}, False)],
)
def test_a_state_that_no_other_number_of_ranks_loads_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], is_said: bool
) -> None:
    """A job that saves it warns before the first step; one that can be resharded, or is never loaded, is not named."""
    caplog.clear()
    states = {"data": PerRank(Progress()), "other": PerRank(Progress(), lambda states, *_: states[0])}
    CheckpointManager(CheckpointConfig(folder=tmp_path, **settings), states).close()
    said = [each.message for each in caplog.records if "only a job of 1 rank can load the state 'data'" in each.message]
    assert len(said) == is_said
    assert "'other'" not in caplog.text
    assert "'rng'" not in caplog.text


def _save_and_load(folder: str, saved_per_rank: bool) -> tuple[str, str]:
    """Save a state as PerRank or without, and return the error of a load the other way round."""
    config = CheckpointConfig(folder=folder, interval=1)
    own, shared = {"data": PerRank(Progress())}, {"data": Progress()}
    with CheckpointManager(config, own if saved_per_rank else shared) as manager:
        manager.save(1)
    with CheckpointManager(config, shared if saved_per_rank else own) as manager:
        return error_of(manager.load)


def _load_without_changed_states(folder: str) -> bool:
    """Save states of all ranks and one of each, and load that one where the others are of each rank now."""
    shared = {f"data{number}": Progress() for number in range(8)}
    with CheckpointManager(
        CheckpointConfig(folder=folder, interval=1), {"loader": PerRank(Progress()), **shared}
    ) as manager:
        manager.save(1)
    config = CheckpointConfig(folder=folder, interval=1, exclude_from_loading=[*shared])
    own = {name: PerRank(Progress()) for name in ("loader", *shared)}
    with CheckpointManager(config, own) as manager:
        return manager.load()


def test_states_that_are_left_out_do_not_say_how_many_ranks_saved(ranks: Ranks, tmp_path: Path) -> None:
    """A state of each rank loads beside states that were of all ranks, and are left out since they are of each now."""
    assert ranks.run(2, _load_without_changed_states, str(tmp_path)) == [True, True]


@table(
    "saved_per_rank, said",
    [
        (
            True,
            "a state 'data' of each rank: it was saved as PerRank, and is asked for as one state for all. Give it as",
        ),
        (False, "one state 'data' for all ranks, and it is asked for as PerRank: give the object without PerRank"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_of_each_rank_is_told_from_one_of_all(
    ranks: Ranks, tmp_path: Path, world_size: int, saved_per_rank: bool, said: str
) -> None:
    """What was saved as PerRank and is asked for without it, or the other way, is the same error on every rank."""
    errors = ranks.run(world_size, _save_and_load, str(tmp_path), saved_per_rank)
    assert len(set(errors)) == 1
    assert said in errors[0][1]


class _Broken:
    """What fails as a loader of another library does."""

    def __init__(self, fails_in: str) -> None:
        self._fails_in = fails_in

    def state_dict(self) -> dict[str, int]:
        return self._do("state_dict")

    def load_state_dict(self, _state: dict[str, int]) -> None:
        self._do("load_state_dict")

    def _do(self, what: str) -> dict[str, int]:
        if what == self._fails_in:
            raise KeyError("position")
        return {}


@table("own", [_Broken, lambda fails_in: PerRank(_Broken(fails_in))])
def test_an_error_of_a_states_own_code_names_the_state(tmp_path: Path, own: Any) -> None:
    """In a save and in a load: what Python says of it is a key, of whichever state."""
    said = "in the state 'loader': KeyError: 'position'"
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), {"model": _MODEL, "loader": own("")}) as good:
        good.save(1)
    with CheckpointManager(CheckpointConfig(folder=tmp_path), {"loader": own("state_dict")}) as manager:
        assert f"in 'describing the states', {said}" in error_of(manager.save, 2, last_step=True)[1]
    with CheckpointManager(CheckpointConfig(folder=tmp_path), {"loader": own("load_state_dict")}) as manager:
        assert f"in 'restoring the states', {said}" in error_of(manager.load)[1]
