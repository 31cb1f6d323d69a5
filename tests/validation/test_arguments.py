from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardckpt import adapters, huggingface, local, maintenance, manager
from shardckpt import dist_checkpointing as dc
from shardckpt.chunks import ChunkSaveStrategy
from shardckpt.errors import CheckpointingException
from shardckpt.validation import arguments
from shardckpt.validation.arguments import check_annotated
from tests.manager.training import Progress
from tests.tables import table
from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from tests.ranks import Ranks

#: Careless values by what an error says is expected.
_CARELESS: dict[str, list[Any]] = {
    "True or False": ["false", 2, 0.5, [], np.array([True, True])],
    "a whole number": ["3", 1.5, True, None, np.True_],
    "a number": ["1", True, None, 1j],
    "one text": [("a", "b"), 3, None, Path("a"), b"a"],
    "a list of texts": ["ab", 3, None, [1], ["a", None]],
    "a list": ["ab", 3, None, int, b"a"],
    "a dict": [[("a", 1)], "a", dict, 3, None],
}


class _Given(SimpleNamespace):
    """What doors are called with: objects, and places of a folder in which a checkpoint and a step are."""

    state: dict[str, Any]
    model: nn.Module
    folder: Path
    step: Path
    new: Path
    file: Path


def _trained(at: _Given) -> manager.CheckpointManager:
    return manager.CheckpointManager(manager.CheckpointConfig(folder=str(at.folder)), {"progress": Progress()})


def _opened(at: _Given) -> Any:
    with dc.open_checkpoint(at.step) as checkpoint:
        return checkpoint


def _part(at: _Given) -> local.TensorAwareStateDict:
    return local.TensorAwareStateDict.from_state_dict(at.state, algo="atomic")[0]


#: Each public function that checks its arguments by their annotations, with the other arguments of a right call.
DOORS: dict[Callable[..., Any], Callable[[_Given], dict[str, Any]]] = {
    dc.save: lambda at: {"sharded_state_dict": at.state, "checkpoint_dir": at.new},
    dc.load: lambda at: {"sharded_state_dict": at.state, "checkpoint_dir": at.step},
    dc.load_content_metadata: lambda at: {"checkpoint_dir": at.step},
    dc.remove_sharded_tensors: lambda at: {"checkpoint_dir": at.step, "key_prefix": "w"},
    dc.get_default_save_sharded_strategy: lambda _: {},
    dc.register_default_strategy: lambda _: {
        "action": dc.StrategyAction.SAVE_SHARDED,
        "backend": "none",
        "version": 1,
        "strategy": object(),
    },
    huggingface.export_to_huggingface: lambda at: {"checkpoint_dir": at.step, "target": at.new},
    huggingface.load_from_huggingface: lambda at: {"sharded_state_dict": at.state, "folder": at.step},
    huggingface.dcp_to_torch_state_dict: lambda at: {"checkpoint_dir": at.step},
    huggingface.dcp_to_torch_save: lambda at: {"checkpoint_dir": at.step, "file": at.new},
    huggingface.torch_save_to_dcp: lambda at: {"file": at.file, "checkpoint_dir": at.new},
    huggingface.parse_options: lambda _: {"folder": None},
    huggingface.get_shard_info: lambda _: {"state_dict": {"w": torch.ones(1)}},
    huggingface.save_state_dict: lambda at: {"state_dict": {"w": torch.ones(1)}, "path_to_save": at.new},
    huggingface.ModelCheckpoint.weights: lambda at: {"self": _opened(at)},
    maintenance.diff_checkpoints: lambda at: {"first": at.step, "second": at.step},
    maintenance.convert_checkpoint: lambda at: {"old": at.step, "new": at.new, "to": "safetensors"},
    maintenance.merge_checkpoints: lambda at: {"sources": [at.step] * 2, "target": at.new},
    maintenance.migrate_checkpoint: lambda at: {"old": at.step, "new": at.new},
    maintenance.verify_checkpoint: lambda at: {"directory": at.step},
    maintenance.compute_ema_weights: lambda _: {"count": 2, "decay": 0.5},
    maintenance.compute_wsm_weights: lambda _: {"steps": [1, 2]},
    manager.list_checkpoints: lambda at: {"folder": at.folder},
    manager.prune_steps: lambda at: {"folder": at.folder, "policies": [manager.KeepLatest(1)]},
    manager.mark_checkpoint: lambda at: {
        "checkpoint": at.step,
        "save": ("", ""),
        "verdict": "verified",
        "checked": "digests",
        "files": 1,
    },
    manager.cleanup_old_checkpoints: lambda at: {"training_args": SimpleNamespace(save=at.folder, save_total_limit=1)},
    manager.lease_step: lambda at: {"folder": at.folder},
    manager.pin_step: lambda at: {"folder": at.folder, "step": 1, "label": "best"},
    manager.unpin_step: lambda at: {"folder": at.folder, "step": 1, "label": "best"},
    manager.CheckpointManager.save: lambda at: {"self": _trained(at), "step": 2, "force": True},
    manager.CheckpointManager.best_step: lambda at: {"self": _trained(at)},
    ChunkSaveStrategy.__init__: lambda _: {"self": SimpleNamespace()},
    local.CliqueReplication.__init__: lambda _: {"self": SimpleNamespace(), "jump": 1, "factor": 2},
    local.LocalCheckpointManager.__init__: lambda at: {"self": SimpleNamespace(), "root": at.new},
    local.LocalCheckpointManager.save: lambda at: {
        "self": local.LocalCheckpointManager(at.folder / "local"),
        "state": _part(at),
        "step": 1,
    },
    local.LocalCheckpointManager.discard_after: lambda at: {"self": local.LocalCheckpointManager(at.folder), "step": 1},
    local.LocalCheckpointManager.load: lambda at: {"self": local.LocalCheckpointManager(at.folder)},
    local.save_local: lambda at: {"state": _part(at), "directory": at.new},
    local.TensorAwareStateDict.to_state_dict: lambda at: {"self": _part(at), "sharded_state_dict": at.state},
    adapters.to_sharded_state_dict: lambda at: {"model_or_dict": at.model},
    adapters.load_into: lambda at: {"loaded": at.state, "model_or_parts": at.model},
    adapters.load_sharded_optimizer_state_dict: lambda at: {
        "model_state_dict": at.state,
        "optimizer_key": "optimizer",
        "storage_reader": at.step,
    },
}
#: Arguments whose errors say more: they have tests of their own.
_OTHERWISE = {"CheckpointManager.save": {"step"}, "load_into": {"loaded"}, "to_sharded_state_dict": {"prefix"}}


