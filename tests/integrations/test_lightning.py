from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.errors import CannotLoadError, CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import diff
from tests.integrations import small

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

pytest.importorskip("lightning")
from shardckpt.integrations.lightning import ShardedCheckpointIO
from tests.integrations.lightning import fit
from tests.tables import table

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*is deprecated:FutureWarning",  # Lightning, of torch's
    "ignore:.*does not have many workers",
    "ignore:.*is smaller than the logging interval",
    "ignore:.*exists and is not empty",
)


@table("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_resumed_training_is_the_uninterrupted_one(package: str, tmp_path: Path) -> None:
    """Stopped in an epoch and resumed by ckpt_path, a Trainer of either package ends with the same weights."""
    whole = fit(package, tmp_path / "whole", 9)
    fit(package, tmp_path / "parts", 3)
    resumed = fit(package, tmp_path / "parts", 9, str(tmp_path / "parts" / "step=3.ckpt"))
    assert small.is_equal(resumed, whole)
    assert not small.is_equal(fit(package, tmp_path / "less", 6), whole)
    assert dist_checkpointing.check_is_distributed_checkpoint(tmp_path / "parts" / "step=9.ckpt")


def test_any_nest_comes_back_as_it_was(tmp_path: Path) -> None:
    """Tensors between other values in lists, tuples, keys of all kinds, empty containers: all as they were saved."""
    nest = {
        "state_dict": OrderedDict({"a.weight": torch.randn(3, 2), "a.bias": torch.tensor(1, dtype=torch.int8)}),
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {"best": torch.tensor(0.5), "path": "x/y.ckpt", "none": None}
        },
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "betas": (0.9, 0.999)}, []],
        "mixed": [torch.zeros(2), 1, torch.empty(0), "text", torch.ones(1, dtype=torch.bfloat16)],
        "hyper_parameters": {"lr": 0.1, 3: None},
    }
    saver = ShardedCheckpointIO()
    saver.save_checkpoint(nest, tmp_path / "a.ckpt")
    loaded = saver.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert diff(loaded, nest) == ([], [], [])
    assert type(loaded["state_dict"]) is OrderedDict
    assert loaded["mixed"][4].dtype == torch.bfloat16
    assert list(loaded) == list(nest)
    assert dist_checkpointing.load_plain_tensors(tmp_path / "a.ckpt")["lightning.state_dict.a.weight"].shape == (3, 2)
    assert saver.load_checkpoint(tmp_path / "a.ckpt", map_location="meta")["mixed"][0].is_meta


def test_tensors_in_tuples_are_loaded_to_the_device(tmp_path: Path) -> None:
    """map_location is for every tensor, wherever it is; a device that torch does not know is an error."""
    saver = ShardedCheckpointIO()
    saver.save_checkpoint({"pair": (torch.ones(2), [(torch.ones(3),), 1]), "size": torch.Size([2])}, tmp_path / "a")
    loaded = saver.load_checkpoint(tmp_path / "a", map_location="meta")
    assert loaded["pair"][0].is_meta
    assert loaded["pair"][1][0][0].is_meta
    assert loaded["size"] == torch.Size([2])
    with pytest.raises(CheckpointingException, match="map_location='gpu' is not supported"):
        saver.load_checkpoint(tmp_path / "a", map_location="gpu")


def test_other_classes_of_tuples_are_loaded_as_they_are(tmp_path: Path) -> None:
    """With map_location the tensors of named tuples are moved; other subclasses of tuple are not built anew."""
    saver = ShardedCheckpointIO(allow_globals=[Named, Interval])
    saver.save_checkpoint({"named": Named(torch.ones(2), 1), "interval": Interval(2, 5)}, tmp_path / "a")
    loaded = saver.load_checkpoint(tmp_path / "a", map_location="meta")
    assert type(loaded["named"]) is Named
    assert loaded["named"].values.is_meta
    assert (type(loaded["interval"]), loaded["interval"]) == (Interval, (2, 5))


