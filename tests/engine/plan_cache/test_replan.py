"""Saves of the same shards, again and again: planned once, with the values of each."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, release_memory
from shardckpt.engine.plan_cache import saved_plans
from tests import backends
from tests.engine.plan_cache.saves import Plans, check, first, save, tensor
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@backends.both_in_proof
def test_two_states_may_be_saved_in_turn(tmp_path: Path) -> None:
    """A job that saves a model and an optimizer by turns plans each of them once."""
    with Plans() as plans:
        for step in range(3):
            for key in ("model", "optimizer"):
                save({key: tensor(key, torch.full((3,), float(step)))}, tmp_path / f"{key}{step}")
                check(tmp_path / f"{key}{step}", {key: torch.full((3,), float(step))})
    assert plans.count == 2


@backends.both_in_proof
def test_another_form_after_the_request_is_never_written(tmp_path: Path) -> None:
    """Parameters that get other memory between the request and its schedule are saved as the request has them."""
    for size in (16, 400_000):
        parameter = torch.nn.Parameter(torch.ones(size))
        with AsyncCallsQueue() as queue:
            for step in range(3):
                path = tmp_path / f"{size}-{step}"
                request = dc.save({"w": tensor("w", parameter)}, path, async_sharded_save=True)
                before, parameter.data = parameter.data, torch.zeros(1, dtype=torch.float64)
                queue.schedule_async_request(request)  # type: ignore[arg-type]
                parameter.data = before
        for step in range(3):
            check(tmp_path / f"{size}-{step}", {"w": torch.ones(size)})


@backends.both_in_proof
@pytest.mark.usefixtures("mode")
@table("within", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
@table("size", [100, 400_000])
def test_saves_in_any_mode(tmp_path: Path, within: Callable[[], Any], size: int) -> None:
    """A save in a mode of torch's leaves nothing that stops the next one, outside of it, or threads."""
    release_memory()
    values = [torch.full((size,), float(n)) for n in range(3)]
    for step, inside in enumerate((True, False, True, False)):
        state = {f"w{n}": tensor(f"w{n}", value + step) for n, value in enumerate(values)}
        with within() if inside else nullcontext():
            save(state, tmp_path / str(step))
        check(tmp_path / str(step), {f"w{n}": value + step for n, value in enumerate(values)})


@backends.both_in_proof
@pytest.mark.usefixtures("mode")
def test_release_memory_forgets(tmp_path: Path) -> None:
    """After release_memory the next save is a first one, and nothing of the last one's shards is held."""
    with Plans() as plans:
        for step in range(3):
            save({"w": first()}, tmp_path / str(step))
            if step:
                release_memory()
    assert plans.count == 2
    assert not saved_plans._entries
