"""What a CheckpointManager's errors advise: every argument can be given where the advice says."""

from __future__ import annotations

import importlib
import inspect
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import save_state_dict
from shardckpt.manager import CheckpointConfig, CheckpointManager, PerRank
from shardckpt.mapping import ShardedTensor
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Where the functions that a message may name are.
_HOMES = (
    "shardckpt",
    "shardckpt.adapters",
    "shardckpt.async_save",
    "shardckpt.dist_checkpointing",
    "shardckpt.huggingface",
    "shardckpt.manager",
    "shardckpt.mapping",
)
_CALL = re.compile(r"\b((?:\w+\.)*\w+)\(([^()]*)\)")
_KEYWORD = re.compile(r"\b([a-z]\w*)=")
#: What takes the arguments that a manager's user can pass.
_OF_MANAGER = ("AsyncCallsQueue", "CheckpointConfig", "CheckpointManager", "PerRank")
#: What follows a call of another function.
_INSTEAD = re.compile(r",? or (by a |\w+\()?(CheckpointConfig|CheckpointManager|CheckpointConfig\()")


class _Tensors:
    """A state of the user's own, described as shards."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def sharded_state_dict(self) -> dict[str, Any]:
        """Its tensors."""
        return {n: ShardedTensor.from_rank_offsets(f"own.{n}", tensor) for n, tensor in self.tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        self.tensors = state


def _check(message: str) -> int:
    """Check that a manager's user can pass every argument in a message; return how many the message has.

    It is an argument of a CheckpointConfig, CheckpointManager, PerRank or AsyncCallsQueue, or stands in a call of
    another function for which the same sentence gives what a manager's user does instead.
    """
    given = {*CheckpointConfig.model_fields, *inspect.signature(CheckpointManager).parameters}
    calls = list(_CALL.finditer(message))
    pairs = [(call[1].rpartition(".")[2], keyword) for call in calls for keyword in _KEYWORD.findall(call[2])]
    for name, keyword in pairs:
        found = [getattr(module, name) for module in map(importlib.import_module, _HOMES) if hasattr(module, name)]
        assert found, name
        assert keyword in inspect.signature(found[0]).parameters, (name, keyword)
    for call in calls:
        if _KEYWORD.search(call[2]) and call[1].rpartition(".")[2] not in _OF_MANAGER:
            rest = message[call.end() :]
            assert _INSTEAD.match(rest), (call[0], rest[:40])
    alone = _KEYWORD.findall(_CALL.sub("", message))
    assert set(alone) <= given, message
    return len(pairs) + len(alone)


class _Plain:
    """A state of any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """The value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.value = state["value"]


def _manager(
    folder: Path | str, states: dict[str, Any], allow: tuple[Any, ...] = (), **options: Any
) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(folder=str(folder), **options), states, allow_globals=allow)


def _save(folder: Path | str, states: dict[str, Any], **options: Any) -> None:
    with _manager(folder, states, **options) as manager:
        manager.save(1, force=True)


def _load(folder: Path | str, states: dict[str, Any], **options: Any) -> None:
    with _manager(folder, states, **options) as manager:
        manager.load()


def _misfit(saved: Any, loaded: Any) -> Callable[[Path], None]:
    """Save one state, and load it into another."""

    def save_and_load(folder: Path) -> None:
        name = "model" if isinstance(saved, torch.nn.Module) else "own"
        _save(folder, {name: saved})
        _load(folder, {name: loaded})

    return save_and_load


def _buffered(dtype: torch.dtype) -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("counts", torch.ones(3, dtype=dtype))
    return model


def _own(*shape: int, dtype: torch.dtype | None = None) -> _Tensors:
    return _Tensors(a=torch.ones(shape, dtype=dtype))


def _other_optimizer(folder: Path) -> None:
    for rows, act in ((8, _save), (6, _load)):
        model = torch.nn.Embedding(rows, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        act(folder, {"model": model, "optimizer": optimizer})


def _unlisted_class(folder: Path) -> None:
    _save(folder, {"own": _Plain(Fraction(1, 2))}, allow=(Fraction,))
    _load(folder, {"own": _Plain(Fraction(1, 2))})


def _no_mapping(folder: Path) -> None:
    (folder / "hf").mkdir(parents=True)
    save_state_dict({"weight": torch.ones(2, 2)}, folder / "hf" / "model.safetensors")
    options = {"initial_load_path": str(folder / "hf"), "initial_load_in_hf": True, "hf_mapping": "no-such-model"}
    _load(folder, {"model": torch.nn.Linear(2, 2)}, **options)


def _taken_on_a_store(_: Path) -> None:
    fsspec.filesystem("memory").pipe("/advice/step-1/notes.txt", b"mine")
    _save("memory://advice", {"model": torch.nn.Linear(2, 2)})


def _unfinished_on_a_store(_: Path) -> None:
    fsspec.filesystem("memory").pipe("/unfinished/step-1/.shardckpt-uploading-1", b"")
    _load("memory://unfinished", {"model": torch.nn.Linear(2, 2)}, load_step=1)


def _other_names(folder: Path) -> None:
    (folder / "hf").mkdir(parents=True)
    save_state_dict({"decoder.weight": torch.ones(2, 2)}, folder / "hf" / "model.safetensors")
    _load(folder, {"model": torch.nn.Linear(2, 2)}, initial_load_path=str(folder / "hf"), initial_load_in_hf=True)


def _new_state(folder: Path) -> None:
    _save(folder, {"model": torch.nn.Linear(2, 2)})
    _load(folder, {"model": torch.nn.Linear(2, 2), "loader": PerRank(torch.nn.Linear(2, 2))})


def _left_state(folder: Path) -> None:
    _save(folder, {"model": torch.nn.Linear(2, 2), "loader": PerRank(torch.nn.Linear(2, 2))})
    _load(folder, {"model": torch.nn.Linear(2, 2)}, on_unused="error")


def _no_such_step(folder: Path) -> None:
    (folder / "step-1").mkdir(parents=True)
    _load(folder, {"model": torch.nn.Linear(2, 2)}, load_step=1)


@table(
    ("wrong", "advised"),
    [
        (_misfit(_own(3), _own(3, dtype=torch.int8)), "Give these tensors the stored dtype"),
        (_misfit(_buffered(torch.float32), _buffered(torch.int32)), "Give these tensors the stored dtype"),
        (_misfit(_own(8, 2), _own(6, 2)), "CheckpointConfig(resize=[...]) loads the rows"),
        (
            _misfit(torch.nn.Embedding(8, 2), torch.nn.Embedding(6, 2)),
            "CheckpointConfig(resize=[...]) loads the rows",
        ),
        (_misfit(_own(1, 4, 2), _own(4, 2)), "stored with 1 prepended axes)"),
        (_misfit(_own(4, 2), _own(1, 4, 2)), "stored without prepended axes)"),
        (_misfit(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2)), "exclude_from_loading"),
        (_other_optimizer, "exclude_from_loading"),
        (_other_names, "CheckpointConfig(hf_mapping=...)"),
        (_other_names, "CheckpointConfig(exclude_from_last_save=...)"),
        (_no_mapping, "built in: "),
        (_unlisted_class, "allow_globals=[Fraction]"),
        (_new_state, "exclude_from_loading"),
        (_no_such_step, "step-1"),
        (_taken_on_a_store, "delete the objects there first"),
        (_unfinished_on_a_store, "or by a CheckpointManager"),
    ],
)
def test_advice_can_be_followed(tmp_path: Path, wrong: Callable[[Path], None], advised: str) -> None:
    """No error of a CheckpointManager suggests an argument that its user cannot pass."""
    with pytest.raises(CheckpointingException) as caught:
        wrong(tmp_path / "run")
    assert advised in str(caught.value)
    _check(str(caught.value))


def test_a_state_that_the_manager_lacks_is_not_to_be_excluded(tmp_path: Path) -> None:
    """Where stored states are unused, exclude_from_loading, which refuses names of no state, is no way out."""
    with pytest.raises(CheckpointingException, match=r"unused keys .* loader.*on_unused='warn' or 'ignore'$") as caught:
        _left_state(tmp_path / "run")
    assert "exclude_from_loading" not in str(caught.value)


def test_outside_of_a_manager_the_arguments_are_named(tmp_path: Path) -> None:
    """Who can pass resize and allow_dtype_cast is told of them."""
    dc.save(_Tensors(a=torch.ones(8, 2)).sharded_state_dict(), tmp_path / "a")
    for tensor, advised in (
        (torch.ones(6, 2), "load(..., resize=[...]) loads the rows that both have"),
        (torch.ones(8, 2, dtype=torch.int8), "load them as torch casts them: allow_dtype_cast=True"),
    ):
        with pytest.raises(CheckpointingException, match=re.escape(advised)):
            dc.load(_Tensors(a=tensor).sharded_state_dict(), tmp_path / "a")


def test_the_check_finds_what_cannot_be_given() -> None:
    """An argument of load alone, or one that a named function lacks, does not pass."""
    assert _check("pass check_replicas=False; dist_checkpointing.save(overwrite=True) or CheckpointConfig()") == 2
    for message in (
        "pass verify_integrity=True",
        "CheckpointConfig(strict=False)",
        "load_outside(a=1)",
        "ShardedTensor(..., allow_shape_mismatch=True) loads",
    ):
        with pytest.raises(AssertionError):
            _check(message)


def test_of_a_folder_of_the_hub_the_way_is_said_once(tmp_path: Path) -> None:
    """An ``initial_load_path`` that is a Hugging Face folder is said to be one, with the setting, once."""
    (tmp_path / "hf").mkdir()
    save_state_dict({"weight": torch.ones(2, 2)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointingException, match="it is a Hugging Face folder") as raised:
        _load(tmp_path / "steps", {"model": torch.nn.Linear(2, 2)}, initial_load_path=str(tmp_path / "hf"))
    assert str(raised.value).count("initial_load_in_hf") == 1
