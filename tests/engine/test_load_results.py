"""What a load strategy must return, and the error that says which strategy returned what instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.engine.load_results import check_values
from shardckpt.errors import KeyMismatchError, PluginError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.parallel import FullyParallelLoadStrategyWrapper
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.strategy import lists_columns
from shardckpt_torch_dist import TorchDistLoadShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks

WHO = rf"{__name__}\.Returns \('torch_dist', 1\) of this process, {__file__}: "


class Returns(TorchDistLoadShardedStrategy):
    """Replaces what a good strategy returns from one of its methods."""

    def __init__(self, method: str, change: Callable[[Any], Any]) -> None:
        self._method = method
        self._change = change

    def _changed(self, method: str, value: Any) -> Any:
        return self._change(value) if method == self._method else value

    def load(self, wanted: Any, context: Any) -> Any:
        """Load."""
        return self._changed("load", super().load(wanted, context))

    def load_common(self, context: Any) -> Any:
        """Load."""
        return self._changed("load_common", super().load_common(context))

    def load_index(self, context: Any) -> Any:
        """Load."""
        return self._changed("load_index", super().load_index(context))

    def can_build(self, wanted: Any, context: Any) -> Any:
        """Look."""
        return self._changed("can_build", super().can_build(wanted, context))


def state(*, filled: bool) -> dict[str, Any]:
    """A tensor of 4 x 3 that is stored as float32 and wanted as bfloat16, and an object."""
    wanted = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3, dtype=torch.bfloat16))
    return {"w": wanted if filled else wanted.without_data(), "o": ShardedObject("o", None, (1,), (0,))}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A checkpoint of that state."""
    stored = ShardedTensor.from_rank_offsets("w", torch.arange(12.0).reshape(4, 3))
    dc.save({"w": stored, "o": ShardedObject("o", [7], (1,), (0,)), "step": 1}, tmp_path / "c")
    return str(tmp_path / "c")


def replace(number: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    """A change of one of the returned values."""
    return lambda values: [value if n == number else old for n, old in enumerate(values)]


EXPECTED = r"expected shape \(4, 3\) and torch\.bfloat16"
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "too few": (lambda values: values[:1], r"load returned 1 values for 2 shards, and none for 'o/shard_0_1'"),
    "too many": (lambda values: [*values, 1], r"load returned 3 values for 2 shards"),
    "a dict": (
        lambda values: dict(enumerate(values)),
        r"load returned a dict; expected a list with one value for each",
    ),
    "nothing": (lambda _: None, r"load returned a NoneType; expected a list"),
    "a generator": (iter, r"load returned a list_iterator; expected a list"),
    "no tensor": (replace(0, None), rf"load returned for 'w' a NoneType, no tensor; {EXPECTED}"),
    "a shape": (replace(0, torch.ones(3, 4)), rf"for 'w' shape \(3, 4\) and torch\.float32; {EXPECTED}"),
    "a dtype": (replace(0, torch.ones(4, 3, dtype=torch.int64)), rf"\(4, 3\) and torch\.int64; {EXPECTED}"),
    "meta": (replace(0, torch.ones(4, 3, dtype=torch.bfloat16, device="meta")), rf"meta device.*; {EXPECTED}"),
    "a description": (replace(1, ShardedObject("o", [7], (1,), (0,))), r"for object 'o/shard_0_1' a ShardedObject"),
}


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_named(case: str, filled: bool, saved: str) -> None:
    """Values of another number, type, shape or dtype are an error with strategy, key, and what was expected."""
    change, text = WRONG[case]
    wanted = state(filled=filled)
    with pytest.raises(PluginError, match=rf"^{WHO}{text}|{WHO}.*{text}"):
        dc.load(wanted, saved, Returns("load", change))
    if filled:
        assert not wanted["w"].data.is_meta


def test_no_value_is_copied_before_all_are_checked(saved: str) -> None:
    """A wrong value of one shard leaves the memory of the others as it was."""
    wanted = state(filled=True)
    change = lambda values: [torch.ones(4, 3), wanted["o"]]  # noqa: E731
    with pytest.raises(PluginError, match="a ShardedObject"):
        dc.load({"w": wanted["w"], "o": wanted["o"]}, saved, _Unread(change))
    assert not wanted["w"].data.any()


