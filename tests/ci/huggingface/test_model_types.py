"""Models of 18 types, trained on one rank and on two, are what from_pretrained gives back, by every door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance import convert_checkpoint, merge_checkpoints
from tests.huggingface import model_types
from tests.huggingface.model_types import TYPES
from tests.huggingface.samples import same
from tests.safetensors.contiguous.jobs import read_like_vllm
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks

    _Tensors = dict[str, torch.Tensor]

_SECONDS = 300.0


def check(ranks: Ranks, folder: Path, name: str, world_size: int) -> None:
    """Check that a model of a type comes back from every door: all names, shapes, values and dtypes, and the logits."""
    made = TYPES[name]
    model_types.make_model(name).config.save_pretrained(folder / "assets")
    given = (name, str(folder), str(folder / "assets"))
    tensors, logits, begun = ranks.run(world_size, model_types.train, *given, timeout=_SECONDS)[0]
    options = {"assets": folder / "assets", "mapping": made.mapping}
    convert_checkpoint(folder / "checkpoint", folder / "convert", "hf", **options)
    merge_checkpoints([folder / "checkpoint"] * 2, folder / "merge", "hf", **options)
    for door, place in {**model_types.DOORS, "convert": "convert", "merge": "merge"}.items():
        loaded, info = _load(folder / place, name)
        assert not any(info.values()), (door, info)
        _compare(loaded.state_dict(), read_like_vllm(folder / place), tensors)
        found = model_types.answer(loaded)
        if all(tensor.dtype == tensors[key].dtype for key, tensor in loaded.state_dict().items()):
            assert torch.equal(found, logits), door
        else:  # transformers computes in bfloat16 with some that are stored in float32
            assert torch.allclose(found, logits, rtol=1e-2, atol=1e-2), door
    widened, info = _load(folder / model_types.WIDENED, name)
    assert not any(info.values()), info
    assert all(torch.equal(tensor, tensors[key].float()) for key, tensor in widened.state_dict().items())
    assert all(same(tensor, tensors[key]) for key, tensor in begun.items())
    fresh = model_types.make_model(name)
    with dc.open_checkpoint(folder / "checkpoint") as checkpoint:
        fresh.load_state_dict(dict(checkpoint.weights()))
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in fresh.state_dict().items())


def _load(folder: Path, name: str) -> Any:
    import transformers

    return getattr(transformers, TYPES[name].kind).from_pretrained(folder, output_loading_info=True)


def _compare(
    loaded: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Check that tensors are the trainer's; transformers loads some that are stored in float32 as bfloat16."""
    assert loaded.keys() == expected.keys()
    wrong = [key for key, tensor in expected.items() if not torch.equal(loaded[key], tensor.to(loaded[key].dtype))]
    wrong += [key for key in stored.keys() & expected.keys() if not same(stored[key], expected[key])]
    assert wrong == []


@pytest.mark.parametrize("world_size", [2, *in_proof(1)])
@pytest.mark.parametrize("name", TYPES)
def test_a_model_comes_back_from_every_door(ranks: Ranks, tmp_path: Path, name: str, world_size: int) -> None:
    """No missing, unknown or mismatched key; every tensor is stored in its dtype, and is loaded bit for bit.

    Of FSDP2 shards on two ranks; tests/proof has one rank, and four.
    """
    check(ranks, tmp_path, name, world_size)
