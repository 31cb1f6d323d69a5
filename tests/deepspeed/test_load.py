"""DeepSpeed's own checkpoints (tests/golden/README.md), read without it."""

from __future__ import annotations

import argparse
import json
import shutil
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.cli import main
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CannotLoadError, CheckpointingException, CorruptCheckpointError
from shardckpt.maintenance import convert_checkpoint, diff_checkpoints
from shardckpt.maintenance.sources import open_any, open_source
from shardckpt.plugins import get_plugin_manager
from shardckpt.testing import RankThreads
from tests.tables import table

GOLDEN = Path(__file__).parent.parent / "golden" / "deepspeed"
NAMES = ("zero1", "bf16", "zero2", "zero3", "universal-zero1", "universal-zero3")


class Net(torch.nn.Module):
    """The model of tests/golden/write_deepspeed.py."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.hidden = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.zeros(3))
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


def _expect(name: str) -> dict[str, torch.Tensor]:
    """The values that DeepSpeed itself returned when it saved, under the keys that they get here."""
    found = safetensors.torch.load_file(GOLDEN / f"{name.removeprefix('universal-')}.safetensors")
    keys = {}
    for key, tensor in found.items():
        moment, _, parameter = key.rpartition("/")
        keys[f"optimizer.state.{parameter}.{moment}" if moment else f"model.{key}"] = tensor
    keys["model.head.weight"] = keys["model.embed.weight"]
    return keys


@table("name", NAMES)
def test_weights_and_moments_are_what_deepspeed_had(name: str) -> None:
    """Each fp32 weight, moment, frozen parameter, buffer and tied weight has the bits that DeepSpeed had in memory."""
    expected = _expect(name)
    with open_any(GOLDEN / name) as checkpoint:
        found = {key: checkpoint[key][...] for key in checkpoint}
    tensors = {key: value for key, value in found.items() if not key.endswith(".step")}
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensors[key].dtype == tensor.dtype, key
        assert tensors[key].equal(tensor), key


@table("name", NAMES)
def test_it_converts_to_a_model_folder(name: str, tmp_path: Path) -> None:
    """`shardckpt convert` makes a Hugging Face folder of it, with the model's names and no optimizer state."""
    assert main(["convert", str(GOLDEN / name), str(tmp_path / "hf"), "--to", "hf"]) == 0
    found = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    expected = {key[6:]: tensor for key, tensor in _expect(name).items() if key.startswith("model.")}
    assert found.keys() == expected.keys()
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


@table("name", NAMES)
def test_training_goes_on_from_it(name: str, tmp_path: Path) -> None:
    """What is converted loads into a module and its optimizer: weights, moments, step counts and options."""
    convert_checkpoint(GOLDEN / name, tmp_path / "new", "safetensors")
    net = Net()
    decayed = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in net.parameters() if p.requires_grad and p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], lr=0.5)
    sharded = to_sharded_state_dict(net, optimizer)
    load_into(dc.load(sharded, tmp_path / "new"), net, optimizer)
    expected = _expect(name)
    for key, parameter in net.named_parameters():
        assert parameter.equal(expected[f"model.{key}"].to(parameter.dtype))
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            assert state["step"].item() == 2
            assert state["exp_avg_sq"].equal(expected[f"optimizer.state.{key}.exp_avg_sq"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.001]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def _rename_state(folder: Path) -> None:
    """Give the second moment and the count of steps other names, as RMSprop and an optimizer of one's own have them."""
    for file in folder.rglob("exp_avg_sq.pt"):
        file.rename(file.with_name("square_avg.pt"))
    for file in folder.glob("*optim_states.pt"):  # its pickle needs DeepSpeed: the bytes are replaced
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data.replace(b"exp_avg_sq", b"square_avg").replace(b"\0step", b"\0beta"))


