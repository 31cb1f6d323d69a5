from __future__ import annotations

import argparse
import collections
import enum
import json
import pickle
import signal
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CorruptCheckpointError, PluginError
from shardckpt.maintenance import convert_checkpoint
from shardckpt.stubs import Stub, make_stub_class
from shardckpt_safetensors.objects import codecs, decode_object, encode_object, register_codec
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

WHAT = "object 'args'"


class ModelType(enum.Enum):
    """As megatron.core.enums has it."""

    encoder_or_decoder = 1
    retro_encoder = 2


class RerunDiagnostic(str, enum.Enum):
    """As megatron.core.rerun_state_machine has it: members are strings, too."""

    CORRECT_RESULT = "correct_result"
    TRANSIENT_ERROR = "transient_error"


class Scope(enum.Flag):
    """Members that can be combined."""

    ATTN = enum.auto()
    MLP = enum.auto()


class Caller(NamedTuple):
    """As megatron.core.rerun_state_machine has it."""

    message: str
    rank: int


class Config:
    """A class that is neither: what a pickle says of it is kept."""


CLASSES = (ModelType, RerunDiagnostic, Scope, Caller, Config)
MODULE = "megatron.sample_classes"


@pytest.fixture(autouse=True)
def megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of Megatron, which the process has imported, with the classes."""
    module = ModuleType(MODULE)
    for cls in CLASSES:
        monkeypatch.setattr(cls, "__module__", MODULE)
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def trainer_state() -> dict[str, Any]:
    """A common state as Megatron's trainer makes it."""
    args = argparse.Namespace(
        model_type=ModelType.encoder_or_decoder,
        cuda_graph_scope=[Scope.ATTN, Scope.ATTN | Scope.MLP, Scope(0)],
        exit_signal=signal.SIGTERM,
        params_dtype=torch.bfloat16,
        betas=(0.9, 0.95),
        data_path=None,
    )
    rerun = {
        "mode": RerunDiagnostic.CORRECT_RESULT,
        "validation_counts": collections.defaultdict(int, {Caller("loss", 0): 3}),
        "failed_validation_call": (Caller("loss", 1), RerunDiagnostic.TRANSIENT_ERROR),
    }
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 100,
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 3200, "lr_decay_style": "cosine"},
        "rerun_state_machine": rerun,
        "rng_state": [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.arange(8, dtype=torch.uint8)}],
    }


