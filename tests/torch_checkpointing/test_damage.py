"""Damaged and hostile directories of torch_checkpointing are errors by name; nothing in them runs."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError, VersionTooNewError
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.damage import flip
from tests.ranks import RankError, Ranks
from tests.tables import table
from tests.torch_checkpointing.golden import GOLDEN, SHAPES, Training, copy_golden, values

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Touch:
    """A pickle of it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.path)!r}, 'w')",))


class Custom:
    """A class that no allow-list has."""

    def __init__(self) -> None:
        self.value = 5


def load_weight(folder: Path, **more: Any) -> Any:
    """Load one tensor and the common state."""
    wanted = {"w": ShardedTensor.from_rank_offsets("model.0.weight", torch.zeros(8, 6))}
    return dist_checkpointing.load(wanted, folder, **more)


def edit_metadata(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the metadata as its writer could have written it."""
    metadata = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(metadata)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return folder


def declared(metadata: dict[str, Any], path: str = '["0.weight"]') -> dict[str, Any]:
    """Return how the metadata describes a tensor."""
    group = metadata["metadata"]["model"]["nested_path_to_metadata"][path][0]
    return group["sharding_metadata"]["data"]  # type: ignore[no-any-return]


def cut_file(folder: Path, name: str) -> None:
    """Cut the end of a file."""
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


def flip_byte(folder: Path, name: str) -> None:
    """Change a byte of the first storage of an archive."""
    with zipfile.ZipFile(folder / name) as archive:
        member = archive.getinfo(next(info for info in archive.namelist() if info.endswith("data/0")))
        start = (folder / name).read_bytes().index(archive.read(member), member.header_offset)
    flip(folder / name, start)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut model": (lambda folder: cut_file(folder, "model_1.pt"), r"model_1\.pt"),
    "cut optimizer": (lambda folder: cut_file(folder, "optimizer_0.pt"), r"optimizer_0\.pt"),
    "cut metadata": (lambda folder: cut_file(folder, "metadata.pkl"), r"metadata\.pkl"),
    "cut JSON": (lambda folder: (folder / "step_0.json").write_text("{"), r"step_0\.json"),
    "an optimizer of other types": (
        lambda folder: (folder / "step_0.json").write_text(
            '{"state": {}, "param_groups": [{"params": 5, "param_names": ["a"]}]}'
        ),
        r"step_0\.json is damaged: 'int' object is not iterable",
    ),
    "two keys of one text": (
        lambda folder: torch.save({True: torch.ones(2), "True": torch.zeros(2)}, folder / "more_0.pt"),
        r"more_0\.pt: two values have the key 'more\.True'",
    ),
    "no model of a rank": (lambda folder: (folder / "model_1.pt").unlink(), r"model_1\.pt"),
    "model of another rank": (
        lambda folder: shutil.copy(folder / "lr_scheduler_0.pt", folder / "model_1.pt"),
        "has no",
    ),
    "a list as metadata": (lambda folder: (folder / "metadata.pkl").write_bytes(pickle.dumps([1])), r"metadata\.pkl"),
}
METADATA: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no world size": (lambda m: m.pop("world_size"), "world_size"),
    "no ranks": (lambda m: m.update(world_size=0), "0 ranks does not exist"),
    "other ranks": (lambda m: m.update(world_size=3), "files of 2 ranks"),
    "other shape": (lambda m: declared(m).update(global_shape=[80, 6]), r"model\.0\.weight': stored \(80, 6\)"),
    "another cut": (
        lambda m: declared(m).update(placements=[{"type": "Shard", "dim": 1}]),
        r"model_0\.pt: 'model\.0\.weight' is of torch\.float32 and shape \(4, 6\), and .* says .* \(8, 3\)",
    ),
    "copies": (
        lambda m: declared(m).update(placements=[{"type": "Replicate"}]),
        r"model_0\.pt: 'model\.0\.weight' is of torch\.float32 and shape \(4, 6\)",
    ),
    "other dtype": (
        lambda m: declared(m).update(dtype="torch.float64"),
        r"model_0\.pt: 'model\.0\.weight' is of torch\.float32",
    ),
    "unknown dtype": (lambda m: declared(m).update(dtype="os"), "no dtype 'os'"),
    "an axis too many": (lambda m: declared(m).update(placements=[{"type": "Shard", "dim": 2}]), "splits axis 2"),
    "a bomb of blocks": (
        lambda m: declared(m).update(placements=[{"type": "StridedShard", "dim": 0, "split_factor": 1 << 60}]),
        "more than 4,194,304 boxes",
    ),
    "a file elsewhere": (lambda m: place(m, "../model_0.pt"), r"file name '\.\./model_0\.pt' is not allowed"),
    "a folder": (lambda m: place(m, "a/model_0.pt"), r"cannot open .*a/model_0\.pt"),
    "an unknown format": (lambda m: place(m, "model_0.pt", "Zip"), "unknown serialization format 'zip'"),
}


def place(metadata: dict[str, Any], name: str, form: str = "TorchSerialization") -> None:
    """Let the metadata say that the first rank's model is in a file of a form."""
    entry = {"file_path": name, "serialization_format": {"type": form}}
    metadata["metadata"]["model"]["rank_to_layout_info"].update({0: entry})


@table("name", [*FILES, *METADATA])
def test_damage_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    """A cut, missing or contradicting file is an error with its name, never a wrong value."""
    folder = copy_golden("torch-2", tmp_path / "step")
    if name in FILES:
        damage, text = FILES[name]
        damage(folder)
    else:
        change, text = METADATA[name]
        edit_metadata(folder, change)
    with pytest.raises(CheckpointingException, match=text):
        load_weight(folder)


def _replace_in_archive(path: Path, old: bytes, new: bytes) -> None:
    """Write an archive anew with other bytes in its members, and their CRC-32."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(old, new))


def test_a_mesh_that_is_described_otherwise_needs_the_metadata(tmp_path: Path) -> None:
    """DTensors of other versions of torch load by the metadata; without it the error says what is missing."""
    folder = copy_golden("torch-2", tmp_path / "step")
    for rank in range(2):
        _replace_in_archive(folder / f"model_{rank}.pt", b"_coordinate_on_dim", b"_coordinate_in_dim")
    assert torch.equal(load_weight(folder)["w"], values("0.weight"))
    (folder / "metadata.pkl").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"model_0\.pt.* describes its mesh otherwise \(KeyError"):
        load_weight(folder)


def resume(folder: Path) -> None:
    """Load model and optimizer."""
    training = Training()
    dist_checkpointing.load(to_sharded_state_dict(training.model, training.optimizer), folder)


def test_damage_is_the_same_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """A cut file of one rank ends the load of all, in whatever order they read."""
    folder = copy_golden("mesh-4", tmp_path / "step-7")
    cut_file(folder, "optimizer_3.pt")
    with pytest.raises(RankError, match=r"(?s)optimizer_3\.pt.*rank 1.*CorruptCheckpointError.*optimizer_3\.pt"):
        ranks.run(2, resume, folder)


def test_an_unlisted_file_of_a_rank_is_missed(tmp_path: Path) -> None:
    """Without metadata, the boxes of the other ranks show that a file is missing."""
    folder = copy_golden("unlisted-2", tmp_path / "step")
    (folder / "model_1.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match="the file of a rank is missing"):
        load_weight(folder)
    folder = copy_golden("mesh-4", tmp_path / "step-4")
    (folder / "loader_3.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"loader_3\.pt is missing: 4 ranks saved"):
        load_weight(folder)


def test_a_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Metadata of a later version is an error with the way out."""
    folder = edit_metadata(copy_golden("torch-2", tmp_path / "step"), lambda m: m.update(version="3.0"))
    with pytest.raises(VersionTooNewError, match=r"version '3\.0'; this reader knows 1\.0 and 2\.0"):
        load_weight(folder)


def test_metadata_of_version_1_is_read(tmp_path: Path) -> None:
    """The older form lists paths with the item's key in front, and the files by rank."""

    def downgrade(metadata: dict[str, Any]) -> None:
        items = metadata.pop("metadata")
        del metadata["version"]
        metadata["metadata"] = {
            json.dumps([key, *json.loads(path)]): groups
            for key, item in items.items()
            for path, groups in item["nested_path_to_metadata"].items()
        }
        metadata["rank_to_layout_info_mappings"] = {
            str(rank): {key: item["rank_to_layout_info"][rank] for key, item in items.items()} for rank in range(2)
        }

    folder = edit_metadata(copy_golden("safetensors-2", tmp_path / "step"), downgrade)
    assert torch.equal(load_weight(folder)["w"], values("0.weight"))


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    """Metadata or an item that names a function is refused with the name; torch_checkpointing would run it."""
    mark = tmp_path / "mark"
    folder = copy_golden("torch-2", tmp_path / "a")
    (folder / "metadata.pkl").write_bytes(pickle.dumps(Touch(mark)))
    with pytest.raises(UnsafePickleError, match=r"metadata\.pkl.*asks for builtins\.exec"):
        load_weight(folder)
    folder = copy_golden("torch-2", tmp_path / "b")
    torch.save({"0.weight": Touch(mark)}, folder / "model_0.pt")
    with pytest.raises(UnsafePickleError, match=r"model_0\.pt.*asks for builtins\.exec"):
        load_weight(folder)
    layouts = copy_golden("torch-2", tmp_path / "c")
    entry = {"file_path": "step_0.json", "serialization_format": {"type": "JsonSerialization", "cls": "os.system"}}
    edit_metadata(layouts, lambda m: m["metadata"]["model"]["rank_to_layout_info"].update({0: entry}))
    with pytest.raises(CorruptCheckpointError, match=r"step_0\.json has no tensor 'model\.0\.weight'"):
        load_weight(layouts)
    assert not mark.exists()


def test_a_class_can_be_allowed(tmp_path: Path) -> None:
    """An item with an object of the user's loads after the class is allowed, as the error says."""
    folder = copy_golden("torch-2", tmp_path / "step")
    for rank in range(2):
        torch.save({"custom": Custom()}, folder / f"extra_{rank}.pt")
    with pytest.raises(UnsafePickleError, match=r"Custom, which is not on the allow-list.*allow_globals=\[Custom\]"):
        load_weight(folder)
    wanted = {"extra": ShardedObject("extra.custom", None, (1,), (0,))}
    assert dist_checkpointing.load(wanted, folder, allow_globals=[Custom])["extra"].value == 5
    with dist_checkpointing.open_checkpoint(folder, allow_globals=[Custom]) as checkpoint:
        assert checkpoint.find_incomplete_files() == []


def test_bombs_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    """Parts that repeat themselves, and tensors larger than their bytes, are refused."""
    folder = copy_golden("torch-1", tmp_path / "a")
    nested: Any = [[0]] * 2
    for _ in range(64):
        nested = [nested] * 2
    torch.save(nested, folder / "bomb_0.pt")
    with pytest.raises(CorruptCheckpointError, match=r"bomb_0\.pt.*repeats its own parts too often"):
        load_weight(folder)
    folder = copy_golden("torch-1", tmp_path / "b")
    torch.save({"state": torch.zeros(1).expand(1 << 40)}, folder / "bomb_0.pt")
    with pytest.raises(CorruptCheckpointError, match=r"bomb_0\.pt.*has only 4 bytes"):
        load_weight(folder)
    folder = copy_golden("torch-1", tmp_path / "c")
    shared = torch.zeros(1 << 16)
    torch.save({str(n): shared for n in range(1 << 12)}, folder / "bomb_0.pt")
    with pytest.raises(CorruptCheckpointError, match="'bomb' has tensors of 1,073,741,824 bytes, and all files have"):
        dist_checkpointing.load({"bomb": ShardedObject("bomb", None, (1,), (0,))}, folder)


def test_views_and_small_expanded_tensors_load(tmp_path: Path) -> None:
    """Transposed, strided and expanded tensors and conjugates have their values, slice by slice."""
    folder = copy_golden("torch-1", tmp_path / "step")
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    views = {
        "transposed": base.T,
        "strided": base[1:, ::2],
        "expanded": base[0].expand(3, 6),
        "conjugate": torch.complex(base, base).conj(),
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base[2:]),
        "integers": {0: base[3], 7: base[2]},
    }
    torch.save(views, folder / "views_0.pt")
    with dist_checkpointing.open_checkpoint(folder) as checkpoint:
        for name in ("transposed", "strided", "expanded", "conjugate", "empty", "parameter"):
            stored: Any = views[name]
            assert torch.equal(checkpoint[f"views.{name}"][:2, 1:], stored[:2, 1:].resolve_conj()), name
    loaded = dist_checkpointing.load({"views": ShardedObject("views", None, (1,), (0,))}, folder)["views"]
    assert list(loaded["integers"]) == [0, 7]
    assert torch.equal(loaded["integers"][7], base[2])


