"""What ranks of a test do with shardckpt: save the sample, load it, and ask what can be asked."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt import mapping
from tests.interop import sample
from tests.interop.writers import WRITERS


def save(path: str) -> None:
    """Save the sample."""
    state = sample.state(mapping, dist.get_rank(), dist.get_world_size(), filled=True)
    dc.save(state, path, content_metadata=sample.CONTENT_METADATA)


def load(path: str) -> bool:
    """Load the sample under this world's sharding and compare every value; say whether megatron is out of reach."""
    rank, world = dist.get_rank(), dist.get_world_size()
    loaded = dc.load(sample.state(mapping, rank, world, filled=False), path)
    sample.check(loaded, sample.state(mapping, rank, world, filled=True), mapping)
    return importlib.util.find_spec("megatron") is None


def check_queries(path: str, writer: str) -> None:
    """Ask for all that can be had without describing it, and compare it with what the writer saved."""
    expected = sample.whole_tensors()
    if WRITERS[writer].flattened:
        expected["flattened"] = sample.flattened_tensor()
    sample.check_equal(dc.load_plain_tensors(path), expected, "plain tensors")
    described = {key: (t.global_shape, t.dtype) for key, t in dc.load_tensors_metadata(path).items()}
    assert described == {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in expected.items()}
    assert set(dc.load_sharded_metadata(path)) == {*expected, *sample.objects()}
    content = sample.CONTENT_METADATA if WRITERS[writer].content_metadata else None
    assert dc.load_content_metadata(path) == content
    common = dc.load_common_state_dict(path)
    if writer != "shardckpt":
        _check_stand_ins(common.pop("megatron"))
    sample.check_equal(common, sample.stored_common(content_metadata=content is not None), "common")


def rewrite(old: str, new: str) -> None:
    """Load all of a checkpoint without a description of it, and save it again."""
    stored = dc.load_sharded_metadata(old)
    loaded = dc.load(dict(stored), old)
    loaded.pop("megatron", None)  # stand-ins for Megatron's classes cannot be saved
    dc.save({**loaded, **{key: replace(shard, data=loaded[key]) for key, shard in stored.items()}}, new)


def _check_stand_ins(values: dict[str, Any]) -> None:
    """Megatron's own classes are inert here, and what was pickled of them can be read."""
    kind, config = values["kind"], values["config"]
    assert kind.origin == "megatron.core.enums.ModelType"
    assert kind.args == (1,)
    assert config.origin == "megatron.core.optimizer.optimizer_config.OptimizerConfig"
    assert config.lr == 0.25
    assert "stub for" in repr(config)
    assert type(config).__module__.startswith("shardckpt")


__all__ = ["check_queries", "load", "rewrite", "save"]
