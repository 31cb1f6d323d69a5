from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.safetensors.conformance.independent_reader import read_checkpoint
from tests.safetensors.contiguous import jobs
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks

EMBEDDING, HEAD, OTHER = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def _save(path: str, assets: str | None, *, tied: bool = True, change: float = 0.0, **options: Any) -> None:
    """Save a model as cut among the ranks that call; its output layer is its embedding, or has values of its own."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    embedding = torch.arange(24.0).view(6, 4).chunk(world)[rank] + change
    head = embedding if tied else embedding + 100
    norm = torch.ones(3)
    state: dict[str, Any] = {
        f"model.{key}": ShardedTensor.from_rank_offsets(f"model.{key}", tensor, (0, rank, world))
        for key, tensor in ((EMBEDDING, embedding), (HEAD, head.detach()))
    }
    state |= {
        key: ShardedTensor.from_rank_offsets(key, norm, replica_id=rank) for key in (f"model.{OTHER}", "model.twice")
    }
    strategy = SafetensorsSaveShardedStrategy(layout="contiguous", prefix="model.", assets=assets, **options)
    dc.save(state, path, strategy)


def _check(path: Path, *, names: set[str], tied: bool = True, change: float = 0.0) -> None:
    """Check the folder's names, for others, and the values of every key, for us and the stranger's reader."""
    assert jobs.read_like_vllm(path).keys() == {EMBEDDING, OTHER, "twice"} | names
    expected = torch.arange(24.0).view(6, 4) + change
    ours = dc.load_plain_tensors(path)
    assert torch.equal(ours[f"model.{EMBEDDING}"], expected)
    assert torch.equal(ours[f"model.{HEAD}"], expected if tied else expected + 100)
    wanted = {HEAD: ShardedTensor.from_rank_offsets(f"model.{HEAD}", torch.zeros(6, 4))}
    assert torch.equal(dc.load(wanted, path)[HEAD], ours[f"model.{HEAD}"])
    assert read_checkpoint(path).tensors.keys() == ours.keys()


def _write_config(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return str(folder)


TIED = '{"tie_word_embeddings": true}'


def test_a_tied_output_layer_is_stored_as_the_embedding(ranks: Ranks, tmp_path: Path) -> None:
    """Its name is not in the folder, as save_pretrained has it, the key loads; the bytes are those of any ranks."""
    assets = _write_config(tmp_path / "assets", TIED)
    _save(str(tmp_path / "0"), assets)
    _check(tmp_path / "0", names=set())
    ranks.run(2, _save, str(tmp_path / "2"), assets)
    _check(tmp_path / "2", names=set())
    assert jobs.digest_weights(tmp_path / "2") == jobs.digest_weights(tmp_path / "0")
    index = json.loads((tmp_path / "0" / jobs.INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 * 4 * 4 + 2 * 3 * 4


@table(("gone", "stays"), [(HEAD, EMBEDDING), (EMBEDDING, HEAD)])
def test_one_of_both_names_is_removed(tmp_path: Path, gone: str, stays: str) -> None:
    """The other key keeps the values, in a folder that others still open, whichever of the two was stored."""
    _save(str(tmp_path / "c"), _write_config(tmp_path / "assets", TIED))
    dc.remove_sharded_tensors(tmp_path / "c", f"model.{gone}")
    ours = dc.load_plain_tensors(tmp_path / "c")
    assert sorted(ours) == sorted([f"model.{OTHER}", f"model.{stays}", "model.twice"])
    assert torch.equal(ours[f"model.{stays}"], torch.arange(24.0).view(6, 4))
    assert jobs.read_like_vllm(tmp_path / "c").keys() == {EMBEDDING, OTHER, "twice"}
    read_checkpoint(tmp_path / "c")


@table(
    ("config", "options"),
    [(None, {}), ("{}", {}), ('{"tie_word_embeddings": false}', {}), (TIED, {"store_aliases": False})],
)
def test_nothing_is_left_out_that_no_config_explains(
    tmp_path: Path, config: str | None, options: dict[str, Any]
) -> None:
    """Without a config that says that the output layer is tied, or if the caller wants it, both names are stored."""
    _save(str(tmp_path / "c"), None if config is None else _write_config(tmp_path / "assets", config), **options)
    _check(tmp_path / "c", names={HEAD})


def test_the_config_does_not_tie_what_has_other_values(tmp_path: Path) -> None:
    """The same keys tied, untied and tied again, by one plan or another: each save has what the tensors have."""
    assets = _write_config(tmp_path / "assets", TIED)
    for step, tied in enumerate((True, True, False, True)):
        _save(str(tmp_path / str(step)), assets, tied=tied, change=step)
        _check(tmp_path / str(step), names=set() if tied else {HEAD}, tied=tied, change=step)


def test_a_tied_config_of_an_untied_model_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save goes on, and warns that engines would take one of two tensors for both; of tied ones there is no word."""
    assets = _write_config(tmp_path / "assets", TIED)
    with caplog.at_level(logging.WARNING, "shardckpt_safetensors"):
        _save(str(tmp_path / "1"), assets, tied=True)
        assert "tie_word_embeddings" not in caplog.text
        _save(str(tmp_path / "2"), assets, tied=False)
    assert "are one (tie_word_embeddings), and the model has two tensors" in caplog.text


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """The error names the file and what is wrong in it, and nothing is there."""
    assets = _write_config(tmp_path / "assets", "{")
    with pytest.raises(CheckpointingException, match=r"config\.json is damaged: Expecting property name"):
        _save(str(tmp_path / "c"), assets)
    assert not (tmp_path / "c").exists()
