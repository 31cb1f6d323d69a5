"""The contract's part about loads: destinations, casts, other shapes, missing keys, slices, listings."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from shardckpt import dist_checkpointing
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.strategy import LoadContext
from shardckpt.testing.cases import SaveLoadCase, save_load_cases
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract import jobs
from shardckpt.testing.contract.claims import Claims, each
from shardckpt.testing.contract.shards import box_shard, make_tensor, whole_shard
from shardckpt.testing.memory import MEMORY_LAYOUTS, garbage, place_in_memory
from shardckpt.testing.states import Destinations, make_state_dict

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

MIB = 1 << 20
LARGE = 4 * MIB


class LoadingTests(Claims):
    """The values that a load gives, and those it leaves alone."""

    def test_saves_are_told_apart(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each load calls require_same_save, with bytes that are of its save only."""
        identities: list[bytes] = []
        compare = LoadContext.require_same_save

        def record(context: LoadContext, identity: bytes, what: str, **agreed: Any) -> None:
            identities.append(identity)
            compare(context, identity, what, **agreed)

        monkeypatch.setattr(LoadContext, "require_same_save", record)
        loads = []
        for directory in (path, path.with_name("again")):
            self.save_version(directory, 1)
            for _ in range(2):
                identities.clear()
                self.load_version(directory)
                check(bool(identities), "load never calls context.require_same_save, after it has planned")
                loads.append(tuple(identities))
        check(loads[0] == loads[1], "two loads of one save give require_same_save different bytes")
        check(
            loads[0] != loads[2],
            "two saves of the same values give require_same_save the same bytes: ranks could load one each; "
            "context.reader.manifest.save_id is of one save only",
        )

    @each("memory", [name for name in MEMORY_LAYOUTS if name != "negated"])
    def test_destination(self, path: Path, memory: str) -> None:
        """A load fills the destination's own memory, however it lies there, and no byte around it."""
        tensor = make_tensor("w", torch.float32, (5, 6, 4))
        self.subject.save({"w": whole_shard("w", tensor.clone())}, path)
        place = place_in_memory(garbage(tensor.numel(), tensor.dtype).view(tensor.shape), memory)
        loaded = self.subject.load({"w": whole_shard("w", place.view)}, path)
        check(loaded["w"] is place.view, "the load returned another tensor than the destination")
        check_same(place.view, tensor, "the destination")
        check_same(place.base, place_in_memory(tensor, memory).base, "the memory around the destination")

    def test_no_destination(self, path: Path) -> None:
        """For a shard without data a load returns a new tensor of its dtype and shape."""
        tensor = make_tensor("w", torch.float32)
        self.subject.save({"w": whole_shard("w", tensor)}, path)
        wanted = box_shard("w", tensor, (slice(2, 5), slice(1, 3))).without_data()
        loaded = self.subject.load({"w": wanted}, path, validate_access_integrity=False)
        check_same(loaded["w"], tensor[2:5, 1:3], "'w'[2:5, 1:3]")

    def test_prepended_axes(self, path: Path) -> None:
        """Layers saved one by one along a prepended axis load as a stack, and a stack loads as layers."""
        stack = make_tensor("w", torch.float32, (4, 3, 2))

        def layers(source: torch.Tensor) -> list[ShardedTensor]:
            return [
                ShardedTensor.from_rank_offsets("w", source[n].clone(), (0, n, 4), prepend_axis_num=1) for n in range(4)
            ]

        self.subject.save({"w": layers(stack)}, path)
        check_same(self.subject.load({"w": whole_shard("w", torch.zeros_like(stack))}, path)["w"], stack, "the stack")
        self.subject.save({"w": whole_shard("w", stack)}, path.with_name("stack"))
        loaded = self.subject.load({"w": layers(torch.zeros_like(stack))}, path.with_name("stack"))["w"]
        for number, value in enumerate(loaded):
            check_same(value, stack[number], f"layer {number}")

    def test_cast(self, path: Path) -> None:
        """A load into another float dtype casts the stored values, with memory and without."""
        tensor = torch.linspace(-3, 3, 24).view(4, 6)
        self.subject.save({"w": whole_shard("w", tensor)}, path)
        for dtype in (torch.bfloat16, torch.float64):
            for shard in (
                whole_shard("w", torch.zeros(4, 6, dtype=dtype)),
                ShardedTensor.from_global_shape("w", dtype, (4, 6)),
            ):
                check_same(self.subject.load({"w": shard}, path)["w"], tensor.to(dtype), f"'w' as {dtype}")

    @each("shape", [(6, 10), (3, 4), (5, 4), (4, 6)])
    def test_another_shape_where_allowed(self, path: Path, shape: tuple[int, int]) -> None:
        """With allow_shape_mismatch a load fills the region that both shapes have, and sets the rest to zero."""
        self.require("supports_shape_mismatch")
        tensor = make_tensor("w", torch.int32, (4, 6))
        self.subject.save({"w": whole_shard("w", tensor)}, path)
        wanted = whole_shard("w", torch.full(shape, 9, dtype=torch.int32))
        wanted.allow_shape_mismatch = True
        expected = torch.zeros(shape, dtype=torch.int32)
        common = (slice(min(4, shape[0])), slice(min(6, shape[1])))
        expected[common] = tensor[common]
        check_same(self.subject.load({"w": wanted}, path)["w"], expected, f"(4, 6) as {shape}")

    def test_another_shape(self, path: Path) -> None:
        """A destination of another global shape is refused by name, before anything is filled."""
        self.subject.save({"a": whole_shard("a", torch.ones(3)), "w": whole_shard("w", torch.ones(4, 6))}, path)
        first, second = torch.full((3,), 7.0), torch.full((6, 4), 7.0)
        kind, text = jobs.error_of(
            self.subject.load, {"a": whole_shard("a", first), "w": whole_shard("w", second)}, path
        )
        check(kind == "ShapeMismatchError", f"a load of (6, 4) where (4, 6) is stored raised {kind or 'nothing'}")
        check("'w'" in text or "w" in text.split(), f"the error does not name the key: {text}")
        check(first.tolist() == [7.0] * 3, "a destination was filled although the load failed")

    def test_a_missing_key(self, path: Path) -> None:
        """A key that is not stored is refused by name, before anything is filled; stored keys need not be loaded."""
        self.subject.save({"a": whole_shard("a", torch.ones(3)), "b": whole_shard("b", torch.ones(3))}, path)
        place = torch.full((3,), 7.0)
        state = {"a": whole_shard("a", place), "gone": whole_shard("gone", torch.zeros(3))}
        kind, text = jobs.error_of(self.subject.load, state, path)
        check(kind == "KeyMismatchError", f"a load of a key that is not stored raised {kind or 'nothing'}")
        check("gone" in text, f"the error does not name the key: {text}")
        check(place.tolist() == [7.0] * 3, "a destination was filled although the load failed")
        check_same(self.subject.load({"a": whole_shard("a", place)}, path)["a"], torch.ones(3), "'a'")

    def test_a_missing_object(self, path: Path) -> None:
        """An object that is not stored is refused by name."""
        self.require("supports_objects")
        self.subject.save({"o": ShardedObject("o", {"a": 1}, (1,), (0,))}, path)
        kind, text = jobs.error_of(self.subject.load, {"o": ShardedObject("other", None, (1,), (0,))}, path)
        check(kind == "KeyMismatchError", f"a load of an object that is not stored raised {kind or 'nothing'}")
        check("other" in text, f"the error does not name the object: {text}")

    def test_the_index(self, path: Path) -> None:
        """load_index lists each tensor once, with global shape and dtype, and each object, and nothing else."""
        tensor = make_tensor("split", torch.float32, (6, 4))
        state: dict[str, Any] = {
            "split": [box_shard("split", tensor, (slice(a, a + 2), slice(None))) for a in (0, 2, 4)],
            "scalar": whole_shard("scalar", torch.tensor(3, dtype=torch.int64)),
            "empty": whole_shard("empty", torch.zeros(0, 5)),
        }
        if self.subject.with_objects:
            state["objects"] = [ShardedObject("o", {"n": n}, (2,), (n,)) for n in range(2)]
        self.subject.save(state, path)
        found = jobs.load_index(self.subject, str(path))
        expected = [
            ("empty", (0, 5), "torch.float32"),
            ("scalar", (), "torch.int64"),
            ("split", (6, 4), "torch.float32"),
        ]
        expected += [("o/shard_0_2", (2,), ""), ("o/shard_1_2", (2,), "")] if self.subject.with_objects else []
        check(found == sorted(expected), f"load_index lists {found}, not {sorted(expected)}")
        with self.subject.registered():
            tensors = dist_checkpointing.load_plain_tensors(path)
        check_same(tensors["split"], tensor, "'split'")

    def test_slices_of_an_open_checkpoint(self, path: Path) -> None:
        """Slices of stored tensors, across shards, empty or single elements, are those of the global tensors."""
        tensor = make_tensor("w", torch.float32, (9, 7))
        cuts = [(slice(a, b), slice(c, d)) for a, b in ((0, 4), (4, 9)) for c, d in ((0, 2), (2, 7))]
        scalar = torch.tensor(5, dtype=torch.int16)
        self.subject.save({"w": [box_shard("w", tensor, cut) for cut in cuts], "s": whole_shard("s", scalar)}, path)
        with dist_checkpointing.open_checkpoint(path, self.subject.make_loader()) as opened:
            regions: list[Any] = [
                (slice(3, 5), slice(1, 3)),
                (slice(0, 9), slice(6, 7)),
                (slice(2, 2),),
                (4,),
                (8, 6),
                (),
            ]
            for region in regions:
                check_same(opened["w"][region], tensor[region], f"'w'[{region}]")
            check_same(opened["s"].read(), scalar, "'s'")

    def test_drawn_layouts(self) -> None:
        """Tensors of drawn shapes and dtypes load from any drawn layout as any other, with objects among them."""
        for claim in (
            "supports_flattened_range",
            "supports_shape_mismatch",
            "supports_objects",
            "supports_python_values",
        ):
            self.require(claim)
        dtypes = tuple(self.get_claim("dtypes"))

        @seed(0)
        @settings(
            max_examples=20, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
        )
        @given(save_load_cases(1, 1, most=5, dtypes=dtypes))
        def run(case: SaveLoadCase) -> None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "checkpoint"
                self.subject.save(make_state_dict(case), path)
                wanted = Destinations(case)
                # random bits are too large for smaller floats
                options = {"validate_access_integrity": case.validate, "allow_dtype_cast": True}
                wanted.check(self.subject.load(wanted.state(), path, **options))

        run()

    def test_two_threads_load(self, path: Path) -> None:
        """Two threads that load at once, by one strategy if it is an instance, get each their own tensors."""
        tensors = {f"k{n}": make_tensor(f"k{n}", torch.float32, (64, 33)) for n in range(12)}
        self.subject.save({"t": [whole_shard(key, tensor) for key, tensor in tensors.items()]}, path)
        loader = self.subject.make_loader()

        def load(keys: list[str]) -> None:
            for _ in range(4):
                wanted = [whole_shard(key, torch.zeros(64, 33)) for key in keys]
                for key, value in zip(keys, dist_checkpointing.load({"t": wanted}, path, loader)["t"], strict=True):
                    check_same(value, tensors[key], f"while another thread loads, {key!r}")

        keys = [*tensors]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(load, (keys[::2], keys[1::2])))

    def test_bytes_read_for_a_slice(self, path: Path) -> None:
        """A slice of one of eight shards reads less than half of the tensor's bytes."""
        self.require_counted_reads()
        tensor = make_tensor("w", torch.float32, (LARGE // 1024, 256))
        rows = tensor.shape[0] // 8
        cuts = [(slice(n * rows, (n + 1) * rows), slice(None)) for n in range(8)]
        self.subject.save({"w": [box_shard("w", tensor, cut) for cut in cuts]}, path)

        def read() -> None:
            with dist_checkpointing.open_checkpoint(path, self.subject.make_loader()) as opened:
                check_same(opened["w"][rows + 1 : rows + 9], tensor[rows + 1 : rows + 9], "rows of the second shard")

        self._check_reads(read, LARGE // 2)

    def test_bytes_read_for_a_key(self, path: Path) -> None:
        """A load of one of sixteen tensors reads less than half of the checkpoint's bytes."""
        self.require_counted_reads()
        tensors = {f"k{n}": make_tensor(f"k{n}", torch.float32, (LARGE // 16 // 1024, 256)) for n in range(16)}
        self.subject.save({"t": [whole_shard(key, tensor) for key, tensor in tensors.items()]}, path)

        def read() -> None:
            wanted = whole_shard("k5", torch.zeros_like(tensors["k5"]))
            check_same(self.subject.load({"w": wanted}, path)["w"], tensors["k5"], "'k5'")

        self._check_reads(read, LARGE // 2)

    def _check_reads(self, read: Callable[[], None], limit: int) -> None:
        """Check that a call reads fewer bytes than the limit."""
        read()  # modules that are imported at the first load are not counted
        before = jobs.bytes_read()
        read()
        found = jobs.bytes_read() - before
        check(found < limit, f"it read {found / MIB:.1f} MiB, where less than {limit / MIB:.1f} MiB are expected")
