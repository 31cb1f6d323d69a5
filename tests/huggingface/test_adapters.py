"""Folders of PEFT with a LoRA adapter, made by hand; tests/ci has those that PEFT writes."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from shardckpt import __version__
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.huggingface import export_to_huggingface, huggingface_index, load_from_huggingface
from shardckpt.maintenance import convert_checkpoint, verify_checkpoint
from shardckpt.maintenance.verify import DAMAGED, INTACT, get_exit_code
from shardckpt.manager import list_checkpoints
from shardckpt.mapping import ShardedTensor
from tests.states import error_of
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

LAYER = "base_model.model.model.layers.0.self_attn"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def _weights(ranks: dict[str, int] | None = None) -> dict[str, torch.Tensor]:
    found = {}
    for module, rank in (ranks or {"q_proj": 2, "v_proj": 2}).items():
        found[f"{LAYER}.{module}.lora_A.weight"] = torch.rand(rank, 8)
        found[f"{LAYER}.{module}.lora_B.weight"] = torch.rand(6, rank)
    return found


def _folder(path: Path, weights: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    path.mkdir()
    save_file(weights or _weights(), path / "adapter_model.safetensors", {"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return path


def _found(folder: Path) -> tuple[int, str]:
    results = verify_checkpoint(folder)
    return get_exit_code(results), "".join(f"{r.name}: {r.fault or r.note}" for r in results if r.fault or r.note)


def _without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in _weights().items() if key != f"{LAYER}.{name}"}


def test_an_adapter_is_intact_and_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verify, ls and inspect know a folder of an adapter alone."""
    folder = _folder(tmp_path / "adapter")
    _folder(tmp_path / "patterns", _weights({"q_proj": 4, "v_proj": 2}), rank_pattern={"self_attn.q_proj": 4})
    assert _found(folder) == _found(tmp_path / "patterns") == (INTACT, "")
    assert main(["ls", str(tmp_path)]) == INTACT
    assert "PEFT adapter" in capsys.readouterr().out
    assert main(["inspect", str(folder)]) == INTACT
    assert "written by PEFT (a PEFT adapter)" in capsys.readouterr().out


@table(
    ("weights", "config", "said"),
    [
        (
            None,
            {"r": 3},
            "it says rank 3 of 'model.layers.0.self_attn.q_proj', which has lora_A of shape (2, 8)",
        ),
        (None, {"rank_pattern": {"v_proj": 4}}, "it says rank 4 of 'model.layers.0.self_attn.v_proj'"),
        (None, {"r": "2"}, "its r is '2'"),
        (_without("q_proj.lora_B.weight"), {}, "lora_B is missing for lora_A of model.layers.0.self_attn.q"),
        (
            None,
            {"target_modules": ["q_proj"]},
            "target_modules does not name model.layers.0.self_attn.v_proj",
        ),
        ({f"{LAYER}.q_proj.lora_A.default.weight": torch.ones(2, 8)}, {}, "without the adapter's"),
        ({"model.norm.weight": torch.ones(8)}, {}, "PEFT finds no place for model.norm.weight"),
        (
            {name: value.to(torch.int32) for name, value in _weights().items()},
            {},
            "a factor is of floating point, unlike",
        ),
    ],
)
def test_an_adapter_that_peft_does_not_load_as_trained_is_damage(
    tmp_path: Path, weights: dict[str, torch.Tensor] | None, config: dict[str, Any], said: str
) -> None:
    """Ranks, pairs, modules, names and dtypes that adapter_config.json contradicts: exit code 1, and the reason."""
    code, found = _found(_folder(tmp_path / "adapter", weights, **config))
    assert code == DAMAGED
    assert "adapter_config.json" in found
    assert said in found