def _read_all(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def _list_careless(door: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a door, each with the values that it must refuse."""
    for name, kinds in arguments._read_rules(door):
        expected = {kind.expected for kind in kinds}
        if name not in _OTHERWISE.get(door.__qualname__, ()):
            values = itertools.chain(*(_CARELESS[one] for one in expected - {"None"}))
            yield from ((name, value) for value in values if not any(kind.accepts(value) for kind in kinds))


@table("door", DOORS, ids=[door.__qualname__ for door in DOORS])
def test_every_door_refuses_careless_arguments(tmp_path: Path, door: Callable[..., Any]) -> None:
    """Flags, numbers, texts, lists and dicts: an error of the family names the argument, and nothing has changed."""
    model = nn.Linear(2, 2)
    step, file = tmp_path / "steps" / "step-1", tmp_path / "file.pt"
    state = adapters.to_sharded_state_dict(model)
    dc.save(state, step)
    torch.save({"w": torch.ones(1)}, file)
    at = _Given(state=state, model=model, folder=tmp_path / "steps", step=step, new=tmp_path / "new", file=file)
    given = DOORS[door](at)
    before, values = _read_all(tmp_path), [each.clone() for each in model.parameters()]
    found = [*_list_careless(door)]
    assert found
    for name, value in found:
        with pytest.raises(CheckpointingException, match=rf"{name}=.*: expected "):
            door(**given | {name: value})
    assert _read_all(tmp_path) == before
    assert all(map(torch.equal, values, model.parameters()))


def _save_with_own_flag(path: str) -> None:
    dc.save({"step": 1}, path, overwrite="no" if dist.get_rank() else False)  # type: ignore[call-overload]


def test_a_careless_argument_of_one_rank_is_everyones_error(ranks: Ranks, tmp_path: Path) -> None:
    """No rank waits for another that has refused its own arguments."""
    for outcome in ranks.outcomes(2, _save_with_own_flag, str(tmp_path / "a")):
        assert "rank 1, in 'reading the arguments': save: overwrite='no': expected True or False" in outcome.message
    assert not (tmp_path / "a").exists()


def test_the_table_has_every_door() -> None:
    """A function that checks its arguments by their annotations stands in the table of those that are tried."""
    name = check_annotated.__name__
    texts = [text for path in (ROOT / "shardckpt").rglob("*.py") if name in (text := path.read_text())]
    calls = [
        node
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]
    assert {ast.unparse(call.args[0]) for call in calls} == {door.__qualname__ for door in DOORS}


def _door(
    flag: bool = False,
    count: int = 0,
    share: float | None = None,
    size: int | str = 0,
    names: Collection[str] = (),
    each: Sequence[str] | str = (),
    state: Mapping[str, Any] | None = None,
    anything: Any = None,
) -> None:
    check_annotated(_door, locals())


def test_what_is_right_passes() -> None:
    """Numbers and flags of numpy and torch, empty lists, a union, and what no annotation says."""
    _door(np.True_, np.int64(3), np.float32(0.5), "5GB", {"a"}, "a", {}, object())  # type: ignore[arg-type]
    for flag in (None, 0, 1.0, np.int64(1), torch.tensor(True), torch.tensor(0)):
        _door(flag)  # type: ignore[arg-type]
    _door(1, torch.tensor(3), 1, 2.5, dict.fromkeys("ab").keys(), ["a"])  # type: ignore[arg-type]


class _Endless(dict[str, Any]):
    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a state is not looked at")

    items = values = keys = __iter__  # type: ignore[assignment]


def test_dicts_are_not_iterated_over() -> None:
    """A state dict may have a million entries."""
    _door(state=_Endless(a=1))