class Named(NamedTuple):
    """Has a tensor in it."""

    values: torch.Tensor
    count: int


class Interval(tuple[int, int]):
    """Is not built of one iterable, as a tuple is."""

    __slots__ = ()

    def __new__(cls, *ends: int) -> Self:
        """Take two numbers, and pickle as them."""
        start, end = ends
        return super().__new__(cls, (start, end))

    def __reduce__(self) -> tuple[type, tuple[int, ...]]:
        """Name the ends."""
        return Interval, tuple(self)


def test_a_save_replaces_or_changes_nothing(tmp_path: Path) -> None:
    """A second save to a path replaces the first in one step; one that fails leaves it as it was, and no rubbish."""
    saver = ShardedCheckpointIO()
    for value in (1.0, 2.0):
        saver.save_checkpoint({"w": torch.tensor([value])}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointingException, match="Unknown"):
        saver.save_checkpoint({"w": torch.tensor([3.0]), "x": Unknown()}, tmp_path / "last.ckpt")
    assert saver.load_checkpoint(tmp_path / "last.ckpt")["w"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


class Unknown:
    """A class that nobody has allowed."""


def test_classes_that_are_allowed_come_back(tmp_path: Path) -> None:
    """Hyperparameters of a class that both sides allow are stored."""
    saver = ShardedCheckpointIO(allow_globals=[Unknown])
    saver.save_checkpoint({"hyper_parameters": {"x": Unknown()}}, tmp_path / "a.ckpt")
    assert type(saver.load_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"]["x"]) is Unknown
    with pytest.raises(CheckpointingException, match="allow_globals"):
        ShardedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")


def test_a_trainer_removes_what_it_no_longer_keeps(tmp_path: Path) -> None:
    """With save_top_k the checkpoints before go, and nothing is left of them."""
    fit("lightning.pytorch", tmp_path, 9, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step=9.ckpt"]


def test_only_its_own_checkpoints_are_removed(tmp_path: Path) -> None:
    """Other files, folders and checkpoints are refused and stay; of a link the link goes."""
    saver = ShardedCheckpointIO()
    (tmp_path / "old.ckpt").write_bytes(b"torch.save's")
    (tmp_path / "folder").mkdir()
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path / "other")
    saver.save_checkpoint({"w": torch.ones(1)}, tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    for name, error in (("old.ckpt", CannotLoadError), ("folder", CannotLoadError), ("other", CheckpointingException)):
        with pytest.raises(error):
            saver.remove_checkpoint(tmp_path / name)
    saver.remove_checkpoint(tmp_path / "last.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"old.ckpt", "folder", "other", "a.ckpt"}
    saver.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    """Storage options, a function as map_location, and a checkpoint of another's hand are errors that say so."""
    saver = ShardedCheckpointIO()
    with pytest.raises(CheckpointingException, match="storage_options"):
        saver.save_checkpoint({}, tmp_path / "a.ckpt", {"key": 1})
    with pytest.raises(CheckpointingException, match="map_location"):
        saver.load_checkpoint(tmp_path / "a.ckpt", map_location={"cpu": "cuda"})  # type: ignore[arg-type]
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path / "other")
    with pytest.raises(CheckpointingException, match="not one that a ShardedCheckpointIO has saved"):
        saver.load_checkpoint(tmp_path / "other")


def test_lightnings_background_saves_wrap_it(tmp_path: Path) -> None:
    """AsyncCheckpointIO around it writes the same checkpoints from its thread."""
    wrapper = importlib.import_module("lightning.pytorch.plugins.io").AsyncCheckpointIO(ShardedCheckpointIO())
    whole = fit("lightning.pytorch", tmp_path / "a", 6, plugins=[wrapper])
    loaded = ShardedCheckpointIO().load_checkpoint(tmp_path / "a" / "step=6.ckpt")
    assert small.is_equal({name.removeprefix("model."): w for name, w in loaded["state_dict"].items()}, whole)
