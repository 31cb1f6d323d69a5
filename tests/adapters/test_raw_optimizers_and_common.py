"""An optimizer's own state dict, whose numbers are common state: its tensors are loaded beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict

if TYPE_CHECKING:
    from pathlib import Path


def test_tensors_of_a_state_with_numbers_are_loaded(tmp_path: Path) -> None:
    """SparseAdam counts its steps in an int: a fresh optimizer gets the moments, too."""
    model = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    dc.save(to_sharded_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), tmp_path / "c")
    fresh = torch.optim.SparseAdam(model.parameters())
    wanted = to_sharded_state_dict({"model": model.state_dict(), "optimizer": fresh.state_dict()})
    (state,) = dc.load(wanted, tmp_path / "c")["optimizer"]["state"].values()
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(state["exp_avg"], optimizer.state[model.weight]["exp_avg"])
