"""FSDP2 goes on at another number of ranks with state that is laid out by the model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.optimizer_state import load_sharded_optimizer_state_dict
from tests.adapters.models import train
from tests.optimizer.models import OPTIMIZERS, made_model, parameters, started, state_of, train_alike

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


BEFORE, AFTER = 3, 3


class Run(NamedTuple):
    """What a job had when it was saved or had loaded, and what came of it."""

    params: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    lrs: list[float]
    losses: list[float]
    trained: dict[str, torch.Tensor]
    final_state: dict[str, torch.Tensor]


def _go_on(model: Any, optimizer: Any, first: int) -> Run:
    before = parameters(model), state_of(model, optimizer), [group["lr"] for group in optimizer.param_groups]
    losses = train_alike(model, optimizer, first, AFTER)
    return Run(*before, losses, parameters(model), state_of(model, optimizer))


def _start(folder: Path) -> dict[str, Run]:
    """Train with each optimizer, save, and go on."""
    runs = {}
    for name in OPTIMIZERS:
        model, optimizer = started(name, seed=1)
        train_alike(model, optimizer, 0, BEFORE)
        dist_checkpointing.save(to_sharded_state_dict(model, optimizer), folder / name)
        runs[name] = _go_on(model, optimizer, BEFORE)
    return runs


def _start_and_resume(folder: Path) -> tuple[dict[str, Run], dict[str, Run]]:
    """The job, and its resumption by as many ranks."""
    return _start(folder), _resume(folder)


def _resume(folder: Path, target: Path | None = None, first: int = BEFORE) -> dict[str, Run]:
    """Load into other parameters and other options, and go on; then save, if there is a target."""
    runs = {}
    for name in OPTIMIZERS:
        model, optimizer = started(name, seed=2, lr=0.5)
        load_into(dist_checkpointing.load(to_sharded_state_dict(model, prefix="model."), folder / name), model)
        loaded = load_sharded_optimizer_state_dict(get_model_state_dict(model), "optimizer", folder / name)
        _check_layout(model, loaded["optimizer"]["state"])
        options = StateDictOptions(strict=False)  # a parameter without a gradient has no state
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"], options=options)
        runs[name] = _go_on(model, optimizer, first)
        if target is not None:
            dist_checkpointing.save(to_sharded_state_dict(model, optimizer), target / name)
    return runs


def _check_layout(model: Any, state: dict[str, dict[str, Any]]) -> None:
    params = dict(model.named_parameters())
    assert {name for name in params if not name.endswith(("frozen", "unused"))} == set(state)
    for name, slots in state.items():
        for slot, value in slots.items():
            if slot == "step":
                assert type(value) is torch.Tensor
                continue
            assert isinstance(value, DTensor)
            assert value.device_mesh == params[name].device_mesh
            assert value.placements == ((Replicate(),) if slot in ("row_var", "col_var") else (Shard(0),))


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rel: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=rel, atol=rel, msg=name)


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Run]]:
    """The job of 4 ranks; resumed by 1 and by 2; and what the 2 saved resumed by 4."""
    folder = tmp_path_factory.mktemp("jobs")
    first, second = folder / "first", folder / "second"
    going_on, resumed = ranks.run(4, _start_and_resume, first)[0]
    found = {"4 to 1": ranks.run(1, _resume, first)[0], "4 to 2": ranks.run(2, _resume, first, second)[0]}
    found["2 to 4"] = ranks.run(4, _resume, second, None, BEFORE + AFTER)[0]
    return {"4": going_on, "4 to 4": resumed, **found}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loaded_state_is_what_was_saved(runs: dict[str, dict[str, Run]], name: str) -> None:
    """State and options are bit for bit those of the saved job, whatever the numbers of ranks."""
    saved = runs["4"][name]
    for loaded in ("4 to 4", "4 to 2", "4 to 1"):
        _assert_equal(runs[loaded][name].state, saved.state)
        assert runs[loaded][name].lrs == [0.02, 0.005]
    _assert_equal(runs["2 to 4"][name].state, runs["4 to 2"][name].final_state)
    slots = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
    expected = slots.get(name, {"step", "row_var", "col_var", "variance"})
    assert {key.rpartition(".")[2] for key in saved.state} == expected
    assert all(value.any() for value in saved.state.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_many_ranks_go_on_bit_for_bit(runs: dict[str, dict[str, Run]], name: str) -> None:
    """Resumed by as many ranks, training is exactly that of the job that was never stopped."""
    resumed, going_on = runs["4 to 4"][name], runs["4"][name]

    assert resumed.losses == going_on.losses
    assert len(set(going_on.losses)) == AFTER
    _assert_equal(resumed.trained, going_on.trained)
    _assert_equal(resumed.final_state, going_on.final_state)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_of_single_elements_go_on_bit_for_bit(runs: dict[str, dict[str, Run]], name: str) -> None:
    """1 and 2 ranks go on exactly alike: the mean of 2 equal gradients is exact, and no element needs another.

    4 ranks agree to the last digits: a sum of 4 equal numbers may round where its partial sums do.
    """
    one, two, four = (runs[f"4 to {count}"][name] for count in (1, 2, 4))

    assert one.losses == two.losses
    _assert_equal(one.trained, two.trained)
    assert four.losses == pytest.approx(one.losses, rel=1e-13)
    _assert_equal(four.trained, one.trained, rel=1e-13)
    assert runs["2 to 4"][name].losses != one.losses


def _plain(name: str, saved: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process without FSDP2, given what was saved by hand."""
    model = made_model(name, seed=3)
    optimizer = OPTIMIZERS[name](model, 0.02)
    model.load_state_dict(saved.params)
    for param_name, param in model.named_parameters():
        slots = {key.rpartition(".")[2]: v for key, v in saved.state.items() if key.rpartition(".")[0] == param_name}
        optimizer.state.update({param: {slot: value.clone() for slot, value in slots.items()}} if slots else {})
    return train(model, optimizer, BEFORE, AFTER, alone=True), parameters(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_goes_on_as_a_plain_process(runs: dict[str, dict[str, Run]], name: str) -> None:
    """What 4 ranks saved goes on in one as it does without any parallelism: Adafactor, too, is resumed to the bit.

    (Its steps depend on how many ranks there are: torch scales them by norms of each rank's part of a DTensor.)
    """
    losses, trained = _plain(name, runs["4"][name])

    assert runs["4 to 1"][name].losses == losses
    _assert_equal(runs["4 to 1"][name].trained, trained)
