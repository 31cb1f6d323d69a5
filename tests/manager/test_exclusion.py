"""Tensors that the last save leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.huggingface import export_to_huggingface
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.manager.exclusion import leave_out
from shardckpt.mapping import ShardedTensor
from tests.logs import collect_warnings
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


class Model(torch.nn.Module):
    """A layer, and a computed buffer in it that is saved with it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.layer.register_buffer("freqs_cis", torch.full((4,), value))
        self.my_freqs_cis = torch.nn.Parameter(torch.full((2,), value))


def _last_save_and_start(folder: Path, in_hf: bool) -> None:
    saved = Model(1.0)
    options: dict[str, Any] = {"folder": str(folder), "last_save_in_hf": in_hf}
    config = CheckpointConfig(**options, exclude_from_last_save="freqs_cis", export_dtype="bfloat16")
    with CheckpointManager(config, {"model": saved}) as manager:
        manager.save(500)
        manager.save(501, last_step=True)
    model = Model(2.0)
    start = {"initial_load_path": str(folder / ("step-501-hf" if in_hf else "step-501")), "initial_load_in_hf": in_hf}
    if in_hf:  # a folder of the Hub does not say what was left out
        start["exclude_from_last_save"] = "freqs_cis"
    with CheckpointManager(CheckpointConfig(folder=str(folder / "next"), **start), {"model": model}) as manager:
        assert manager.load()
    assert torch.equal(model.layer.weight, saved.layer.weight.bfloat16().float())
    assert model.my_freqs_cis.eq(1.0).all()
    assert model.layer.freqs_cis.eq(2.0).all()
    if in_hf:  # a folder that has it, too
        export_to_huggingface(folder / "step-500", folder / "all", prefix="model.")
        start["initial_load_path"] = str(folder / "all")
        with CheckpointManager(CheckpointConfig(folder=str(folder / "other"), **start), {"model": model}) as manager:
            assert manager.load()
        assert model.layer.freqs_cis.eq(1.0).all()
        model = Model(2.0)
    with CheckpointManager(CheckpointConfig(folder=str(folder), load_step=500), {"model": model}) as manager:
        assert manager.load()
    assert model.layer.freqs_cis.eq(1.0).all()


@table("in_hf", [False, True], ids=["DCP", "Hugging Face"])
def test_the_last_save_lacks_what_is_excluded(tmp_path: Path, in_hf: bool) -> None:
    """The last save and its export lack these tensors, and a training that starts from either keeps its own."""
    _last_save_and_start(tmp_path, in_hf)


def _last_save_warnings(folder: Path) -> list[str]:
    torch.manual_seed(0)
    names = ["freq_cis", "layer.freqs_cis", "freqs_cis", "none"]
    config = CheckpointConfig(folder=str(folder), exclude_from_last_save=names)
    with collect_warnings("shardckpt.manager") as said, CheckpointManager(config, {"model": Model(1.0)}) as manager:
        manager.save(1, last_step=True)
    return said


def test_a_name_that_no_tensor_has_is_said(ranks: Ranks, tmp_path: Path) -> None:
    """A name that leaves nothing out is a warning of the main rank, with the nearest right one."""
    first, second = ranks.run(2, _last_save_warnings, tmp_path)
    (said,) = first
    assert said.endswith(" after a dot: 'freq_cis' did you mean freqs_cis?, 'none'")
    assert second == []


def test_ranks_leave_out_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks, too."""
    ranks.run(2, _seeded, tmp_path)


def _seeded(folder: Path) -> None:
    torch.manual_seed(0)
    _last_save_and_start(folder, in_hf=False)


def test_names_are_ends_after_a_dot() -> None:
    """A name leaves out keys that are it or end with it after a dot, but for those that are stored."""
    keys = ["freqs_cis", "model.freqs_cis", "model.my_freqs_cis", "model.freqs_cis.weight"]
    described = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(1)) for key in keys}
    assert list(leave_out(described, ["freqs_cis"])[0]) == keys[2:]
    assert list(leave_out(described, ["freqs_cis"], stored=[keys[0]])[0]) == [keys[0], *keys[2:]]
    assert leave_out(described, ["weights"]) == (described, False)
    assert list(described) == keys
