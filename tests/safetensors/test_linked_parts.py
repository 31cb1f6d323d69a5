"""An index in parts whose tensors refer to those of other parts, or begin at odd bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance import verify_checkpoint
from shardckpt.mapping import BlockScales, ShardedTensor
from shardckpt.testing.contract.rewriting import open_reader
from shardckpt_safetensors import SafetensorsSaveShardedStrategy, remove
from shardckpt_safetensors.index import read_index
from tests.ranks import Failure
from tests.safetensors.conformance.independent_reader import read_checkpoint
from tests.safetensors.index_parts import list_parts
from tests.safetensors.parts import InParts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

WHOLE = {"odd.*": "contiguous"}
#: Named by their features: what a save has, and the layout that it takes.
FEATURES = {"aliases": [], "scales": [], "odd": ["unaligned"], "all": ["unaligned"]}


def make_state(kind: str, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """This rank's rows of tied, block-scaled and odd tensors, or of one kind; a few others."""

    def rows(key: str, values: torch.Tensor, scales: BlockScales | None = None) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(
            key, values.chunk(world)[rank].contiguous(), (0, rank, world), block_scales=scales
        )

    state = {f"other.{n}": rows(f"other.{n}", torch.arange(8.0) + n) for n in range(9)}
    if kind in ("aliases", "all"):
        for n in range(5):
            first = rows(f"a.{n}", torch.arange(24.0).view(8, 3) + n)
            again = ShardedTensor.from_rank_offsets(f"z.{n}", first.data, (0, rank, world))
            state |= {first.key: first, again.key: again}
    if kind in ("scales", "all"):
        for n in range(6):
            codes = torch.arange(8 * 32, dtype=torch.uint8).view(8, 32) + n
            state[f"w.{n}"] = rows(f"w.{n}", codes, BlockScales(f"w.{n}.scales", (1, 16)))
            state[f"w.{n}.scales"] = rows(f"w.{n}.scales", torch.arange(16.0).view(8, 2) + n)
        state["deep"] = rows("deep", torch.ones(8, 2, 4), BlockScales("deep.scales", (1, 1, 2)))
        state["deep.scales"] = rows("deep.scales", torch.ones(8, 2, 2))
        tied = ShardedTensor.from_rank_offsets("y.scales", state["deep.scales"].data, (0, rank, world))
        state |= {"y.scales": tied, "y": rows("y", torch.ones(8, 2, 4), BlockScales("y.scales", (1, 1, 2)))}
    if kind in ("odd", "all"):
        for n in range(5):
            state[f"odd.{n}"] = rows(f"odd.{n}", torch.arange(8 * (2 * n + 3), dtype=torch.uint8).view(8, -1))
    return state


def _make_strategy(strategy: type[SafetensorsSaveShardedStrategy], kind: str) -> SafetensorsSaveShardedStrategy:
    return strategy(layout=WHOLE if kind in ("odd", "all") else "boxes")  # type: ignore[arg-type] # of these two


def _describe(path: Path) -> Any:
    """All that an index says but the places: tensors, aliases by key, scales."""
    with open_reader(path) as reader:
        index = read_index(reader)
        index.check()
        columns = index.columns()
        tensors = sorted(zip(columns.keys, map(str, columns.dtypes), columns.shapes, strict=True))
        return tensors, {alias: index.keys[number] for alias, number in index.aliases.items()}, columns.scales


def _save(path: str, kind: str) -> None:
    state = make_state(kind, dist.get_rank(), dist.get_world_size())
    for strategy, name in ((InParts, "parts"), (SafetensorsSaveShardedStrategy, "one")):
        for _ in range(2):  # the second by the plan of the first
            dc.save(state, f"{path}/{name}", _make_strategy(strategy, kind), overwrite=True)


@pytest.mark.parametrize("kind", FEATURES)
def test_parts_say_what_one_file_says(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Tied tensors, block scales and odd payloads are in parts as in one index, for us and for the page's reader."""
    ranks.run(2, _save, str(tmp_path), kind)
    parts, one = tmp_path / "parts", tmp_path / "one"
    assert len(list_parts(parts)) > 2
    assert not list_parts(one)
    assert _describe(parts) == _describe(one)
    assert bool(_describe(parts)[1]) == (kind != "odd")
    assert bool(_describe(parts)[2]) == (kind in ("scales", "all"))
    with open_reader(parts) as reader:
        assert read_index(reader).header.required_features == ["index_parts", *FEATURES[kind]]
    loaded, expected = dc.load_plain_tensors(parts), make_state(kind)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], shard.data) for key, shard in expected.items())
    assert not [result for result in verify_checkpoint(parts) if result.fault]
    assert read_checkpoint(str(parts)).tensors == read_checkpoint(str(one)).tensors


@pytest.mark.parametrize("kind", FEATURES)
def test_a_removal_keeps_the_relations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A removal of keys from an index that stays in parts leaves what a removal from one file leaves."""
    monkeypatch.setattr(remove, "MOST_ROWS", 0)
    for strategy, name in ((InParts, "parts"), (SafetensorsSaveShardedStrategy, "one")):
        dc.save(make_state(kind), tmp_path / name, _make_strategy(strategy, kind))
        for prefix in ("other.3", "a.1", "w.2", "odd.1"):
            if any(key.startswith(prefix) for key in make_state(kind)):
                dc.remove_sharded_tensors(tmp_path / name, prefix)
    assert list_parts(tmp_path / "parts")
    assert len(_describe(tmp_path / "parts")[2]) == (7 if kind in ("scales", "all") else 0)
    assert _describe(tmp_path / "parts") == _describe(tmp_path / "one")
    loaded, expected = (dc.load_plain_tensors(tmp_path / name) for name in ("parts", "one"))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.items())
    assert not [result for result in verify_checkpoint(tmp_path / "parts") if result.fault]


def _save_wrong(path: str, fault: str, strategy: type[SafetensorsSaveShardedStrategy]) -> None:
    rank = dist.get_rank()
    state = make_state("all", rank, dist.get_world_size())
    if fault == "missing":
        del state["w.3.scales"]
    elif fault == "misfit":
        state["w.3"].block_scales = BlockScales("w.3.scales", (1, 8))
    else:
        state["w.3"].block_scales = BlockScales("w.3.scales", (1, 16 + rank))
    dc.save(state, path, _make_strategy(strategy, "all"), validate_access_integrity=False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "which no rank saves"),
        ("misfit", "but it has (8, 2)"),
        ("disagree", "ranks disagree on its block_scales"),
    ],
)
def test_owners_refuse_wrong_scales(ranks: Ranks, tmp_path: Path, fault: str, message: str) -> None:
    """Scales that are missing, do not fit, or differ from rank to rank: one error on all ranks, either way."""
    texts = []
    for strategy in (InParts, SafetensorsSaveShardedStrategy):
        outcomes = ranks.outcomes(2, _save_wrong, str(tmp_path / "c"), fault, strategy)
        assert all(isinstance(outcome, Failure) for outcome in outcomes)
        found = [outcome.trace.strip().splitlines()[-1] for outcome in outcomes]
        assert found[0] == found[1]
        assert message in found[0]
        texts.append(found[0].partition("tensor 'w.3'")[2])
        assert not (tmp_path / "c").exists()
    assert texts[0] == texts[1]
