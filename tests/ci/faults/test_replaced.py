"""Reading while another job overwrites: one save, whole, on all ranks; or an error that says what happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.replaced import foreign, verify
from tests.faults.replacing import (
    NEW,
    OLD,
    Scene,
    always_replaced,
    load_foreign_between,
    read_while_overwritten,
    replaced_on_each_rank,
    save_both,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

__all__ = ["foreign", "verify"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled:UserWarning")


@backends.both_in_proof
@pytest.mark.parametrize(
    "parallel", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["each reads", "fully parallel"]
)
def test_replaced_at_every_moment_of_each_rank(
    gloo_ranks: RankPool, tmp_path: Path, verify: str, parallel: bool
) -> None:
    """Two ranks load one save, the same, whenever on either of them the checkpoint is replaced."""
    gloo_ranks.run(2, save_both, str(tmp_path))
    one, other = gloo_ranks.run(2, replaced_on_each_rank, str(tmp_path), verify, parallel)
    assert one == other
    assert {who for who, _, _ in one} == {0, 1}
    assert all(version in (OLD, NEW) for _, _, version in one), one


@backends.both_in_proof
@pytest.mark.usefixtures("no_pauses")
def test_replaced_again_and_again(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """If every attempt meets another save, all ranks say that the checkpoint is being overwritten, not damaged."""
    gloo_ranks.run(2, save_both, str(tmp_path))
    one, other = gloo_ranks.run(2, always_replaced, str(tmp_path))
    assert one == other
    assert one.startswith(f"CheckpointReplacedError: {tmp_path / 'target'} is being overwritten: in each of ")


@pytest.mark.parametrize(
    ("backend", "readers", "overwrites"),
    [
        ("torch_dist", 1, 15),
        ("torch_dist", 2, 15),
        pytest.param("safetensors", 1, 15, marks=pytest.mark.proof),
        pytest.param("safetensors", 2, 15, marks=pytest.mark.proof),
        pytest.param("torch_dist", 2, 200, marks=[pytest.mark.proof, pytest.mark.timeout(1800)]),
        pytest.param("torch_dist", 1, 200, marks=[pytest.mark.proof, pytest.mark.timeout(1800)]),
        pytest.param("safetensors", 1, 200, marks=[pytest.mark.proof, pytest.mark.timeout(1800)]),
        pytest.param("safetensors", 2, 200, marks=[pytest.mark.proof, pytest.mark.timeout(1800)]),
    ],
    indirect=["backend"],
    scope="module",
)
def test_readers_while_a_job_overwrites(
    gloo_ranks: RankPool, tmp_path: Path, verify: str, readers: int, overwrites: int
) -> None:
    """While a job saves to the same place again and again, every load of 1 and of 2 ranks is whole and none refused."""
    *found, _ = gloo_ranks.run(
        readers + 1,
        read_while_overwritten,
        str(tmp_path),
        verify,
        overwrites,
        timeout=60.0 if overwrites < 100 else 1500.0,
    )
    assert all(loads.keys() <= {str(OLD), str(NEW)} for loads in found), found
    assert sum(found[0].values()) > 1
    assert all(loads == found[0] for loads in found)


def test_ranks_load_one_foreign_checkpoint(gloo_ranks: RankPool, foreign: Scene) -> None:
    """Ranks that open another library's checkpoint before and after it is replaced find out, and load the same one."""
    one, other = gloo_ranks.run(2, load_foreign_between, str(foreign.place))
    assert one == other
    assert one in (OLD, NEW)
