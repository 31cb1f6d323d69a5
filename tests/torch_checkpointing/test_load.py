"""Whole checkpoints of torch_checkpointing resume here at any number of ranks."""

from __future__ import annotations

import pickle
import shutil
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.errors import CannotLoadError, IncompleteCheckpointError, KeyMismatchError, ShardingError
from shardckpt.huggingface import export_to_huggingface
from shardckpt.manager import PerRank
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.strategy import LoadContext
from tests.interop.stock import Kept
from tests.ranks import RankError, Ranks
from tests.tables import table
from tests.torch_checkpointing.golden import (
    GOLDEN,
    SHAPES,
    STEP,
    TRAININGS,
    Training,
    copy_golden,
    resume_by_adapters,
    resume_by_manager,
    values,
)

if TYPE_CHECKING:
    from pathlib import Path

EACH_TRAINING = pytest.mark.parametrize("name", TRAININGS)
EACH_WORLD = pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.ci), 4])


def resume_a_loader(folder: Path, state: Any) -> None:
    """Load the data loader as a state of the given kind."""
    training = Training()
    with training.manager(folder, loader=state) as manager:
        manager.load()


@EACH_TRAINING
@EACH_WORLD
def test_a_manager_resumes_all_states(ranks: Ranks, tmp_path: Path, name: str, world: int) -> None:
    """Model, optimizer, schedule, progress and loaders come back, whatever the layout and the form of the optimizer."""
    copy_golden(name, tmp_path / f"step-{STEP}")
    ranks.run(world, resume_by_manager, tmp_path, TRAININGS[name])


@EACH_TRAINING
@EACH_WORLD
def test_the_readmes_recipe_resumes(ranks: Ranks, name: str, world: int) -> None:
    """``load`` and ``load_into`` restore parameters, moments, learning rates and the schedule."""
    ranks.run(world, resume_by_adapters, GOLDEN / name)


@EACH_TRAINING
def test_slices_of_every_tensor_are_read_lazily(name: str) -> None:
    """``open_checkpoint`` lists every tensor at its global shape, and gives any slice of it."""
    with dist_checkpointing.open_checkpoint(GOLDEN / name) as checkpoint:
        for key, shape in SHAPES.items():
            assert checkpoint[f"model.{key}"].shape == shape
            assert torch.equal(checkpoint[f"model.{key}"][1:3], values(key)[1:3])
            assert torch.equal(checkpoint[f"optimizer.state.{key}.exp_avg"][..., -2:], -values(key)[..., -2:])
        assert checkpoint.common["lr_scheduler"]["last_epoch"] == 3
        assert [group["params"] for group in _groups(checkpoint.common["optimizer"])] == [
            ["0.weight", "2.weight"],
            ["0.bias", "2.bias"],
        ]
        assert checkpoint.find_incomplete_files() == []
        described = dist_checkpointing.load_sharded_metadata(GOLDEN / name)
        assert set(described) == {*checkpoint, *checkpoint.objects}