class _Unread(Returns):
    """Reads nothing into the shards."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__("load", change)

    def load(self, wanted: Any, context: Any) -> Any:
        """Load."""
        return self._change(wanted)


def test_the_stored_dtype_is_cast(saved: str) -> None:
    """A tensor of the stored dtype is cast into the caller's, as the contract says."""
    loaded = dc.load(state(filled=True), saved, _Unread(lambda _: [torch.arange(12.0).reshape(4, 3), [7]]))
    assert loaded["w"].dtype is torch.bfloat16
    assert loaded["w"].sum() == 66


def test_stored_dtypes_are_listed_once() -> None:
    """The dict of all stored dtypes is made once, however many tensors of a checkpoint are cast."""
    wanted = [ShardedTensor.from_rank_offsets(key, torch.zeros(2, dtype=torch.bfloat16)) for key in "abc"]
    calls = []

    def find_dtypes() -> dict[str, torch.dtype]:
        calls.append(1)
        return dict.fromkeys("abc", torch.float32)

    strategy = TorchDistLoadShardedStrategy()
    check_values(strategy, wanted, [torch.ones(2)] * 3, get_plugin_manager(), find_dtypes)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("method", "change", "text"),
    [
        ("load_common", lambda _: None, "load_common returned a NoneType, expected a dict"),
        ("load_index", lambda index: dict(enumerate(index)), "load_index returned a dict, expected a list"),
        ("load_index", lambda index: [*index, torch.ones(2)], "load_index returned a list with a Tensor, expected"),
        ("can_build", lambda found: found[1:], "can_build returned 0 answers for 1 objects, 'p/shard_0_1' the first"),
    ],
)
def test_other_results_are_checked(method: str, change: Any, text: str, saved: str) -> None:
    """Common state, index and answers of a wrong type are errors that name strategy and method."""
    wanted = {"p": ShardedObject("p", None, (1,), (0,))} if method == "can_build" else state(filled=True)
    with pytest.raises(PluginError, match=WHO + text):
        dc.load(wanted, saved, Returns(method, change))


def _refuse_on_a_rank(directory: str, wrap: bool) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4 // world, 3), (0, rank, world))
    bad = Returns("load", lambda values: values[: 1 - rank])  # too few on rank 1 alone
    strategy = FullyParallelLoadStrategyWrapper(bad) if wrap else bad
    with pytest.raises(PluginError) as caught:
        dc.load({"w": shard}, directory, strategy)
    return str(caught.value)


@pytest.mark.parametrize("wrap", [False, True])
def test_every_rank_raises_the_same(ranks: Ranks, saved: str, wrap: bool) -> None:
    """A wrong result on one rank is the same error on all, of the strategy inside a wrapper, too."""
    [text] = set(ranks.run(2, _refuse_on_a_rank, saved, wrap))
    assert text.startswith("rank 1, in ")
    assert f"{__name__}.Returns ('torch_dist', 1)" in text
    assert "load returned 0 values for 1 shards, and none for 'w'" in text


def test_a_subclass_that_overrides_the_index_alone_is_asked_for_it(saved: str) -> None:
    """A load takes the columns of a strategy, but not those that a subclass with another index inherits."""
    strategy = Returns("load_index", lambda index: [shard for shard in index if shard.key != "w"])
    assert lists_columns(TorchDistLoadShardedStrategy())
    assert not lists_columns(strategy)
    for asked in (strategy, FullyParallelLoadStrategyWrapper(strategy)):
        with pytest.raises(KeyMismatchError, match="w"):
            dc.load(state(filled=False), saved, asked)


class ReturnsColumns(Returns):
    """Replaces the columns, too."""

    def list_columns(self, context: Any) -> Any:
        """List."""
        return self._changed("list_columns", super().list_columns(context))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda _: None, "a NoneType"),
        (tuple, "a tuple"),
        (lambda columns: columns._replace(keys=[]), "0 keys, 1 dtypes and 1 shapes"),
        (lambda columns: columns._replace(shapes=[]), "1 keys, 1 dtypes and 0 shapes"),
        (lambda columns: columns._replace(keys=[b"w"]), "a key of type bytes"),
    ],
)
@pytest.mark.parametrize("wrap", [False, True])
def test_columns_that_do_not_fit_each_other(saved: str, change: Callable[[Any], Any], what: str, wrap: bool) -> None:
    """A load checks the columns that it takes in the place of an index, and names the strategy."""
    bad = ReturnsColumns("list_columns", change)
    strategy = FullyParallelLoadStrategyWrapper(bad) if wrap else bad
    with pytest.raises(
        PluginError, match=rf"\.ReturnsColumns \('torch_dist', 1\).*: list_columns returned {what}, expected"
    ):
        dc.load(state(filled=True), saved, strategy)
