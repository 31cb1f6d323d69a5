"""One program at every world size and without a process group: the same values, the same refusals, the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests import backends
from tests.world_sizes import COMMON, CONTENT, OBJECTS, alone, compare, program, values

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

__all__ = ["alone"]  # fixtures


#: What is refused, and as what; everything else in the program succeeds.
REFUSALS = {
    "save: existing directory": "StorageError",
    "save: unknown backend": "UnknownBackendError",
    "save: hole": "ShardingError",
    "save: overlap": "ShardingError",
    "save: dtypes disagree": "ShardingError",
    "load: missing directory": "NotACheckpointError",
    "load: other backend": "StrategyMismatchError",
    "load: hole": "ShardingError",
    "load: other shape": "ShapeMismatchError",
    "load: unknown mode": "CheckpointingException",
    "strict=True": "KeyMismatchError",
    "strict=assume_ok_unexpected": "KeyMismatchError",
    "strict=raise_unexpected": "KeyMismatchError",
    "strict=raise_all": "KeyMismatchError",
}


@backends.both_in_proof
def test_alone(alone: Any) -> None:
    """Without a process group every value is right, and exactly what should be refused is."""
    outcomes, rows = alone
    assert {name: kind for name, (kind, _) in outcomes.items() if kind != "returned"} == REFUSALS
    full = {"even": values(0), "layers": values(5), "copied": values(7).bfloat16(), "swiglu": values(9)}
    assert rows == {(key, i): row.tolist() for key, tensor in full.items() for i, row in enumerate(tensor)}
    objects = [{"number": i} for i in range(OBJECTS)]
    common = {**COMMON, "content_metadata": CONTENT}
    assert outcomes["load"][1] == {"objects": objects, "mine": "here", **common}
    assert outcomes["load_common_state_dict"][1] == common
    assert outcomes["load_content_metadata"][1] == CONTENT
    assert outcomes["load_plain_tensors"][1] == {key: tensor.tolist() for key, tensor in full.items()}
    assert set(outcomes["load_tensors_metadata"][1]) == set(full)
    assert set(outcomes["load_sharded_metadata"][1]) == {*full, *(f"rng/shard_{i}_{OBJECTS}" for i in range(OBJECTS))}
    assert outcomes["listing"][1] == ["ckpt"]


@backends.both_in_proof
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.ci)])
def test_world_size(ranks: Ranks, tmp_path: Path, alone: Any, world: int) -> None:
    """1, 2 and 4 ranks get what one process gets: values, sets of keys, kinds of errors, messages and warnings."""
    compare(ranks.run(world, program, str(tmp_path)), alone)