def _groups(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups; the flattened form has none, only options by parameter."""
    if "param_groups" in optimizer:
        return optimizer["param_groups"]  # type: ignore[no-any-return]
    assert optimizer["param_groups.0.bias.lr"] == 0.125 * 0.1
    return [{"params": ["0.weight", "2.weight"]}, {"params": ["0.bias", "2.bias"]}]


def test_a_load_casts_fills_in_place_and_allows_other_shapes() -> None:
    """Shards of other dtypes, strides and shapes get the values of their place."""
    target = torch.zeros(4, 8).T  # columns 2 to 6 of the weight, transposed in memory
    wanted = {
        "cast": ShardedTensor("model.0.weight", target, torch.float32, (8, 4), (8, 6), (0, 2), None),
        "double": ShardedTensor.from_rank_offsets("model.0.bias", torch.zeros(8, dtype=torch.float64)),
        "larger": ShardedTensor.from_rank_offsets("model.2.bias", torch.ones(5), allow_shape_mismatch=True),
    }
    loaded = dist_checkpointing.load(wanted, GOLDEN / "torch-2", validate_access_integrity=False)
    assert loaded["cast"] is target
    assert torch.equal(target, values("0.weight")[:, 2:6])
    assert torch.equal(loaded["double"], values("0.bias").double())
    assert loaded["larger"].tolist() == [300, 301, 302, 0, 0]


def test_boxes_that_tensors_describe_themselves_are_put_together() -> None:
    """A tensor of the kind ``default_tensor_v1`` loads from boxes in any order."""
    with dist_checkpointing.open_checkpoint(GOLDEN / "boxes-2") as checkpoint:
        assert torch.equal(checkpoint["model.w"][...], torch.arange(12, dtype=torch.bfloat16).view(4, 3))


def test_plain_tensors_that_differ_between_ranks_are_refused_by_name() -> None:
    """torch_checkpointing declares local tensors as replicated: none of them is taken for all."""
    wanted = {"w": ShardedTensor.from_rank_offsets("local.w", torch.zeros(2))}
    with pytest.raises(ShardingError, match=r"ranks 0 and 1 have saved different values of 'local\.w'"):
        dist_checkpointing.load(wanted, GOLDEN / "boxes-2")
    assert wanted["w"].data.tolist() == [0, 0]


def test_states_of_other_numbers_of_ranks_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    """A state that differs between ranks is not given to other ranks, nor one rank's to all."""
    copy_golden("torch-2", tmp_path / f"step-{STEP}")
    with pytest.raises(RankError, match=r"the state 'loader' was saved by 2 ranks, .* and is loaded by 4"):
        ranks.run(4, resume_a_loader, tmp_path, PerRank(Kept()))
    with pytest.raises(RankError, match=r"'loader' has an object for each of 2 ranks, and one of a grid of \(1,\)"):
        ranks.run(2, resume_a_loader, tmp_path, Kept())


def test_objects_are_found_by_key_at_any_depth() -> None:
    """An item, a part of one and a single value load as objects, with their tensors."""
    wanted = {name: ShardedObject(name, None, (1,), (0,)) for name in ("train_state", "train_state.log", "step")}
    loaded = dist_checkpointing.load(wanted, GOLDEN / "mesh-4")
    assert loaded["train_state"] == {"step": 7, "log": [3, 4], "name": "run"}
    assert loaded["train_state.log"] == [torch.tensor(3), torch.tensor(4)]
    assert loaded["step"] == STEP


def test_items_of_the_ranks_are_compared_value_by_value(tmp_path: Path) -> None:
    """What the ranks agree on is one value, NaN too; keys of their own are put together; other items stay apart."""
    folder = copy_golden("torch-2", tmp_path / "step")
    for rank in range(2):
        own: Any = None if rank == 0 else {"deep": [{"a": 1}]}
        torch.save({"loss": float("nan"), "many": [float("nan")], "at": {3: (1, 2)}}, folder / f"same_{rank}.pt")
        torch.save({f"dp_rank_{rank}": b"%d" % rank, "count": 2}, folder / f"joined_{rank}.pt")
        torch.save({"state": own, "count": 2}, folder / f"apart_{rank}.pt")
    with dist_checkpointing.open_checkpoint(folder) as checkpoint:
        common = checkpoint.common
        assert str(common["same"]) == "{'loss': nan, 'many': [nan], 'at': {3: (1, 2)}}"
        assert common["joined"] == {"dp_rank_0": b"0", "dp_rank_1": b"1", "count": 2}
        assert "apart" not in common
        assert checkpoint.read_object("apart/shard_0_2") == {"state": None, "count": 2}
        assert checkpoint.read_object("apart/shard_1_2") == {"state": {"deep": [{"a": 1}]}, "count": 2}


@table(
    "one, other",
    [
        ({"carry": {"tokens": 7}}, {}),
        ({"carry": torch.tensor([7, 8])}, {}),
        ({"cuda:0": torch.tensor([7])}, {"cuda:1": torch.tensor([7])}),
        ({"carry": [{"a": 1}, {"b": 2}]}, {"carry": [{"a": 1}]}),
    ],
)
def test_what_a_rank_lacks_it_does_not_get_from_another(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """A state of each rank that has a key, a tensor or an entry of a list on one rank alone is that rank's."""
    folder = copy_golden("torch-2", tmp_path / "step")
    states: list[Any] = [{**one, "epoch": 1}, {**other, "epoch": 1}]
    for rank, state in enumerate(states):
        torch.save(state, folder / f"data_{rank}.pt")
    wanted = {rank: ShardedObject("data", None, (2,), (rank,)) for rank in range(2)}
    loaded = dist_checkpointing.load(dict(wanted), folder)
    assert [str(loaded[rank]) for rank in range(2)] == [str(state) for state in states]
    assert "data" not in dist_checkpointing.load_common_state_dict(folder)


def test_plain_tensors_of_pipeline_stages_are_one_item(tmp_path: Path) -> None:
    """Without metadata, stages that each have other tensors, with values of their own, have a model between them."""
    folder = copy_golden("torch-2", tmp_path / "step")
    for rank in range(2):
        torch.save({f"{rank}.weight": torch.ones(2) * rank, f"{rank}.extra": b"%d" % rank}, folder / f"net_{rank}.pt")
    with dist_checkpointing.open_checkpoint(folder) as checkpoint:
        assert [checkpoint[f"net.{rank}.weight"][...].tolist() for rank in range(2)] == [[0, 0], [1, 1]]
        assert checkpoint.common["net"] == {"0.extra": b"0", "1.extra": b"1"}


@table("state", [{}, {"state": {}}])
def test_a_stage_without_parameters_has_an_empty_dict(tmp_path: Path, state: dict[str, Any]) -> None:
    """What one stage has is loaded, at any number of ranks, where another stage has an empty dict in its place."""
    folder = copy_golden("torch-2", tmp_path / "step")
    torch.save({"state": {"weight": torch.ones(2)}}, folder / "net_0.pt")
    torch.save(state, folder / "net_1.pt")
    with dist_checkpointing.open_checkpoint(folder) as checkpoint:
        assert checkpoint["net.state.weight"][...].tolist() == [1, 1]


def test_an_item_without_tensors_keeps_its_values(tmp_path: Path) -> None:
    """The options of an optimizer without state, as SGD's, are loaded where the metadata declares the item."""
    folder = copy_golden("torch-2", tmp_path / "step")
    for rank in range(2):
        torch.save({"state": {}, "param_groups": [{"lr": 0.5}]}, folder / f"sgd_{rank}.pt")
    metadata = pickle.loads((folder / "metadata.pkl").read_bytes())
    metadata["metadata"]["sgd"] = {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: None, 1: None}}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    with dist_checkpointing.open_checkpoint(folder) as checkpoint:
        assert checkpoint.common["sgd"] == {"state": {}, "param_groups": [{"lr": 0.5}]}


def test_parameters_of_one_name_keep_their_numbers(tmp_path: Path) -> None:
    """The state of an optimizer of two models, whose parameters have the same names, is all there."""
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizer = torch.optim.Adam([{"params": list(model.named_parameters())} for model in models])
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer_0.pt")
    states = {f"optimizer.state.{number}" for number in range(4)}
    assert {key.rpartition(".")[0] for key in dist_checkpointing.load_tensors_metadata(tmp_path)} == states


def test_folders_are_no_files_of_items(tmp_path: Path) -> None:
    """A folder beside the files, as of logs, takes no item's name."""
    folder = copy_golden("torch-2", tmp_path / "step")
    for name in ("logs_0.old", "profile.json", "logs.pt"):
        (folder / name).mkdir()
    with dist_checkpointing.open_checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint["model.0.weight"][...], values("0.weight"))
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, folder, overwrite=True)
    assert (folder / "logs.pt").is_dir()
    (tmp_path / "alone" / "logs_0.pt").mkdir(parents=True)
    with pytest.raises(CannotLoadError):
        dist_checkpointing.load_tensors_metadata(tmp_path / "alone")


