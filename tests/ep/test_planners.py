"""The DCP planners: any stored chunks, ranks outside the mesh, refusals, and DCP's own modules left alone."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from shardckpt.compat import mindspeed as compat
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError
from shardckpt.planning.boxes import Box
from shardckpt.planning.placements import Split
from shardckpt_ep import EPLoadPlanner, EPSavePlanner, ExpertLayout
from shardckpt_ep.read_items import expert_read_items
from tests.ep.checkpoints import store
from tests.ep.cycles import layouts, load
from tests.ep.live import FQN, Case, Meshes, expected, get_local_tensor, layout, order, state, whole
from tests.ep.planners import EP_FSDP

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

#: Experts 2 and 3 of 4.
SECOND_HALF = ExpertLayout((4, 4), Box((2, 0), (2, 4)))


def _strided(path: Path, *, is_save: bool) -> torch.Tensor:
    """Two rows of every half of the experts: several boxes of the tensor of all experts on every rank."""
    rank = dist.get_rank()
    first, second = whole(8).chunk(2)
    mine = torch.cat([first[2 * rank : 2 * rank + 2], second[2 * rank : 2 * rank + 2]])
    held = {FQN: mine.clone() if is_save else torch.zeros(4, 6, 3)}
    given = {FQN: ExpertLayout((8, 6, 3), Box((0, 0, 0), (8, 6, 3)), (Split(0, 2, rank, 2),))}
    if is_save:
        dcp.save(held, checkpoint_id=path, planner=EPSavePlanner(given))
    else:
        dcp.load(held, checkpoint_id=path, planner=EPLoadPlanner(given))
    return held[FQN] - mine


def _strided_there_and_back(stored: Path, path: Path) -> float:
    _strided(path, is_save=True)
    return max(float(_strided(place, is_save=False).abs().max()) for place in (stored, path))


def test_a_tensor_of_several_boxes_is_cut_and_put_together(ranks: Ranks, tmp_path: Path) -> None:
    """Every box of a rank is written to its own place, and read into its own place of the rank's tensor."""
    store(tmp_path / "stored", {FQN: whole(8)}, 3, 0)

    assert ranks.run(2, _strided_there_and_back, tmp_path / "stored", tmp_path / "ckpt") == [0.0, 0.0]
    found = {FQN: torch.zeros(8, 6, 3)}
    dcp.load(found, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert torch.equal(found[FQN], whole(8))


def test_experts_are_not_cut_to_integers(tmp_path: Path) -> None:
    """Floats that are wanted as integers are refused by name before anything is read, unless that is asked for."""
    dcp.save({"w": torch.full((4, 4), 2.5)}, checkpoint_id=tmp_path, no_dist=True)
    held = {"w": torch.zeros(2, 4, dtype=torch.int32)}
    with pytest.raises(CheckpointException, match=r"'w': stored torch\.float32, wanted torch\.int32"):
        dcp.load(held, checkpoint_id=tmp_path, planner=EPLoadPlanner({"w": SECOND_HALF}), no_dist=True)
    assert not held["w"].any()
    planner = EPLoadPlanner({"w": SECOND_HALF}, allow_dtype_cast=True)
    dcp.load(held, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert held["w"].eq(2).all()


def _dcp_globals() -> dict[str, Any]:
    """Every name in DCP's modules and in the classes that are made there."""
    found: dict[str, Any] = {}
    for module in [name for name in sys.modules if name.startswith("torch.distributed.checkpoint")]:
        for name, value in vars(sys.modules[module]).items():
            found[f"{module}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module:
                found |= {f"{module}.{name}.{inner}": held for inner, held in vars(value).items()}
    return found


def _changed(path: Path) -> list[str]:
    before = _dcp_globals()
    case, meshes = EP_FSDP[0], Meshes()
    held = state(case, meshes.of(case))
    dcp.save(held, checkpoint_id=path, planner=EPSavePlanner(layouts(case, meshes.of(case), held)))
    dcp.load(held, checkpoint_id=path, planner=EPLoadPlanner(layouts(case, meshes.of(case), held)))
    ep_rank = meshes.of(case).get_local_rank("ep")
    dcp.load(held, checkpoint_id=path, planner=compat.EPLoadPlanner(ep_rank, 2, lambda key: FQN in key))
    load(case, meshes, path)
    after = _dcp_globals()
    ours = [name for name, value in after.items() if "shardckpt" in str(getattr(value, "__module__", ""))]
    return [*ours, *(name for name, value in before.items() if after.get(name) is not value)]


def test_dcp_is_untouched(ranks: Ranks, tmp_path: Path) -> None:
    """After saves and loads of every kind all names in DCP's modules and classes are bound as before, none to ours."""
    assert ranks.run(4, _changed, tmp_path / "ckpt") == [[]] * 4


def _outside(path: Path) -> Any:
    mesh = DeviceMesh("cpu", [[2, 3]], mesh_dim_names=("efsdp", "ep"))
    held = {FQN: torch.full((4, 6, 3), -1.0)}
    given = ExpertLayout.from_local(held[FQN], mesh)
    reading = EPLoadPlanner({FQN: given})
    dcp.load(held, checkpoint_id=path, planner=reading)
    return dist.get_rank(), len(reading.create_local_plan().items), float(get_local_tensor(held[FQN]).min())


def test_ranks_outside_the_mesh_read_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """No item is planned outside the mesh, and what these ranks have stays as it is."""
    store(tmp_path / "ckpt", {FQN: whole(8)}, 1, 0)

    assert ranks.run(4, _outside, tmp_path / "ckpt") == [(0, 0, -1.0), (1, 0, -1.0), (2, 1, 1.0), (3, 1, 73.0)]


def _refused(path: Path, how: str) -> None:
    case, meshes = Case(order(("ep", 2)), kind="local"), Meshes()
    held = state(case, meshes.of(case))
    given = layouts(case, meshes.of(case), held)
    if how == "more experts":
        dcp.load(held, checkpoint_id=path, planner=EPLoadPlanner(given))
    elif how == "forgotten":
        held["model"]["layers.1.moe.experts.w1"] = torch.zeros(4, 6, 3)
        dcp.save(held, checkpoint_id=path, planner=EPSavePlanner(given))
    elif how == "absent":
        given = {**given, "other.w1": given[FQN]}
        dcp.load({"other.w1": held["model"][FQN]}, checkpoint_id=path, planner=EPLoadPlanner(given))
    elif how == "lost" and dist.get_rank() == 1:
        dcp.save({"step": torch.zeros(())}, checkpoint_id=path, planner=EPSavePlanner({}))
    elif how == "lost":
        dcp.save(held, checkpoint_id=path, planner=EPSavePlanner(given))
    else:
        held["model"][FQN] = torch.ones(4, 6, 2)
        dcp.save(held, checkpoint_id=path, planner=EPSavePlanner(given))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("more experts", r"is stored with shape \(5, 6, 3\); its layout has 8 experts"),
        ("forgotten", r"'model.layers.1.moe.experts.w1' is an expert's and has no layout: a plain tensor of shape"),
        ("absent", r"not in the checkpoint: other.w1"),
        ("lost", r"experts 4-7 of 'model.layers.0.moe.experts.w1' are described by no rank"),
        ("shape", r"'model.layers.0.moe.experts.w1': this rank's has shape \(4, 6, 2\), its layout says \(4, 6, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path, how: str, reason: str) -> None:
    """Other sizes, forgotten layouts, absent keys and lost experts are errors that name key and experts."""
    if how in ("more experts", "absent"):
        store(tmp_path / "ckpt", expected(5), 1, 0)
    for outcome in ranks.outcomes(2, _refused, tmp_path / "ckpt", how):
        assert outcome.kind == "CheckpointException"
        assert re.search(reason, outcome.message)


def _partial(path: Path) -> float:
    case, meshes = Case(order(("ep", 2)), kind="local"), Meshes()
    held = {FQN: torch.full((4, 6, 3), -1.0), "there": torch.zeros(2)}
    planner_ = EPLoadPlanner({FQN: layout(case, meshes.of(case), held[FQN])}, allow_partial_load=True)
    dcp.load(held, checkpoint_id=path, planner=planner_)
    return float(held[FQN].max() + held["there"].sum())


def test_a_partial_load_leaves_absent_experts_as_they_are(ranks: Ranks, tmp_path: Path) -> None:
    """With allow_partial_load what is not stored stays, and the rest is loaded."""
    store(tmp_path / "ckpt", {"there": torch.ones(2)}, 1, 0)

    assert ranks.run(2, _partial, tmp_path / "ckpt") == [1.0, 1.0]


def test_a_checkpoint_with_a_hole_is_corrupt() -> None:
    """Chunks that do not cover this rank's experts are an error, not uninitialised memory."""
    chunk = metadata.ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((3, 4)))
    properties = metadata.TensorProperties(dtype=torch.float32)
    stored = metadata.TensorStorageMetadata(properties, torch.Size((4, 4)), [chunk])

    with pytest.raises(CorruptCheckpointError, match=r"'w1': the checkpoint does not hold Box\(offset=\(3, 0\)"):
        expert_read_items("w1", SECOND_HALF, stored)


class _Evil:
    def __reduce__(self) -> Any:
        return (print, ("owned",))


def test_objects_are_not_unpickled_without_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A planner of ours never runs what a checkpoint's object would run; dcp.load's own would."""
    dcp.save({"object": _Evil()}, checkpoint_id=tmp_path / "ckpt", no_dist=True)

    with pytest.raises(BaseException, match=re.escape("print")) as caught:  # DCP's error is no Exception
        dcp.load({"object": None}, checkpoint_id=tmp_path / "ckpt", planner=EPLoadPlanner({}), no_dist=True)
    assert isinstance(caught.value, UnsafePickleError) or UnsafePickleError.__name__ in repr(caught.value)
    assert "owned" not in capsys.readouterr().out


def test_plain_objects_are_put_into_the_callers_nest(tmp_path: Path) -> None:
    """Numbers and text come back at their places, in lists and under keys that are no text, too."""
    held = {"a": {"lr": 0.1, 3: [torch.zeros(2), {"name": "adam"}]}}
    dcp.save(held, checkpoint_id=tmp_path / "ckpt", planner=EPSavePlanner({}), no_dist=True)
    found = {"a": {"lr": 0.0, 3: [torch.ones(2), {"name": ""}]}}
    dcp.load(found, checkpoint_id=tmp_path / "ckpt", planner=EPLoadPlanner({}), no_dist=True)

    assert found["a"]["lr"] == 0.1
    assert found["a"][3][1] == {"name": "adam"}
    assert torch.equal(found["a"][3][0], torch.zeros(2))


def test_dcps_plan_cache_is_refused() -> None:
    """One cache for all planners of a name cannot tell layouts apart."""
    with pytest.raises(CheckpointingException, match="does not take enable_plan_caching"):
        EPSavePlanner({}, enable_plan_caching=True)


def test_nested_experts_are_not_lost(tmp_path: Path) -> None:
    """Where DCP does not flatten, a dict with experts is refused: one rank's would be pickled. A flat one is saved."""
    planner = EPSavePlanner({"w": ExpertLayout((4, 4), Box((0, 0), (4, 4)))}, flatten_state_dict=False)
    with pytest.raises(CheckpointException, match=r"'model\.w' is an expert's tensor inside 'model'"):
        dcp.save({"model": {"w": torch.ones(4, 4)}}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    dcp.save({"w": torch.ones(4, 4), "list": [1]}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    found = {"w": torch.zeros(4, 4)}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["w"].all()
