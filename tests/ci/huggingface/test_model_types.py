"""Models of 23 types, trained on one rank and on two, are what from_pretrained gives back, by every door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import export_to_huggingface
from shardckpt.huggingface.adapters import AdapterNames
from shardckpt.maintenance import convert_checkpoint, merge_checkpoints
from tests.huggingface import changed_models, model_types
from tests.huggingface.model_types import TYPES
from tests.huggingface.samples import same
from tests.safetensors.contiguous.jobs import read_like_vllm
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks

    _Tensors = dict[str, torch.Tensor]

_SECONDS = 300.0
#: One type of each kind: a plain model, tied weights, experts, one tensor of all experts, codes with block
#: scales, codes of a library, an adapter.
_IN_CI = (
    "llama",
    "qwen3_moe",
    "gpt_oss, packed experts",
    "deepseek_v3, fp8 with block scales",
    "llama, NF4",
)


def check(ranks: Ranks, folder: Path, name: str, world_size: int) -> None:
    """Check that a model of a type comes back from every door: all names, shapes, values and dtypes, and the logits."""
    made = TYPES[name]
    model_types.save_config(name, folder / "assets")
    given = (name, str(folder), str(folder / "assets"))
    tensors, logits, changed = ranks.run(world_size, model_types.train, *given, timeout=_SECONDS)[0]
    options = {"assets": folder / "assets", "mapping": made.mapping}
    doors = {**model_types.DOORS, "convert": "convert", "merge": "merge"}
    convert_checkpoint(folder / "checkpoint", folder / "convert", "hf", **options)
    merge_checkpoints([folder / "checkpoint"] * 2, folder / "merge", "hf", **options)
    if made.as_values:
        _check_codes(folder)
    if made.adapter and made.quantize:  # of its last save, too, the codes are resumed
        assert any(".(inner)." in key for key in dc.load_tensors_metadata(folder / "last_save_in_hf/step-1"))
    values = changed_models.list_values(tensors)
    written = {AdapterNames().find_name(key): tensor for key, tensor in tensors.items()} if made.adapter else tensors
    for door, place in doors.items():
        if made.refused and door in model_types.WHOLE_DOORS:
            continue  # which said so in the training
        loaded, info = _load(folder / place, name)
        assert not any(info.values()), (door, info)
        _compare(model_types.list_whole(loaded), values)
        stored = read_like_vllm(folder / place)
        compared = stored.keys() & written.keys()  # the Hub has experts one by one, and the trainer all in one tensor
        assert compared, door
        assert [key for key in compared if not same(stored[key], written[key])] == [], door
        found = model_types.answer(loaded)
        if all(tensor.dtype == tensors[key].dtype for key, tensor in loaded.state_dict().items()):
            assert torch.equal(found, logits), door
        else:  # transformers computes in bfloat16 with some that are stored in float32
            assert torch.allclose(found, logits, rtol=1e-2, atol=1e-2), door
    widened, info = _load(folder / model_types.WIDENED, name)
    assert not any(info.values()), info
    assert all(torch.equal(t, values[key].to(t.dtype)) for key, t in model_types.list_whole(widened).items())
    assert changed == []
    fresh = model_types.make_model(name, is_base=made.as_values)
    with dc.open_checkpoint(folder / "checkpoint") as checkpoint:
        weights = dict(checkpoint.weights("peft" if made.adapter else None))
    changed_models.fill_adapter(fresh, weights) if made.adapter else fresh.load_state_dict(weights)
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in model_types.list_whole(fresh).items())


def _check_codes(folder: Path) -> None:
    """Check that no door writes codes that no class of the Hub can name, and each says what to do."""
    doors: list[Callable[[], Any]] = [
        lambda: export_to_huggingface(folder / "codes", folder / "never"),
        lambda: convert_checkpoint(folder / "codes", folder / "never", "hf"),
        lambda: merge_checkpoints([folder / "codes"] * 2, folder / "never", "hf"),
    ]
    with dc.open_checkpoint(folder / "codes") as checkpoint:
        for door in [*doors, checkpoint.weights]:
            with pytest.raises(CheckpointingException, match=model_types.CODES):
                door()
    assert not (folder / "never").exists()


def _load(folder: Path, name: str) -> Any:
    import transformers

    if TYPES[name].adapter:
        return changed_models.load_adapter(model_types.make_model(name, is_base=True), folder)
    return getattr(transformers, TYPES[name].kind).from_pretrained(folder, output_loading_info=True)


def _compare(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that tensors are the trainer's; transformers loads some that are stored in float32 as bfloat16."""
    assert loaded.keys() == expected.keys()
    wrong = [key for key, tensor in expected.items() if not torch.equal(loaded[key], tensor.to(loaded[key].dtype))]
    assert wrong == []


@pytest.mark.parametrize("world_size", [2, *in_proof(1)])
@pytest.mark.parametrize("name", [*_IN_CI, *in_proof(*(name for name in TYPES if name not in _IN_CI))])
def test_a_model_comes_back_from_every_door(ranks: Ranks, tmp_path: Path, name: str, world_size: int) -> None:
    """No missing, unknown or mismatched key; every tensor is stored in its dtype, and is loaded bit for bit.

    Of FSDP2 shards on two ranks; proof has the other types, one rank, and four.
    """
    check(ranks, tmp_path, name, world_size)