@table(
    ("config", "said"),
    [
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "of target_modules no tensor has o_proj"),
        ({"target_modules": "(a+)+$"}, "not compared with the modules: target_modules is '(a+)+$'"),
        ({"peft_type": "IA3"}, "not compared with the tensors: peft_type is 'IA3'"),
    ],
)
def test_what_of_an_adapter_is_not_compared_is_said(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """A module without tensors and what is not known is no damage; no regular expression of a folder is run."""
    code, found = _found(_folder(tmp_path / "adapter", **config))
    assert code == INTACT
    assert said in found


@table("text", ["{", None])
def test_an_adapter_without_its_config_is_damage(tmp_path: Path, text: str | None) -> None:
    """PEFT does not load it: the file is named, and a listing says so."""
    folder = _folder(tmp_path / "adapter")
    (folder / "adapter_config.json").unlink()
    if text is not None:
        (folder / "adapter_config.json").write_text(text)
    code, found = _found(folder)
    assert code == DAMAGED
    assert ("adapter_config.json is damaged" if text else "has lost adapter_config.json") in found
    assert main(["ls", str(tmp_path)]) == DAMAGED


def _state(adapter: str = "default") -> dict[str, torch.Tensor]:
    """The state dict of a model of PEFT: the base, the factors under an adapter's name, and a module trained whole."""
    return {
        f"{LAYER}.q_proj.base_layer.weight": torch.full((6, 8), 3.0),
        **{name.replace(".weight", f".{adapter}.weight"): torch.zeros_like(t) for name, t in _weights().items()},
        f"base_model.model.score.modules_to_save.{adapter}.weight": torch.zeros(2, 6),
        f"base_model.model.embed.lora_embedding_A.{adapter}": torch.zeros(2, 9),
        f"{LAYER}.q_proj.lora_magnitude_vector.{adapter}.weight": torch.zeros(6),
    }


STORED = {
    **_weights(),
    "base_model.model.score.weight": torch.rand(2, 6),
    "base_model.model.embed.lora_embedding_A": torch.rand(2, 9),
    f"{LAYER}.q_proj.lora_magnitude_vector": torch.rand(6),
}


def _shards(state: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in state.items()}


def test_an_adapter_is_loaded_into_the_state_of_a_peft_model(tmp_path: Path) -> None:
    """Each tensor of the folder is found under the adapter's name; the base keeps its values."""
    folder = _folder(tmp_path / "adapter", STORED)
    state = _state()
    load_from_huggingface(_shards(state), folder)
    filled = [tensor for name, tensor in state.items() if "base_layer" not in name]
    assert all(tensor.equal(stored) for tensor, stored in zip(filled, STORED.values(), strict=True))
    assert state[f"{LAYER}.q_proj.base_layer.weight"].unique().tolist() == [3.0]


def test_what_an_adapter_lacks_is_an_error(tmp_path: Path) -> None:
    """A factor that is asked for and not there, and factors of two adapters, of which one is stored."""
    folder = _folder(tmp_path / "adapter")
    with pytest.raises(KeyMismatchError, match=r"lacks 'base_model\.model\.embed\.lora_embedding_A'"):
        load_from_huggingface(_shards(_state()), folder)
    lacking = {name: tensor for name, tensor in STORED.items() if "score" not in name}
    with pytest.raises(KeyMismatchError, match=r"lacks 'base_model\.model\.score\.weight'"):  # trained whole
        load_from_huggingface(_shards(_state()), _folder(tmp_path / "lacking", lacking))
    two = _state() | _state("other")
    with pytest.raises(KeyMismatchError, match=r"several adapters, default, other: .* mapping='peft:default'"):
        load_from_huggingface(_shards(two), _folder(tmp_path / "full", STORED))
    load_from_huggingface(_shards(two), tmp_path / "full", mapping="peft:default")
    assert all(tensor.any() == ("other" not in name) for name, tensor in two.items())


def test_an_adapter_without_a_place_in_the_model_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that was not made by PEFT would go on with its initial values; strict=False says so in the log."""
    model = {"model.layers.0.self_attn.q_proj.weight": torch.ones(6, 8)}
    folder = _folder(tmp_path / "adapter")
    with pytest.raises(KeyMismatchError, match=r"adapter of PEFT, and the model has no place .* peft\.get_peft_model"):
        load_from_huggingface(_shards(model), folder)
    load_from_huggingface(_shards(model), folder, strict=False)
    assert all(tensor.eq(1).all() for tensor in model.values())
    assert "unused tensors of the adapter, for which the model has no place" in caplog.text
    save_file(model, folder / "model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_config.json").unlink()
    with pytest.raises(KeyMismatchError, match=r"has no tensor by the names that mapping='peft' gives .* leave"):
        load_from_huggingface(_shards({f"base.{name}": t for name, t in model.items()}), folder, mapping="peft")


def _load_stage(folder: str) -> list[bool]:
    """Load the adapter of a stage, the last of which has none; return whether its tensors were filled."""
    rank = torch.distributed.get_rank()
    state = _state()
    part = "lora_A" if rank == 0 else "base_layer"
    stage = {name: tensor for name, tensor in state.items() if part in name}
    load_from_huggingface(_shards(stage), folder, validate_access_integrity=False)
    return [bool(tensor.any()) for name, tensor in stage.items() if "lora" in name]


def test_a_stage_without_the_adapter_loads_with_the_others(tmp_path: Path, ranks: Ranks) -> None:
    """What one rank's model has no place for is another's."""
    assert ranks.run(2, _load_stage, str(_folder(tmp_path / "adapter"))) == [[True, True], []]


def _load_stages_of_two(folder: str, lacking: str) -> list[Any]:
    """Load into two stages with an adapter each; return the errors, and which tensors one that is named fills."""
    rank = torch.distributed.get_rank()
    state = _state(("default", "other")[rank])
    load = partial(load_from_huggingface, _shards(state), validate_access_integrity=False)
    refused = [error_of(load, folder), error_of(load, folder, mapping="peft:third")]
    refused += [error_of(load, lacking, mapping="peft:other"), error_of(load, folder, mapping=("llama", "peft")[rank])]
    load(folder, mapping="peft:other")
    return [refused, [bool(tensor.any()) for name, tensor in state.items() if "base_layer" not in name]]


def test_stages_with_other_adapters_are_one_model(tmp_path: Path, ranks: Ranks) -> None:
    """Names of all stages count: one of several must be named, and what it lacks on one is the error of all."""
    folder = _folder(tmp_path / "adapter", STORED)
    lacking = _folder(tmp_path / "lacking", {name: tensor for name, tensor in STORED.items() if "score" not in name})
    (first, filled), (second, also_filled) = ranks.run(2, _load_stages_of_two, str(folder), str(lacking))
    assert first == second
    assert "there are several adapters, default, other: name one, mapping='peft:default'" in first[0][1]
    assert "there is no adapter 'third', but default, other" in first[1][1]
    assert "lacks 'base_model.model.score.weight'" in first[2][1]
    assert "ranks disagree on mapping" in first[3][1]
    assert not any(filled)
    assert all(also_filled)


def test_biases_that_an_export_lacks_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PEFT trains those of the base with bias="all", and has them in its folder; an export has not."""
    source, assets = _checkpoint(tmp_path / "c", _state()), _folder(tmp_path / "assets", bias="all")
    export_to_huggingface(source, tmp_path / "hf", mapping="peft", assets=assets)
    assert "gets no biases of the base model, which were trained, too (bias: all)" in caplog.text


def _checkpoint(path: Path, *states: dict[str, torch.Tensor]) -> Path:
    dc.save(_shards({name: tensor for state in states for name, tensor in state.items()}), path)
    return path


@table(("door", "url"), [("export", False), ("export", True), ("convert", False)])
def test_an_adapter_is_exported_as_peft_names_it(tmp_path: Path, door: str, url: bool) -> None:
    """The factors and the modules that are trained whole, in PEFT's two files; nothing of the base model."""
    state = {name: torch.rand_like(tensor) for name, tensor in _state().items()}
    codes = {f"{LAYER}.v_proj.base_layer.weight.(inner).codes": torch.ones(6, 8)}  # of a quantized base
    source, assets = _checkpoint(tmp_path / "c", state, codes), _folder(tmp_path / "assets")
    (assets / "config.json").write_text("{}")
    target = f"memory://{tmp_path}/hf" if url else str(tmp_path / "hf")
    if door == "export":
        export_to_huggingface(source, target, mapping="peft", assets=assets)
    else:
        convert_checkpoint(source, target, "hf", mapping="peft", assets=assets)
    assert huggingface_index(target).keys() == STORED.keys()
    filled = _state()
    load_from_huggingface(_shards(filled), target)
    assert all(tensor.equal(state[name]) for name, tensor in filled.items() if "base_layer" not in name)
    if not url:
        assert {path.name for path in (tmp_path / "hf").iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        assert list_checkpoints(tmp_path / "hf")[0].library == f"shardckpt {__version__} (a PEFT adapter)"


def test_one_of_two_adapters_is_named(tmp_path: Path) -> None:
    """An export takes the adapter that is named, and needs a name where there are two."""
    first, second = _state(), {name: torch.ones_like(tensor) for name, tensor in _state("other").items()}
    source, assets = _checkpoint(tmp_path / "c", first, second), _folder(tmp_path / "assets")
    with pytest.raises(KeyMismatchError, match="several adapters, default, other"):
        export_to_huggingface(source, tmp_path / "hf", mapping="peft", assets=assets)
    with pytest.raises(KeyMismatchError, match="no adapter 'third'"):
        export_to_huggingface(source, tmp_path / "hf", mapping="peft:third", assets=assets)
    export_to_huggingface(source, tmp_path / "hf", mapping="peft:other", assets=assets)
    filled = _state()
    load_from_huggingface(_shards(filled), tmp_path / "hf")
    assert all(tensor.eq(1).all() for name, tensor in filled.items() if "base_layer" not in name)


def test_an_adapter_is_not_exported_without_its_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What PEFT needs is asked for before anything is written; an export without the mapping says that there is one."""
    source = _checkpoint(tmp_path / "c", _state())
    with pytest.raises(CheckpointingException, match=r"adapter_config\.json.*assets"):
        export_to_huggingface(source, tmp_path / "hf", mapping="peft")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(CheckpointingException, match=r"not in \.bin"):
        export_to_huggingface(
            source, tmp_path / "hf", mapping="peft", format="bin", assets=_folder(tmp_path / "assets")
        )
    export_to_huggingface(source, tmp_path / "hf")
    assert "mapping='peft'" in caplog.text


def test_a_load_of_an_adapter_as_a_checkpoint_names_the_call(tmp_path: Path) -> None:
    """It is a folder of the Hub, and no save that did not end."""
    with pytest.raises(CheckpointingException, match="load_from_huggingface"):
        dc.load(_shards(_state()), _folder(tmp_path / "adapter"))
