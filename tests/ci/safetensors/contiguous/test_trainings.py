"""A step directory of a training is a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

from tests.safetensors.contiguous import jobs, trainings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks

_SECONDS = 300.0


@pytest.fixture(autouse=True)
def _imported(ranks: Ranks) -> None:
    ranks.run(4, trainings.import_all, timeout=_SECONDS)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute as a rank does: the order of a sum depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _check(folder: Path, parameters: dict[str, torch.Tensor], logits: torch.Tensor) -> Any:
    """Check that transformers and vLLM's loader read a step directory as it is, and return the loaded model."""
    import transformers

    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    found = trainings.parameters(loaded)
    assert found.keys() == parameters.keys()
    assert [name for name, tensor in parameters.items() if not torch.equal(found[name], tensor)] == []
    # equal parameters give equal logits but for the order of sums, which processes need not share
    assert torch.allclose(trainings.logits(loaded), logits, rtol=1e-4, atol=1e-4)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.keys() is not None
    return loaded


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["untied", "tied"])
def test_transformers_loads_the_steps_of_fsdp(ranks: Ranks, tmp_path: Path, tied: bool) -> None:
    """from_pretrained loads steps of 1, 2 and 4 ranks; the files are the same, up to what the ranks have computed."""
    config = {"tie_word_embeddings": tied}
    trainings.make_model("Llama", **config).config.save_pretrained(tmp_path / "assets")
    for world in (1, 2, 4):
        folder = tmp_path / str(world)
        given = (str(folder), str(tmp_path / "assets"), config, "300KB")
        expected = ranks.run(world, trainings.train_fsdp, *given, timeout=_SECONDS)
        loaded = _check(folder, *expected[0])
        found = jobs.read_like_vllm(folder)
        names = dict(loaded.named_parameters())
        assert found.keys() == names.keys()  # tied, it has no lm_head.weight, as what save_pretrained writes
        assert all(torch.equal(found[name], tensor) for name, tensor in names.items())


def test_transformers_loads_steps_with_expert_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    """Experts that are spread over 1, 2 and 4 ranks are a tensor each under their Hub names; the files are the same."""
    model = trainings.make_model("Qwen3Moe", **trainings.MOE)
    model.config.save_pretrained(tmp_path / "assets")
    trainings.train_step(model)
    trained = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    expected = trainings.parameters(model), trainings.logits(model)
    digests = []
    for world in (1, 2, 4):
        folder = tmp_path / str(world)
        ranks.run(world, trainings.save_experts, str(folder), str(tmp_path / "assets"), trained, timeout=_SECONDS)
        _check(folder, *expected)
        assert "model.layers.1.mlp.experts.3.gate_proj.weight" in jobs.read_like_vllm(folder)
        digests.append(jobs.digest_weights(folder))
    assert digests[0] == digests[1] == digests[2]
