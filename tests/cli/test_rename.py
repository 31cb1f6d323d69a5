"""``--rename OLD=NEW``: checkpoints of other trainers by our names, in each verb that reads values."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import KeyMismatchError
from shardckpt.maintenance.sources import open_any
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.cli.checkpoints import copy_golden
from tests.interop.sample import check_equal
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

_RENAMES = ["--rename", "app.model=model", "--rename", "app.optim=optimizer", "--rename", "app.seen=seen"]


def _save_app(path: Path, value: float = 1.0) -> Path:
    """Save a plain DCP folder as torch's tutorial does: all is inside ``app``."""
    model = {"layer.weight": torch.full((2, 3), value)}
    optim = {"state": {"layer.weight": {"exp_avg": torch.full((2, 3), value + 1)}}, "param_groups": [{"lr": 0.1}]}
    dcp.save({"app": {"model": model, "optim": optim, "seen": 7}}, checkpoint_id=path, no_dist=True)
    return path


def _save_own(path: Path, backend: str, *, first: str = "model", other: str = "optim", **options: Any) -> Path:
    """Save a checkpoint of ours with a tensor, an object and an entry of the common state under each of two names."""
    state: dict[str, Any] = {}
    for number, name in enumerate((first, other)):
        key = f"{name}.weight"
        state[key] = ShardedTensor.from_rank_offsets(key, torch.full((4,), float(number)))
        state[f"{name}.extra"] = ShardedObject(f"{name}.extra", {"number": number}, (1,), (0,))
        state[name] = {"lr": number}
    dc.save(state, path, backend, **options)
    return path