@table("name", NAMES)
def test_values_of_another_optimizer_are_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values of the optimizer that are not read are named by a warning, and the rest is read."""
    shutil.copytree(GOLDEN / name, tmp_path / "zero")
    _rename_state(tmp_path / "zero")
    convert_checkpoint(tmp_path / "zero", tmp_path / "new", "safetensors")
    others = "square_avg" if name.startswith("universal") else "beta, square_avg"
    assert f"not read, since only Adam's are: {others}" in caplog.text
    with open_any(tmp_path / "new") as checkpoint:
        for key, tensor in _expect(name).items():
            if key.endswith(".exp_avg"):
                assert checkpoint[key][...].equal(tensor)


def test_values_that_are_not_read_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The main rank alone, and it once, warns of the values that are not read, however often each rank loads."""
    shutil.copytree(GOLDEN / "universal-zero1", tmp_path / "zero")
    _rename_state(tmp_path / "zero")

    def load() -> list[int]:
        comm, counts = Comm(), []
        with open_source(tmp_path / "zero", get_plugin_manager()) as opened:
            for rank in (1, 0):
                for _ in range(2 if comm.rank == rank else 0):
                    opened.strategy.load_common(replace(opened.context, comm=comm))
                comm.sync_errors()
                counts.append(caplog.text.count("not read, since only Adam's are: square_avg"))
                comm.sync_errors()
        return counts

    assert RankThreads().run(2, load) == [[0, 1]] * 2


def test_the_jobs_values_are_common_state(tmp_path: Path) -> None:
    """DeepSpeed's counts and the client state that the job passed are the common state of what is converted."""
    convert_checkpoint(GOLDEN / "zero2", tmp_path / "new", "safetensors")
    common = dc.load_common_state_dict(tmp_path / "new")
    assert (common["global_steps"], common["tokens"]) == (2, 16)


def _change_model_states(folder: Path, **entries: Any) -> None:
    """Copy a checkpoint, with other values in the file of the model's states."""
    shutil.copytree(GOLDEN / "zero2", folder)
    (file,) = folder.glob("*model_states.pt")
    torch.save({**torch.load(file, weights_only=False), **entries}, file)


def test_tensors_of_the_client_state_are_read_in_any_container(tmp_path: Path) -> None:
    """Client state such as another module's state dict, or a namespace, is common state with the tensors' values."""
    tensor = torch.arange(3.0)
    state = {"ema": OrderedDict(w=tensor), "args": argparse.Namespace(mean=[tensor])}
    _change_model_states(tmp_path / "zero", **state)
    convert_checkpoint(tmp_path / "zero", tmp_path / "new", "safetensors")
    common = dc.load_common_state_dict(tmp_path / "new")
    assert common["ema"]["w"].equal(tensor)
    assert common["args"].mean[0].equal(tensor)


def test_a_modules_extra_state_loads_into_it(tmp_path: Path) -> None:
    """What a module returns as extra state, which is no tensor, is an object under the key that the adapters use."""

    class WithExtraState(torch.nn.Linear):
        extra = 0

        def get_extra_state(self) -> int:
            return self.extra

        def set_extra_state(self, state: int) -> None:
            self.extra = state

    (file,) = (GOLDEN / "zero2").glob("*model_states.pt")
    module = torch.load(file, weights_only=False)["module"]
    _change_model_states(tmp_path / "zero", module={**module, "hidden._extra_state": 7})
    convert_checkpoint(tmp_path / "zero", tmp_path / "new", "safetensors")
    net = Net()
    net.hidden = WithExtraState(3, 3)
    load_into(dc.load(to_sharded_state_dict(net, prefix="model."), tmp_path / "new"), net)
    assert net.hidden.extra == 7


@table(
    ("entry", "value"),
    [
        ("module", [1]),
        ("module", {1: torch.ones(1)}),
        ("shared_params", {1: "embed.weight"}),
        ("frozen_param_fragments", [1]),
        ("shared_params", [["head.weight", "embed.weight"]]),
        ("param_shapes", [{"embed.weight": 3}]),
        ("param_shapes", [3]),
        ("bomb", torch.ones(1).expand(1 << 33)),
    ],
)
def test_what_deepspeed_never_writes_is_an_error(entry: str, value: Any, tmp_path: Path) -> None:
    """A value of another type than DeepSpeed writes is damage that the error names, and none is left out in silence."""
    _change_model_states(tmp_path / "zero", **{entry: value})
    with pytest.raises(CorruptCheckpointError, match=entry):
        convert_checkpoint(tmp_path / "zero", tmp_path / "new", "safetensors")


