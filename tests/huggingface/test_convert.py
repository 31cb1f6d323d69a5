from __future__ import annotations

import os
import re
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.engine.locations import locate_file
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    KeyMismatchError,
    StorageError,
    UnsafePickleError,
)
from shardckpt.huggingface import dcp_to_torch_save, dcp_to_torch_state_dict, save_state_dict, torch_save_to_dcp
from shardckpt.maintenance import convert_checkpoint
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.huggingface.samples import global_tensors, same, save
from tests.interop.sample import check_equal
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


def _nested_state() -> dict[str, Any]:
    return {
        "model": OrderedDict(w=torch.arange(6.0).reshape(2, 3), h=[torch.ones(1), 5, {"empty": []}]),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3).bfloat16()}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "params": [0], "foreach": None}],
        },
        "epoch": 3,
    }


@table("is_zip", [True, False])
def test_there_and_back_again(tmp_path: Path, is_zip: bool) -> None:
    """A file of torch.save, of today's or the old format, becomes a checkpoint, and the same state dict again."""
    torch.save(_nested_state(), tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    stored = dc.load_tensors_metadata(tmp_path / "c")
    assert stored.keys() == {"model.w", "model.h.0", "optimizer.state.0.step", "optimizer.state.0.exp_avg"}
    check_equal(dcp_to_torch_state_dict(tmp_path / "c"), _nested_state(), "state")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "b.pt")
    check_equal(torch.load(tmp_path / "b.pt", weights_only=True), _nested_state(), "state")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "b.pt", prefix="model.")
    assert torch.load(tmp_path / "b.pt", weights_only=True).keys() == {"w", "h.0"}
    with pytest.raises(StorageError, match="is not empty"):
        torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt", "c"]


def test_any_checkpoint_is_a_plain_state_dict(tmp_path: Path) -> None:
    """Tensors and objects by key beside the common state; plain DCP is nested; a prefix picks and is taken off."""
    objects = {
        "rng": ShardedObject("rng", {"seed": 1}, (1,), (0,)),
        "grid": [ShardedObject("grid", n, (2,), (n,)) for n in range(2)],
    }
    weight = ShardedTensor.from_rank_offsets("model.w", torch.ones(2))
    dc.save({"w": weight, **objects, "step": 7}, tmp_path / "c")
    found = dcp_to_torch_state_dict(tmp_path / "c")
    assert found.pop("model.w").tolist() == [1, 1]
    assert found == {"rng": {"seed": 1}, "grid/shard_0_2": 0, "grid/shard_1_2": 1, "step": 7}
    assert dcp_to_torch_state_dict(tmp_path / "c", prefix="model.").keys() == {"w"}
    with pytest.raises(
        KeyMismatchError, match=r"no tensor has a key that begins with 'modle\.' \(did you mean model\."
    ):
        dcp_to_torch_state_dict(tmp_path / "c", prefix="modle.")
    torch.distributed.checkpoint.save({"a": {"b": torch.ones(3)}, "n": 4}, checkpoint_id=tmp_path / "dcp")
    plain = dcp_to_torch_state_dict(tmp_path / "dcp")
    assert plain["a"]["b"].tolist() == [1, 1, 1]
    assert plain["n"] == 4


@table("key", ["lost", 7, ["w"]])
def test_a_structure_without_its_tensor_is_damage(tmp_path: Path, key: Any) -> None:
    """A checkpoint whose structure names a tensor that is not stored is an error that names it, not a KeyError."""
    structure = {"form of the state dict": {"w": {"key of the tensor": key}}}
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}, tmp_path / "c", content_metadata=structure)
    with pytest.raises(CorruptCheckpointError, match=rf"a tensor {re.escape(repr(key))}, which is not stored"):
        dcp_to_torch_state_dict(tmp_path / "c")


def test_two_things_of_one_name_are_no_plain_state_dict(tmp_path: Path) -> None:
    """A value of the common state with the key of a tensor is an error that names it, and is not lost in silence."""
    dc.save({"model": {"x": ShardedTensor.from_rank_offsets("x", torch.ones(2))}, "x": 5}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"a plain state dict has one place: x\."):
        dcp_to_torch_state_dict(tmp_path / "c")


def test_a_scheduler_resumes_from_its_counter(tmp_path: Path) -> None:
    """MultiStepLR's state has a Counter, without which a SequentialLR that resumes fails; it comes back as one."""
    state = {"scheduler": {"milestones": Counter([2, 4]), "last_epoch": 1}, "w": torch.ones(1)}
    torch.save(state, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "saved")
    convert_checkpoint(tmp_path / "a.pt", tmp_path / "converted", "safetensors")
    dc.save(to_sharded_state_dict(state), tmp_path / "described")
    for name in ("saved", "converted", "described"):
        found = dcp_to_torch_state_dict(tmp_path / name)["scheduler"]
        assert found == state["scheduler"]
        assert type(found["milestones"]) is Counter, name


