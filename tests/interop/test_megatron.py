from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt import mapping
from tests.interop import sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop.runner import Megatron
    from tests.ranks import RankPool

    Releases = Callable[[str], Megatron]

RELEASES = [
    "0.16.1",
    *(pytest.param(release, marks=pytest.mark.slow) for release in ("0.9.0", "0.12.3", "0.13.1", "0.15.3")),
]
WITHOUT_CONTENT_METADATA = ("0.9.0", "0.12.3")
WITHOUT_FLATTENED = ("0.16.1",)


def _save(path: str) -> None:
    state = sample.state(mapping, dist.get_rank(), dist.get_world_size(), filled=True)
    dc.save(state, path, content_metadata=sample.CONTENT_METADATA)


def _load(path: str) -> bool:
    """Load the sample under this world's sharding and compare every value; say whether megatron is out of reach."""
    rank, world = dist.get_rank(), dist.get_world_size()
    loaded = dc.load(sample.state(mapping, rank, world, filled=False), path)
    sample.check(loaded, sample.state(mapping, rank, world, filled=True), mapping)
    return importlib.util.find_spec("megatron") is None


@pytest.mark.parametrize("release", RELEASES)
def test_megatron_loads_what_is_saved_here(ranks: RankPool, megatron: Releases, tmp_path: Path, release: str) -> None:
    """A checkpoint saved at 4 ranks is loaded by Megatron at 4 and at 2, every tensor, object and common value."""
    path = str(tmp_path / "ours")
    ranks.run(4, _save, path)
    for world in (4, 2):
        megatron(release).run(world, "load", path)


@pytest.mark.parametrize("release", RELEASES)
def test_what_megatron_saved_loads_here(ranks: RankPool, megatron: Releases, tmp_path: Path, release: str) -> None:
    """A checkpoint that Megatron saved at 4 ranks loads here at 3, 2 and 1, and where Megatron is not importable."""
    path = str(tmp_path / "theirs")
    megatron(release).run(4, "save", path)
    for world in (3, 2, 1):
        assert ranks.run(world, _load, path) == [True] * world
    tensors = dc.load_plain_tensors(path)
    if release not in WITHOUT_FLATTENED:
        sample.check_equal(tensors.pop("flattened"), sample.flattened_tensor(), "flattened")
    sample.check_tensors(tensors)
    objects = [shard for shard in dc.load_sharded_metadata(path).values() if isinstance(shard, mapping.ShardedObject)]
    assert {shard.unique_key for shard in objects} == set(sample.objects())
    content = None if release in WITHOUT_CONTENT_METADATA else sample.CONTENT_METADATA
    assert dc.load_content_metadata(path) == content
    _check_stand_ins(dc.load_common_state_dict(path)["megatron"])


def _check_stand_ins(values: dict[str, Any]) -> None:
    """Megatron's own classes are inert here, and what was pickled of them can be read."""
    kind, config = values["kind"], values["config"]
    assert kind.origin == "megatron.core.enums.ModelType"
    assert kind.args == (1,)
    assert config.origin == "megatron.core.optimizer.optimizer_config.OptimizerConfig"
    assert config.lr == 0.25
    assert "stand-in" in repr(config)
    assert type(config).__module__.startswith("shardckpt")