def same_rng(loaded: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Compare the tensors of two states, and take them out."""
    return torch.equal(*(state["rng_state"][0].pop("torch_rng_state") for state in (loaded, saved)))


def test_a_trainers_state_comes_back(tmp_path: Path) -> None:
    """Enums, flags and named tuples of imported modules come back as they were, also as keys."""
    state = trainer_state()
    dc.save(state, tmp_path / "c", "safetensors")
    loaded = dc.load_common_state_dict(tmp_path / "c")
    assert same_rng(loaded, state)
    assert loaded == state
    assert loaded["args"].model_type is ModelType.encoder_or_decoder
    assert type(loaded["rerun_state_machine"]["failed_validation_call"][0]) is Caller
    assert type(loaded["args"].exit_signal) is signal.Signals


def test_what_is_not_imported_is_a_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported: a stub has name and value, or the fields, and is stored as what it stands for."""
    value = [ModelType.retro_encoder, Scope.ATTN, Caller("loss", 1)]
    stored = encode_object(value, WHAT)
    with monkeypatch.context() as gone:
        gone.delitem(sys.modules, MODULE)
        member, flag, caller = found = decode_object(*stored, WHAT)
        assert all(isinstance(each, Stub) for each in found)
        assert (member.origin, member.name, member.value) == (f"{MODULE}.ModelType", "retro_encoder", 2)
        assert (flag.name, flag.value) == ("ATTN", 1)
        assert caller.args == ("loss", 1)
        assert MODULE not in sys.modules
        again = encode_object(found, WHAT)
    assert decode_object(*again, WHAT) == value
    assert pickle.loads(pickle.dumps(found)) == value


def test_a_changed_class_gives_stubs(megatron: ModuleType) -> None:
    """A member or a field that the class does not have any more is no error, and no other value."""
    stored = encode_object([ModelType.retro_encoder, Caller("loss", 1), Scope.MLP], WHAT)
    megatron.ModelType = enum.Enum("ModelType", {"encoder_or_decoder": 2})  # type: ignore[attr-defined]
    megatron.Caller = NamedTuple("Caller", [("rank", int), ("message", str)])  # type: ignore[attr-defined]
    megatron.Scope = print  # type: ignore[attr-defined]
    member, caller, flag = decode_object(*stored, WHAT)
    assert (member.name, member.value, caller.args, flag.name) == ("retro_encoder", 2, ("loss", 1), "MLP")


def test_a_megatron_checkpoint_goes_there_and_back(tmp_path: Path) -> None:
    """What a pickle names of Megatron survives (safetensors, 1): members where they are imported, else stubs."""
    state = trainer_state()
    del state["args"].exit_signal  # torch_dist refuses it, and reads no combined flags
    del state["args"].cuda_graph_scope
    config = Config()
    config.layers = [1, 2]  # type: ignore[attr-defined]
    state["config"] = config
    dc.save(state, tmp_path / "old", "torch_dist")
    convert_checkpoint(tmp_path / "old", tmp_path / "there", "safetensors")
    loaded = dc.load_common_state_dict(tmp_path / "there")
    assert loaded.pop("config").layers == [1, 2]  # a stub, as by the reader of torch_dist
    convert_checkpoint(tmp_path / "there", tmp_path / "back", "torch_dist")
    back = dc.load_common_state_dict(tmp_path / "back")
    assert back["config"].layers == [1, 2]
    assert back["args"].model_type.args == (1,)
    state.pop("config")
    assert same_rng(loaded, state)
    assert loaded == state


def test_stubs_keep_what_a_pickle_gave_them() -> None:
    """All that a stub has is stored: what the class was called with, state, items of a dict, values of a list."""
    stub = make_stub_class("megatron.elsewhere", "Kind")(1, key=[2])
    stub.__setstate__({"x": (1, 2)})
    stub["item"] = 3
    stub.append(4)
    found = decode_object(*encode_object(stub, WHAT), WHAT)
    assert type(found) is type(stub)
    assert vars(found) == vars(stub)
    without = make_stub_class("megatron.elsewhere", "Kind")()
    assert "state" not in vars(decode_object(*encode_object(without, WHAT), WHAT))
    without.__setstate__({})
    assert vars(decode_object(*encode_object(without, WHAT), WHAT))["state"] == {}
    named = make_stub_class("megatron.elsewhere", "Kind").for_member("A")
    assert decode_object(*encode_object(named, WHAT), WHAT).name == "A"


@table(
    ("codec", "value"),
    [
        ("enum", 1),
        ("enum", {"module": "os", "class": "a b", "name": "A", "value": 1}),
        ("enum", {"module": "os", "class": "A", "value": 1}),
        ("enum", {"module": "os", "class": "A", "name": None}),
        ("enum", {"module": "os", "class": "A", "name": 3, "value": 1}),
        ("enum", {"module": "os", "class": "A", "name": "A", "value": 1, "more": 1}),
        ("enum", {"class": "A", "name": "A", "value": 1}),
        ("named_tuple", {"module": "os", "class": "A", "fields": [1]}),
        ("named_tuple", {"module": "os", "class": "A" * 256, "fields": {}}),
        ("stub", {"module": "os", "class": "A"}),
        ("stub", {"module": "os", "class": "A", "args": [], "kwargs": 1}),
        ("stub", {"module": "os", "class": "A", "args": [], "name": "x"}),
        ("stub", {"module": "os", "class": "A", "args": [], "called": 1}),
    ],
)
def test_malformed_ones_are_refused(codec: str, value: Any) -> None:
    """What another program has written wrongly is damage, not a stub of something else."""
    data = json.dumps({"$": f"shardckpt.{codec}", "v": value}).encode()
    with pytest.raises(CorruptCheckpointError, match=rf"malformed shardckpt\.{codec}"):
        decode_object("json", data, WHAT)


def test_hostile_names_call_nothing() -> None:
    """Functions and classes that a file names are not called, whatever it says of them."""
    for name, codec in (("system", "stub"), ("stat_result", "stub"), ("_exit", "enum")):
        value: dict[str, Any] = {"module": "os", "class": name}
        value |= {"args": [1], "called": True} if codec == "stub" else {"name": "x", "value": 1}
        found = decode_object("json", json.dumps({"$": f"shardckpt.{codec}", "v": value}).encode(), WHAT)
        assert isinstance(found, Stub)
        assert found.origin == f"os.{name}"


def test_many_classes_are_refused() -> None:
    """A payload cannot fill the memory with classes."""
    names = [{"$": "shardckpt.stub", "v": {"module": "m", "class": f"c{n}", "args": []}} for n in range(2_000)]
    data = json.dumps(names).encode()
    classes = len(Stub.__subclasses__())
    with pytest.raises(CorruptCheckpointError, match="more than 1024 classes"):
        decode_object("json", data, WHAT)
    assert len(Stub.__subclasses__()) - classes < 1100


def test_a_users_codec_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec of the class itself is used; names of the format's own codecs cannot be registered."""
    monkeypatch.setattr(codecs, "_BY_NAME", {})
    monkeypatch.setattr(codecs, "_BY_CLASS", {})
    register_codec("acme.ModelType", ModelType, lambda member: member.name, lambda name: ModelType[name])
    assert encode_object(ModelType.retro_encoder, WHAT)[1] == b'{"$":"acme.ModelType","v":"retro_encoder"}'
    with pytest.raises(PluginError, match=r"begin with 'shardckpt\.' are the format's"):
        register_codec("shardckpt.enum", ModelType, str, str, override=True)