def test_ranks_save_together_what_one_file_holds(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks call it, one checkpoint is there; and what ranks have saved in shards is one tensor in one process."""
    torch.save(_nested_state(), tmp_path / "a.pt")
    ranks.run(2, torch_save_to_dcp, tmp_path / "a.pt", tmp_path / "c")
    check_equal(dcp_to_torch_state_dict(tmp_path / "c"), _nested_state(), "state")
    ranks.run(3, save, tmp_path / "s")
    found = dcp_to_torch_state_dict(tmp_path / "s")
    assert all(same(found[name], tensor) for name, tensor in global_tensors().items())


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/shardckpt-evil",)


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    """What needs more than plain values is refused with the reason, without the advice to load it unsafely."""
    torch.save({"a": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UnsafePickleError, match=r"GLOBAL posix\.mkdir") as error:
        torch_save_to_dcp(tmp_path / "evil.pt", tmp_path / "c")
    assert "weights_only" not in str(error.value)
    assert not os.path.exists("/tmp/shardckpt-evil")  # noqa: PTH110
    assert not (tmp_path / "c").exists()


@table(
    ("data", "kind"),
    [(b"", CorruptCheckpointError), (b"{}", CorruptCheckpointError), (b"PK\x03\x04x", CorruptCheckpointError)],
)
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes, kind: type[CheckpointingException]) -> None:
    """What is no file of torch.save is an error that names it; so is one that is not there, or holds no dict."""
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(kind, match=r"a\.pt"):
        torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    with pytest.raises(StorageError, match="No such file"):
        torch_save_to_dcp(tmp_path / "none.pt", tmp_path / "c")
    torch.save([1], tmp_path / "a.pt")
    with pytest.raises(CheckpointingException, match="holds a list, not a state dict"):
        torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")


def test_neither_way_replaces_what_it_reads(tmp_path: Path) -> None:
    """A file of the checkpoint that is read is no target, nor is the folder of the file that is read."""
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    member = next(path for path in (tmp_path / "c").iterdir() if path.is_file())
    with pytest.raises(CheckpointingException, match="in the source"):
        dcp_to_torch_save(tmp_path / "c", member)
    with pytest.raises(CheckpointingException, match="has the source"):
        torch_save_to_dcp(tmp_path / "a.pt", tmp_path, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_file_is_one_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL of a store is refused, not taken for the name of a folder; a ``file://`` URL is a path."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    torch_save_to_dcp(f"file://{tmp_path}/a.pt", tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", f"file://{tmp_path}/b.pt")
    save_state_dict({"w": torch.ones(3)}, f"file://{tmp_path}/w.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "b.pt", "c", "w.safetensors", "work"}
    store = "s3://user:secret@bucket/b.pt"
    calls: list[Callable[[], object]] = [
        lambda: torch_save_to_dcp(store, tmp_path / "d"),
        lambda: dcp_to_torch_save(tmp_path / "c", store),
        lambda: save_state_dict({"w": torch.ones(3)}, store),
        lambda: locate_file(store, "write a page to"),
    ]
    for call in calls:
        with pytest.raises(
            CheckpointingException, match=r"s3://user:\*\*\*@bucket/b\.pt: it takes a file of this machine"
        ):
            call()
    assert not list((tmp_path / "work").iterdir())


def test_a_file_of_something_else_stays(tmp_path: Path) -> None:
    """A file of the same kind is replaced, also an empty one; a program, of a mistyped name, is not."""
    save(tmp_path / "c")
    state, path = {"w": torch.ones(3)}, tmp_path / "train.py"
    writers: list[tuple[Callable[[], object], str]] = [
        (lambda: dcp_to_torch_save(tmp_path / "c", path), r"torch\.save"),
        (lambda: save_state_dict(state, path, safe_serialization=False), r"torch\.save"),
        (lambda: save_state_dict(state, path), "safetensors"),
    ]
    for write, kind in writers:
        path.write_bytes(b"")
        write()
        write()
        path.write_bytes(b"print('train')")
        with pytest.raises(CheckpointingException, match=rf"train\.py is no file of {kind}, and it would be replaced"):
            write()
        assert path.read_bytes() == b"print('train')"


def test_a_file_of_the_right_name_is_replaced_whatever_it_is(tmp_path: Path) -> None:
    """Pointers of Git LFS, as in a clone without large files, and zeros, as after a power cut, are not others."""
    for name, content in (
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("model.bin", bytes(64)),
    ):
        (tmp_path / name).write_bytes(content)
        save_state_dict({"w": torch.ones(3)}, tmp_path / name, safe_serialization=name.endswith("s"))
        assert (tmp_path / name).stat().st_size > 64


def test_a_directory_is_no_file_and_none_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are errors that say so, before anything is written; the current directory, too."""
    save(tmp_path / "c")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    state = {"w": torch.ones(3)}
    for place in (tmp_path / "work", "."):
        for write in (lambda at: dcp_to_torch_save(tmp_path / "c", at), lambda at: save_state_dict(state, at)):
            with pytest.raises(StorageError, match="is a directory: give the name of a file"):
                write(place)
    wrong: Any
    for wrong in (None, b"a.pt", 3):
        calls: list[Callable[[], object]] = [
            lambda wrong=wrong: dcp_to_torch_save(tmp_path / "c", wrong),
            lambda wrong=wrong: torch_save_to_dcp(wrong, tmp_path / "d"),
            lambda wrong=wrong: dc.remove_sharded_tensors(wrong, "w"),
        ]
        for call in calls:
            with pytest.raises(CheckpointingException, match=r"in the place of a (checkpoint|file)'s path or URL"):
                call()
    assert not list((tmp_path / "work").iterdir())