@table("name", ["torch-1", "torch-2", "safetensors-2", "unlisted-2", "mesh-4", "stages-4", "boxes-2"])
def test_verify_finds_no_fault_in_what_was_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``shardckpt verify`` reports intact without digests, and ``inspect`` lists the tensors."""
    assert main(["verify", str(GOLDEN / name)]) == 0
    assert main(["inspect", str(GOLDEN / name)]) == 0
    expected = ["model.w"] if name == "boxes-2" else [f"model.{key}" for key in SHAPES]
    text = capsys.readouterr().out
    assert all(key in text for key in expected)


@table("file", ["model_1.pt", "optimizer_0.pt", "train_state_1.pt"])
def test_verify_finds_a_changed_byte(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The archives have a CRC-32 of each tensor: verify compares it, and names the file."""
    folder = copy_golden("mesh-4", tmp_path / "step")
    flip_byte(folder, file)
    assert main(["verify", str(folder)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "do not have the CRC-32" in line]
    assert len(lines) == 1
    assert lines[0].startswith(file)


def test_verify_finds_a_lost_and_a_cut_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor that a file lacks, and a file that is cut, are faults of the file."""
    folder = copy_golden("safetensors-2", tmp_path / "step")
    tensors = safetensors.torch.load_file(folder / "model_1.safetensors")
    del tensors["2.bias"]
    safetensors.torch.save_file(tensors, folder / "model_1.safetensors")
    assert main(["verify", str(folder)]) == 1
    assert "has no tensor 'model.2.bias'" in capsys.readouterr().out
    cut_file(folder, "model_0.safetensors")
    (folder / "optimizer_1.pt").unlink()
    assert main(["verify", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    for name in ("model_0.safetensors", "optimizer_1.pt"):
        assert any(line.startswith(name) and "its structure is valid" not in line for line in lines), name
    with dist_checkpointing.open_checkpoint(copy_golden("torch-2", tmp_path / "other")) as checkpoint:
        (tmp_path / "other" / "model_1.pt").unlink()
        (file,) = checkpoint.find_incomplete_files()
    assert file.name == "model_1.pt"
    assert "model.0.weight" in file.keys


def test_json_is_utf_8(tmp_path: Path) -> None:
    """What another encoding has written is damage: a file does not choose the codec that reads it."""
    folder = copy_golden("torch-2", tmp_path / "step")
    for encoding in ("utf-16", "utf-32-be"):
        (folder / "step_0.json").write_bytes("7".encode(encoding))
        with pytest.raises(CorruptCheckpointError, match=r"step_0\.json is damaged"):
            dist_checkpointing.load_common_state_dict(folder)