def _inspect(capsys: pytest.CaptureFixture[str], *call: str) -> dict[str, Any]:
    assert main(["inspect", *call, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_folder_of_a_tutorial_is_read_by_our_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors and values of a plain DCP folder have their new names in inspect, and its values are printed by these."""
    path = str(_save_app(tmp_path / "app"))
    found = _inspect(capsys, path, *_RENAMES)
    keys = [tensor["key"] for tensor in found["tensors"]]
    assert keys == ["model.layer.weight", "optimizer.state.layer.weight.exp_avg"]
    assert {name.partition(".")[0] for name in found["common"]} == {"optimizer", "seen"}
    assert main(["inspect", path, "model.layer.weight[0, 0]", *_RENAMES]) == 0


@pytest.mark.parametrize("target", ["torch_dist", "safetensors", "dcp", "torch"])
def test_what_convert_writes_has_the_new_names(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    """Tensors and values of DST have the new names and the old bits, in checkpoints and in a file of torch.save."""
    path, new = str(_save_app(tmp_path / "app")), str(tmp_path / "new")
    assert main(["convert", path, new, "--to", target, *_RENAMES]) == 0, capsys.readouterr().err
    with open_any(new) as stored:
        assert sorted(stored) == ["model.layer.weight", "optimizer.state.layer.weight.exp_avg"]
        assert torch.equal(stored["model.layer.weight"][:], torch.ones(2, 3))
        assert stored.common["seen"] == 7
        assert "app" not in stored.common
    assert main(["diff", path, new, *_RENAMES]) == 0, capsys.readouterr().out


def test_a_file_of_torch_save_is_nested_by_the_new_names(tmp_path: Path) -> None:
    """``convert --to torch --rename`` of plain DCP writes the nested state dict at its new places."""
    assert main(["convert", str(_save_app(tmp_path / "app")), str(tmp_path / "a.pt"), "--to", "torch", *_RENAMES]) == 0
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    moments = {"exp_avg": torch.full((2, 3), 2.0)}
    optimizer = {"state": {"layer.weight": moments}, "param_groups": [{"lr": 0.1}]}
    check_equal(found, {"model": {"layer.weight": torch.ones(2, 3)}, "optimizer": optimizer, "seen": 7}, "state")


def test_a_converted_folder_loads_in_stock_dcp_by_the_new_names(tmp_path: Path) -> None:
    """``convert --to dcp --rename`` writes the values for stock DCP under the new paths as well."""
    assert main(["convert", str(_save_app(tmp_path / "app")), str(tmp_path / "new"), "--to", "dcp", *_RENAMES]) == 0
    state = {"model": {"layer.weight": torch.zeros(2, 3)}, "seen": 0}
    dcp.load(state, checkpoint_id=tmp_path / "new", no_dist=True)
    assert state["seen"] == 7
    assert torch.equal(state["model"]["layer.weight"], torch.ones(2, 3))  # type: ignore[index]


@pytest.mark.parametrize("backend", ["torch_dist", "safetensors"])
def test_objects_and_common_state_are_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    """ShardedObjects and entries of the common state follow the tensors, and the values are those that were saved."""
    path, new = str(_save_own(tmp_path / "c", backend)), str(tmp_path / "new")
    assert main(["convert", path, new, "--to", "ep", "--rename", "optim=optimizer"]) == 0, capsys.readouterr().err
    with open_any(new) as stored:
        assert sorted(stored) == ["model.weight", "optimizer.weight"]
        assert [name.partition("/")[0] for name in sorted(stored.objects)] == ["model.extra", "optimizer.extra"]
        assert stored.read_object(sorted(stored.objects)[1]) == {"number": 1}
        assert (stored.common["optimizer"], stored.common["model"]) == ({"lr": 1}, {"lr": 0})


def test_stored_fingerprints_follow_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two names that change places change the fingerprints by which diff compares, too: it finds no difference."""
    first = str(_save_own(tmp_path / "a", "torch_dist", first="one", other="two", fingerprints=True))
    second = str(_save_own(tmp_path / "b", "torch_dist", first="two", other="one", fingerprints=True))
    assert main(["diff", first, second]) == 1
    assert main(["diff", first, second, "--rename", "one=two", "--rename", "two=one"]) == 0
    assert "2 of 2 tensors are equal, 2 of them by their stored fingerprints" in capsys.readouterr().out


def test_export_and_merge_read_by_the_new_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model inside ``app`` is exported without its optimizer, and two of them are merged under its name."""
    one, other = str(_save_app(tmp_path / "one")), str(_save_app(tmp_path / "other", 3.0))
    assert main(["export", one, str(tmp_path / "hf"), *_RENAMES]) == 0, capsys.readouterr().err
    with open_any(tmp_path / "hf") as stored:
        assert sorted(stored) == ["layer.weight"]
    assert main(["merge", one, other, str(tmp_path / "soup"), *_RENAMES]) == 0, capsys.readouterr().err
    with open_any(tmp_path / "soup") as stored:
        assert torch.equal(stored["model.layer.weight"][:], torch.full((2, 3), 2.0))


def test_a_missing_file_is_named_with_the_new_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inspect of a renamed folder finds the files that are gone, and the tensors of them by their new names."""
    path = _save_own(tmp_path / "c", "torch_dist")
    next(path.glob("*.distcp")).unlink()
    assert main(["inspect", str(path), "--rename", "model=net"]) == 1
    said = capsys.readouterr().out
    assert "damaged: " in said
    assert "net.weight" in said.rpartition("damaged: ")[2]


@table(
    ("common", "renames", "expected"),
    [
        # a way through a value, which comes before or after it
        ({"cfg": {"a": {"b": 1, "c": 2}}}, ["cfg.a.b=cfg.a.c.d"], None),
        ({"cfg": {"a": {"c": 2, "b": 1}}}, ["cfg.a.b=cfg.a.c.d"], None),
        # two values of one dotted path
        ({"args": {"a": {"b": 1}, "a.b": 2}}, ["args.a=args.z"], None),
        # what is moved into a dict that is moved, too
        (
            {"one": {"p": 1, "q": {"r": 2}}, "two": {"x": {"s": 3}}},
            ["one.q.r=new.x.r", "two=new"],
            {"one": {"p": 1}, "new": {"x": {"r": 2, "s": 3}}},
        ),
    ],
)
def test_no_value_of_the_common_state_is_lost(
    tmp_path: Path, common: dict[str, Any], renames: list[str], expected: dict[str, Any] | None
) -> None:
    """Values whose new places meet are all there, or an error says that two would have one name."""
    dc.save(common, tmp_path / "c")
    rename = dict(each.split("=") for each in renames)
    if expected is None:
        with pytest.raises(KeyMismatchError, match="rename: "), open_any(tmp_path / "c", rename=rename) as stored:
            assert stored.common
        return
    with open_any(tmp_path / "c", rename=rename) as stored:
        assert stored.common == expected


@table(
    ("rename", "keys", "common"),
    [
        ("=all", ["all.model.weight", "all.optim.weight"], {"all": {"model": {"lr": 0}, "optim": {"lr": 1}}}),
        ("optim=", None, "the checkpoint has model.weight"),
        ("optim.weight=", None, "'optim.weight' is a whole key"),
    ],
)
def test_names_may_be_empty(tmp_path: Path, rename: str, keys: list[str] | None, common: Any) -> None:
    """``=NEW`` puts all below NEW, ``OLD=`` takes OLD away: not where that leaves two names for one, or none."""
    path = _save_own(tmp_path / "c", "torch_dist")
    names = dict([rename.split("=")])
    if keys is None:
        with pytest.raises(KeyMismatchError, match=common), open_any(path, rename=names):
            pass
        return
    with open_any(path, rename=names) as stored:
        assert (sorted(stored), stored.common) == (keys, common)


def test_a_prefix_of_all_is_taken_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--rename app=`` reads what is inside ``app`` as if it were at the top, common state too."""
    dc.save({"app": {"step": 3}, "w": ShardedTensor.from_rank_offsets("app.w", torch.ones(2))}, tmp_path / "c")
    found = _inspect(capsys, str(tmp_path / "c"), "--rename", "app=")
    assert ([tensor["key"] for tensor in found["tensors"]], found["common"]) == (["w"], ["step"])


@table("damage", ["missing", "cut"])
def test_what_is_damaged_is_listed_by_other_names_too(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the common state cannot be read, keys are renamed and listed; the exit code is 1, as without renames."""
    path = copy_golden("0.16.1", tmp_path)
    if damage == "missing":
        (path / "common.pt").unlink()
    else:
        os.truncate(path / "common.pt", 99)
    for renames in ([], ["--rename", "decoder=net"]):
        assert main(["inspect", str(path), *renames]) == 1
        out = capsys.readouterr().out
        assert ("net.final_layernorm.weight" in out) == bool(renames)
        assert "the common state cannot be read: " in out
    assert main(["inspect", str(path), "--rename", "nosuch=net"]) == 2
    assert "common.pt" in capsys.readouterr().err
