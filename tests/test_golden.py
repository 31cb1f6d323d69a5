from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from tests.golden_checkpoints import VERSIONS, check_model, common_of, global_tensors, same_tensor
from tests.states import columns, layers, replicated, rows, uneven
from tests.tables import in_proof, table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.mapping import ShardedTensor
    from tests.ranks import Ranks

    Layout = Callable[[str, torch.Tensor], list[ShardedTensor]]

LAYOUTS: tuple[Layout, ...] = (rows, columns, uneven, replicated, layers)


def _check_layout(path: str, full: dict[str, torch.Tensor], layout: Layout) -> None:
    """Load all tensors under a layout, into memory that holds other values, and compare every element."""
    blank = {key: torch.full_like(tensor, -1) for key, tensor in full.items()}
    wanted = {key: layout(key, tensor) for key, tensor in blank.items()}
    loaded = dc.load(wanted, path)
    for key, tensor in full.items():
        for got, asked, expected in zip(loaded[key], wanted[key], layout(key, tensor), strict=True):
            assert expected.data is not None
            assert got is asked.data, (layout.__name__, key)
            assert same_tensor(got, expected.data), (layout.__name__, key, got, expected.data)


def _check_allocated(path: str, full: dict[str, torch.Tensor]) -> None:
    """Load whole tensors without memory given for them."""
    wanted = {key: replicated(key, tensor)[0].without_data() for key, tensor in full.items()}
    loaded = dc.load(wanted, path)
    assert all(same_tensor(loaded[key], tensor) for key, tensor in full.items())


def _load_golden(version: str) -> bool:
    path = str(GOLDEN / f"mcore-{version}")
    full = global_tensors(version)
    for layout in LAYOUTS:
        _check_layout(path, full, layout)
    check_model(path, version)
    _check_allocated(path, full)
    return importlib.util.find_spec("megatron") is None


@pytest.mark.parametrize("world", [3, *in_proof(1, 2, 4)])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_loads_at_any_world_size(ranks: Ranks, version: str, world: int) -> None:
    """Every tensor, object and common value of every Megatron release loads under every layout, without Megatron."""
    assert ranks.run(world, _load_golden, version) == [True] * world


@table("version", VERSIONS)
def test_the_queries_describe_a_golden_checkpoint(version: str) -> None:
    """What is stored, at its true shape, common state and content metadata: without a process group."""
    path = GOLDEN / f"mcore-{version}"
    full = global_tensors(version)
    assert dc.check_is_distributed_checkpoint(path)
    assert dc.load_common_state_dict(path) == common_of(version)
    assert dc.load_content_metadata(path) == common_of(version).get("content_metadata")
    tensors = dc.load_tensors_metadata(path)
    described = {key: (shard.global_shape, shard.local_shape, shard.dtype) for key, shard in tensors.items()}
    assert described == {key: (tuple(t.shape), tuple(t.shape), t.dtype) for key, t in full.items()}
    assert all(shard.data is None for shard in tensors.values())
    objects = {f"decoder.layers.0._extra_state/shard_{tp}_2" for tp in range(2)}
    objects |= {f"rng_state/shard_{dp}.{tp}_2.2" for dp in range(2) for tp in range(2)}
    assert set(dc.load_sharded_metadata(path)) == set(full) | objects
    plain = dc.load_plain_tensors(path)
    assert set(plain) == set(full)
    assert all(same_tensor(plain[key], tensor) for key, tensor in full.items())


def test_every_golden_checkpoint_is_read() -> None:
    """No golden checkpoint lies there without a test that reads it."""
    assert {path.name for path in GOLDEN.glob("mcore-*")} == {f"mcore-{version}" for version in VERSIONS}


def test_a_lost_marker_of_megatron_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of Megatron without metadata.json, which it writes last, loads with a warning of what that means."""
    shutil.copytree(GOLDEN / "mcore-0.12.3", tmp_path / "c")
    full = global_tensors("0.12.3")
    key = min(full)
    for has_marker in (True, False):
        if not has_marker:
            (tmp_path / "c" / "metadata.json").unlink()
        caplog.clear()
        loaded = dc.load({"t": replicated(key, torch.zeros_like(full[key]))}, tmp_path / "c", on_unused="ignore")
        assert same_tensor(loaded["t"][0], full[key])
        said = [record.getMessage() for record in caplog.records if "which Megatron writes last" in record.getMessage()]
        assert len(said) == (not has_marker)
