"""What ranks save with contiguous tensors, and how inference tools read it; module-level, so that processes find it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.mapping import ShardedObject
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.huggingface.samples import sharded_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INDEX = "model.safetensors.index.json"


def make_tensors(change: float = 0.0) -> dict[str, torch.Tensor]:
    """Tensors of full pages, of multiples of 64 bytes, and of odd sizes; cut evenly and unevenly; 0-D and empty."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) + change

    return {
        "layers.0.up": draw(512, 256),  # rows of 1 KiB: ranges of 128 KiB on 4 ranks, 512 KiB in all
        "layers.0.down": draw(250, 512).bfloat16(),  # ranges that end inside of pages
        "layers.10.odd": draw(301, 333),  # large, and not of full pages
        "layers.2.norm": draw(1024),
        "layers.2.bias": draw(33).bfloat16(),
        "count": torch.tensor(11),
        "mask": torch.arange(21) % 3 == 0,
        "empty": torch.zeros(0, 4),
        "eight": draw(6, 4).to(torch.float8_e4m3fn),
    }


def save(path: str, change: float = 0.0, **options: Any) -> None:
    """Save the tensors as cut among the ranks that call, and an object, with everything whole."""
    given = {"layout": "contiguous", "max_shard_size": "700KB", **options}
    dc.save(_state(change), path, SafetensorsSaveShardedStrategy(**given))


def _state(change: float) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    shared = {"o": ShardedObject("o", "x", (1,), (0,), replica_id=rank), "step": 3}
    return {**sharded_state(make_tensors(change)), **shared}


def save_in_a_way(path: str, way: str) -> None:
    """Save twice, the second time other values by the cached plan; behind the training they change at once."""
    options = {"layout": "contiguous", "max_shard_size": "700KB", "keep_only_main_replica": way != "any replica"}
    for number in (0, 1):
        state, strategy = _state(number), SafetensorsSaveShardedStrategy(**options)
        place = f"{'local://' if way == 'store' else ''}{path}/{number}"
        if way not in ("thread", "process"):
            dc.save(state, place, FullyParallelSaveStrategyWrapper(strategy) if way == "fully parallel" else strategy)
            continue
        with AsyncCallsQueue(way == "process") as queue:
            request = dc.save(state, place, strategy, async_sharded_save=True)
            assert request is not None
            queue.schedule_async_request(request)
            for shards in state.values():
                for shard in shards if isinstance(shards, list) else []:
                    shard.data.zero_()


def save_transposed(path: str) -> None:
    """Save to a store what :func:`save` saves, from tensors whose memory is in the order of columns."""
    state = _state(0.0)
    for shards in state.values():
        for shard in shards if isinstance(shards, list) else []:
            if shard.data.dim() == 2:
                shard.data = shard.data.T.contiguous().T
    strategy = SafetensorsSaveShardedStrategy(layout="contiguous", max_shard_size="700KB")
    dc.save(state, f"local://{path}", strategy)


def load(path: str) -> list[str]:
    """Load the tensors into shards cut among the ranks that call; return the keys of those that differ."""
    state = {key: value for key, value in _state(0.0).items() if isinstance(value, list)}
    expected = {key: [shard.data.clone() for shard in shards] for key, shards in state.items()}
    for shards in state.values():
        for shard in shards:
            shard.data.zero_()
    loaded = dc.load(state, path)
    return [
        key
        for key, tensors in expected.items()
        if not all(map(torch.equal, map(_bytes, tensors), map(_bytes, loaded[key])))
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def digest_weights(path: Path) -> dict[str, str]:
    """Return the digests of the files that make a Hugging Face folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.glob("model*"))}


def read_like_vllm(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that vLLM's default loader yields: of all safetensors files those that an index names.

    Mistral's files go before all others.
    """
    files = sorted(folder.glob("consolidated*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists() and not files[0].name.startswith("consolidated"):
        weight_map: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        files = [file for file in files if file.name in set(weight_map.values())]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def save_partly(path: str) -> None:
    """Save without a row of a tensor, unchecked."""
    state = _state(0.0)
    for shard in state["layers.0.up"]:
        shard.global_shape = (513, 256)
    dc.save(state, path, SafetensorsSaveShardedStrategy(layout="contiguous"), validate_access_integrity=False)