def test_a_second_file_of_an_item_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two files that would be one item the first is read, and a warning names the other."""
    for number, name in enumerate(("model_0.pt", "model.pt", "loader.json", "loader.pt")):
        torch.save({"w": torch.full((2,), float(number))}, tmp_path / name)
    (tmp_path / "loader.json").write_text('{"epoch": 3}')
    with dist_checkpointing.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint["model.w"][...].tolist() == [0, 0]
        assert [*checkpoint] == ["model.w"]
    for name, item, first in (("model.pt", "model", "model_0.pt"), ("loader.pt", "loader", "loader.json")):
        assert f"{name} is not read, since the item {item!r} has {first}: move one" in caplog.text


def test_state_that_has_names_already_keeps_them(tmp_path: Path) -> None:
    """Flat parameters of FSDP1 have one state for several names, which get_optimizer_state_dict writes as params."""
    group = {"params": ["0.weight", "0.bias"], "param_names": ["_flat_param"], "lr": 0.5}
    state = {"0.weight": {"exp_avg": torch.ones(2)}, "0.bias": {"exp_avg": torch.zeros(2)}}
    torch.save({"state": state, "param_groups": [group]}, tmp_path / "optimizer_0.pt")
    found = dist_checkpointing.load_tensors_metadata(tmp_path)
    assert sorted(found) == ["optimizer.state.0.bias.exp_avg", "optimizer.state.0.weight.exp_avg"]


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.10 does not know the class of the meshes in the files")
def test_values_that_differ_beside_parts_of_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """The tensors and the other values of such an item load; the value itself is no rank's."""
    folder = copy_golden("unlisted-2", tmp_path / "step")
    for rank in range(2):
        content = torch.load(folder / f"optimizer_{rank}.pt", weights_only=False)
        content["seed"] = rank
        torch.save(content, folder / f"optimizer_{rank}.pt")
    wanted = {"m": ShardedTensor.from_rank_offsets("optimizer.state.0.weight.exp_avg", torch.zeros(8, 6))}
    loaded = dist_checkpointing.load(wanted, folder)
    assert torch.equal(loaded["m"], -values("0.weight"))
    assert "seed" not in loaded["optimizer"]
    with pytest.raises(ShardingError, match=r"different values of 'optimizer\.seed'"):
        dist_checkpointing.load({"seed": ShardedObject("optimizer.seed", None, (1,), (0,))}, folder)