@table(
    "stored",
    [
        {"optimizer_state_dict": [1]},
        {"optimizer_state_dict": {"state": [1]}},
        {"optimizer_state_dict": {"state": {0: torch.ones(1)}}},
        {"optimizer_state_dict": {"state": {0: {"step": 10**400}}}},
        {"optimizer_state_dict": {"state": {0: {"step": torch.ones(1, dtype=torch.complex64)}}}},
        {"param_groups": [{"step": "two"}]},
    ],
)
def test_options_that_deepspeed_never_writes_are_an_error(stored: dict[str, Any], tmp_path: Path) -> None:
    """Options of a universal checkpoint that are no dicts, or a count of steps that is none, are damage."""
    shutil.copytree(GOLDEN / "universal-zero1", tmp_path / "zero")
    for step in tmp_path.rglob("step.pt"):
        step.unlink()
    torch.save(stored, tmp_path / "zero" / "zero" / "optimizer_state.pt")
    with pytest.raises(CorruptCheckpointError, match=r"optimizer_state\.pt|count of its steps"):
        convert_checkpoint(tmp_path / "zero", tmp_path / "new", "safetensors")


@pytest.mark.parametrize("name", ["zero2", "universal-zero1", "universal-zero3"])
def test_it_is_read_from_a_store(name: str, tmp_path: Path) -> None:
    """ZeRO and universal checkpoints at a URL are opened, converted and verified like those in a directory."""
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(GOLDEN / name), f"/deepspeed/{name}", recursive=True)
    url = f"memory://deepspeed/{name}"
    convert_checkpoint(url, tmp_path / "new", "safetensors")
    assert diff_checkpoints(GOLDEN / name, tmp_path / "new").are_same
    assert main(["verify", url]) == 0


def test_verbs_read_it() -> None:
    """`verify` checks its files, and `diff` finds a ZeRO checkpoint equal to the universal one that was made of it."""
    for name in NAMES:
        assert main(["verify", str(GOLDEN / name)]) == 0, name
    report = diff_checkpoints(GOLDEN / "zero3", GOLDEN / "universal-zero3")
    assert not report.differences


@table("name", ["zero1", "zero3"])
def test_a_missing_rank_is_an_error(name: str, tmp_path: Path) -> None:
    """A folder without the partition of a rank, first or last, is damaged, and the error names what is missing."""
    for number, lost in enumerate(sorted(path.name for path in (GOLDEN / name).glob("*_optim_states.pt"))):
        shutil.copytree(GOLDEN / name, tmp_path / f"{number}")
        (tmp_path / f"{number}" / lost).unlink()
        with pytest.raises(CorruptCheckpointError, match=r"lacks the file of rank 0|partitions of 1 rank,|is of 2"):
            convert_checkpoint(tmp_path / f"{number}", tmp_path / "new", "safetensors")
        assert not (tmp_path / "new").exists()


@table(
    ("source", "name", "what"),
    [
        ("zero1", "zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("universal-zero1", "mp_rank_01_model_states.pt", "tensor parallelism"),
        ("zero1", "layer_00-model_00-model_states.pt", "pipeline parallelism"),
        ("zero1", "layer_0_expert_1_mp_rank_00_model_states.pt", "expert parallelism"),
    ],
)
def test_what_is_not_read_is_refused_by_name(source: str, name: str, what: str, tmp_path: Path) -> None:
    """A checkpoint of a job with tensor, pipeline or expert parallelism is refused, and the error says which."""
    shutil.copytree(GOLDEN / source, tmp_path / "zero")
    torch.save({}, tmp_path / "zero" / name)
    with pytest.raises(CannotLoadError, match=what):
        convert_checkpoint(tmp_path / "zero", tmp_path / "new", "safetensors")


@table("name", ["zero1", "zero3", "universal-zero1"])
def test_a_damaged_file_is_an_error(name: str, tmp_path: Path) -> None:
    """A file that is cut, or has other values than DeepSpeed writes, is an error that names it; verify finds it."""
    shutil.copytree(GOLDEN / name, tmp_path / "zero")
    for file in sorted((tmp_path / "zero").rglob("*.pt")):
        whole = file.read_bytes()
        torch.save([1], tmp_path / "other")
        for damaged in (whole[:-9], (tmp_path / "other").read_bytes()):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointingException, match=file.name):
                convert_checkpoint(tmp_path / "zero", tmp_path / "new", "safetensors")
        assert main(["verify", str(tmp_path / "zero")]) == 1
        file.write_bytes(whole)


def test_a_number_of_steps_that_is_none_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickle may have any number: `ls` lists the checkpoint without a step, whatever stands there."""
    for number, steps in enumerate((10**5000, 1 << 53, -1, True, 2.0)):
        _change_model_states(tmp_path / f"zero{number}", global_steps=steps)
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)] == [None] * 5
