"""The contract's part about tensors: every dtype, shape, layout in memory and key comes back bit for bit."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract.claims import Claims, each
from shardckpt.testing.contract.shards import box_shard, make_tensor, whole_shard
from shardckpt.testing.memory import MEMORY_LAYOUTS, place_in_memory
from shardckpt.testing.tensors import DTYPES

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {
    "dots and slashes": ["a.b", "a/b", "a//b", "/a"],
    "names of other files": ["..", "../up", "metadata.json", "shardckpt.json", "."],
    "blanks and quotes": ["a b", 'a"b', "a'b", "a\\b", "a\nb", "a%2Fb"],
    "case": ["Weight", "weight", "WEIGHT"],
    "other alphabets": ["größe", "重み", "\N{GRINNING FACE}"],
    "long": ["x" * 300, "x" * 301],
    "prefixes of each other": ["w", "w.1", "w.10", "w_1", "w1"],
}


class ValueTests(Claims):
    """Values that one process saves and one process loads."""

    def _round_trip(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Save tensors, load them into memory with other values, and without memory, and compare."""
        expected = {key: tensor.clone() for key, tensor in tensors.items()}
        self.subject.save({"tensors": [whole_shard(key, tensor) for key, tensor in tensors.items()]}, path)
        for with_memory in (True, False):
            wanted = []
            for key, tensor in expected.items():
                shard = ShardedTensor.from_global_shape(key, tensor.dtype, tuple(tensor.shape))
                if with_memory:
                    shard.init_data("cpu", torch.zeros)
                wanted.append(shard)
            loaded = self.subject.load({"tensors": wanted}, path)["tensors"]
            for (key, tensor), value in zip(expected.items(), loaded, strict=True):
                check_same(value, tensor, f"{key!r:.60}")

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    @each("dtype", DTYPES)
    def test_dtype(self, path: Path, dtype: torch.dtype) -> None:
        """Values of a claimed dtype come back bit for bit; any other dtype does, or the save is refused."""
        tensor = make_tensor("w", dtype)
        try:
            self.subject.save({"w": whole_shard("w", tensor)}, path)
        except CheckpointingException:
            check(
                dtype not in self.get_claim("dtypes"), f"{dtype} is among the claimed dtypes, and the save is refused"
            )
            check(not list(path.parent.iterdir()), "a save that is refused leaves nothing")
            return
        loaded = self.subject.load({"w": ShardedTensor.from_global_shape("w", dtype, tuple(tensor.shape))}, path)
        check_same(loaded["w"], tensor, str(dtype))
        listed = dist_checkpointing.load_tensors_metadata(path)["w"].dtype
        check(listed == dtype, f"load_index says that a tensor of {dtype} is stored as {listed}")

    @each("shape", [(), (1,), (0,), (0, 4), (3, 0, 2), (7,), (2, 3, 1, 5, 2), (1, 1, 1)])
    def test_shape(self, path: Path, shape: tuple[int, ...]) -> None:
        """Tensors of any shape come back with it: scalars, empty ones, many axes, axes of length 1."""
        self._round_trip(path, {"w": make_tensor("w", torch.float32, shape), "other": torch.ones(2)})

    def test_special_values(self, path: Path) -> None:
        """NaNs with their bits, infinities, denormals and signed zeros come back as they were."""
        numbers = [0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF]
        bits = torch.tensor([number - (1 << 32 if number >> 31 else 0) for number in numbers], dtype=torch.int32)
        self._round_trip(path, {"w": bits.view(torch.float32)})

    def test_a_large_tensor(self, path: Path) -> None:
        """A tensor of 9 MiB and a bit, which is written and read in several parts, comes back complete."""
        self._round_trip(path, {"w": make_tensor("w", torch.float32, (9 * 1024 + 3, 257))})

    def test_many_tensors(self, path: Path) -> None:
        """A hundred tensors of one save come back, each under its own key."""
        self._round_trip(path, {f"layers.{n}.w": torch.full((3,), float(n)) for n in range(100)})

    @each("memory", [*MEMORY_LAYOUTS])
    def test_memory_layout(self, path: Path, memory: str) -> None:
        """A tensor that lies in memory in any way, strided, as a window or lazily negated, is saved as its values."""
        tensor = make_tensor("w", torch.float32, (5, 6, 4))
        laid = place_in_memory(tensor, memory)
        self.subject.save({"w": whole_shard("w", laid.view)}, path)
        found = self.subject.load({"w": ShardedTensor.from_global_shape("w", tensor.dtype, tuple(tensor.shape))}, path)
        check_same(found["w"], tensor, f"saved from {memory} memory")

    @each("keys", [pytest.param(keys, id=name) for name, keys in KEYS.items()])
    def test_key(self, path: Path, keys: list[str]) -> None:
        """A key may be any text: folders, other files or upper case in it change nothing on disk."""
        self._round_trip(path, {key: torch.full((2, 2), float(number)) for number, key in enumerate(keys)})
        check(
            [entry.name for entry in path.parent.iterdir()] == [path.name], "a key led to a file next to the checkpoint"
        )

    def test_boxes_of_any_size(self, path: Path) -> None:
        """Shards that are cut at any place, empty ones among them, together are the tensor."""
        tensor = make_tensor("w", torch.int64, (10, 7))
        cuts = [(0, 3, 0, 7), (3, 3, 0, 7), (3, 10, 0, 1), (3, 4, 1, 7), (4, 10, 1, 6), (4, 10, 6, 7)]
        shards = [box_shard("w", tensor, (slice(a, b), slice(c, d))) for a, b, c, d in cuts]
        self.subject.save({"w": shards}, path)
        wanted = whole_shard("w", torch.zeros_like(tensor))
        check_same(self.subject.load({"w": wanted}, path)["w"], tensor, "'w'")
        regions = [(0, 10, 2, 3), (2, 5, 0, 7), (9, 10, 6, 7), (4, 4, 0, 7)]
        boxes: list[Any] = [
            box_shard("w", torch.zeros_like(tensor), (slice(a, b), slice(c, d))) for a, b, c, d in regions
        ]
        loaded = self.subject.load({"w": boxes}, path, validate_access_integrity=False)["w"]
        for (a, b, c, d), value in zip(regions, loaded, strict=True):
            check_same(value, tensor[a:b, c:d], f"'w'[{a}:{b}, {c}:{d}]")

    def test_a_flattened_shard(self, path: Path) -> None:
        """Slices of a flattened tensor are saved, and loaded as slices that are cut elsewhere."""
        self.require("supports_flattened_range")
        tensor = make_tensor("w", torch.float32, (4, 6))

        def slices(edges: list[int], source: torch.Tensor) -> list[ShardedTensor]:
            return [
                ShardedTensor.from_rank_offsets_flat(
                    "w", source.reshape(-1)[a:b].clone(), (4, 6), flattened_range=slice(a, b)
                )
                for a, b in pairwise(edges)
            ]

        self.subject.save({"w": slices([0, 5, 6, 19, 24], tensor)}, path)
        edges = [0, 1, 11, 24]
        loaded = self.subject.load({"w": slices(edges, torch.zeros(4, 6))}, path)["w"]
        for (start, stop), value in zip(pairwise(edges), loaded, strict=True):
            check_same(value, tensor.reshape(-1)[start:stop], f"elements {start} to {stop}")
        check_same(self.subject.load({"w": whole_shard("w", torch.zeros(4, 6))}, path)["w"], tensor, "'w'")

    def test_no_tensors(self, path: Path) -> None:
        """A state dict without shards is saved and loaded: its common state."""
        self.subject.save({"step": 3}, path)
        check(self.subject.load({}, path) == {"step": 3}, "the loaded common state differs from the saved one")