def test_parts_that_nothing_describes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Safetensors files without ``metadata.pkl`` are no tensor: a warning says so, and the load fails by key."""
    folder = copy_golden("safetensors-2", tmp_path / "step")
    (folder / "metadata.pkl").unlink()
    wanted = {"w": ShardedTensor.from_rank_offsets("model.0.weight", torch.zeros(8, 6))}
    with pytest.raises(KeyMismatchError, match=r"model\.0\.weight"):
        dist_checkpointing.load(wanted, folder)
    assert "different tensors or keys in 'model', and no metadata.pkl says that they are parts of one" in caplog.text
    shutil.copy(GOLDEN / "safetensors-2" / "metadata.pkl", folder)
    assert torch.equal(dist_checkpointing.load(wanted, folder)["w"], values("0.weight"))


def test_a_checkpoint_on_a_store_loads_and_is_exported(tmp_path: Path) -> None:
    """A directory on an object store is read by ranges, and the model becomes a Hugging Face folder."""
    files = fsspec.filesystem("memory")
    for path in (GOLDEN / "mesh-4").iterdir():
        files.pipe(f"/tckpt/step/{path.name}", path.read_bytes())
    with dist_checkpointing.open_checkpoint("memory://tckpt/step") as checkpoint:
        assert torch.equal(checkpoint["model.0.weight"][3:5], values("0.weight")[3:5])
    export_to_huggingface(GOLDEN / "mesh-4", tmp_path / "exported")
    exported = safetensors.torch.load_file(tmp_path / "exported" / "model.safetensors")
    assert set(exported) == set(SHAPES)
    assert all(torch.equal(tensor, values(name)) for name, tensor in exported.items())


def test_a_key_of_one_rank_leaves_the_tensors_where_they_are(tmp_path: Path) -> None:
    """A model that all ranks have is one, also if a rank has saved a value with it, or a stage has no tensor."""
    folder = copy_golden("torch-2", tmp_path / "step")
    for rank, more in enumerate(({"decay": 0.9}, {})):
        torch.save({"weight": torch.ones(2), **more}, folder / f"net_{rank}.pt")
        torch.save({"step": 1, **({"bias": torch.ones(2)} if rank else {})}, folder / f"stage_{rank}.pt")
    with dist_checkpointing.open_checkpoint(folder) as checkpoint:
        assert [checkpoint[key][...].tolist() for key in ("net.weight", "stage.bias")] == [[1, 1], [1, 1]]
        assert checkpoint.common["net"] == {"decay": 0.9}


def write_state(file: Path, value: int) -> None:
    """Write a state that takes as many bytes whatever the value is."""
    state = {"a": torch.arange(3000), "b": torch.full((300,), value), "c": torch.arange(3000)}
    if file.suffix == ".safetensors":
        safetensors.torch.save_file(state, file)
    elif file.suffix == ".pt":
        torch.save(state, file)
    else:
        file.write_text(str(value))


@table("name", ["extra_0.pt", "extra_0.json", "extra_0.bin", "extra_0.safetensors"])
def test_saves_of_one_layout_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Saves whose files have the same names and sizes are told apart by their content: no load mixes two of them."""
    identities: list[bytes] = []
    monkeypatch.setattr(LoadContext, "require_same_save", lambda _, identity, *args: identities.append(identity))
    wanted = {"w": ShardedTensor.from_rank_offsets("model.0.weight", torch.zeros(8, 6))}
    for number, value in enumerate((5, 5, 6)):
        folder = copy_golden("safetensors-2", tmp_path / str(number))
        write_state(folder / name, value)
        dist_checkpointing.load(dict(wanted), folder)
    one, same, other = identities
    assert one == same != other


def load_own_folder(folders: list[Path]) -> None:
    """Load from another folder on each rank."""
    wanted = {"w": ShardedTensor.from_rank_offsets("model.0.weight", torch.zeros(8, 6))}
    dist_checkpointing.load(wanted, folders[dist.get_rank()], validate_access_integrity=False)


def test_ranks_with_folders_of_their_own_are_refused(ranks: Ranks, no_pauses: None) -> None:
    """Where the folders of two ranks have other keys, no rank waits for the other: all raise the same error."""
    for others in (["torch-2", "stages-4"], ["stages-4", "torch-2"]):
        found = ranks.outcomes(2, load_own_folder, [GOLDEN / name for name in others])
        assert [each.kind for each in found] == ["CheckpointReplacedError"] * 2
        assert "different index" in found[0].message


def test_a_save_that_did_not_end_is_no_checkpoint(tmp_path: Path) -> None:
    """What lies under the temporary name is refused, whatever it has."""
    folder = copy_golden("torch-2", tmp_path / "tmp_step-7")
    with pytest.raises(IncompleteCheckpointError, match="did not end"):
        dist_checkpointing.load({}, folder)
