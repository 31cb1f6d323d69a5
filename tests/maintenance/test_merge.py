from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShapeMismatchError
from shardckpt.maintenance import merge_checkpoints
from shardckpt.maintenance.combine import list_comparisons
from shardckpt.mapping import BlockScales, ShardedObject, ShardedTensor
from tests.maintenance.merge import LEAST, average, read, whole
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def test_formats_mix_and_the_sum_is_rounded_once(tmp_path: Path) -> None:
    """Sources of four formats and shardings merge to numpy's weighted average in fp64, rounded once."""
    torch.manual_seed(1)
    values = [torch.randn(300, 501) for _ in range(4)]
    columns = values[0].split(167, 1)
    dc.save({"w": [ShardedTensor.from_rank_offsets("w", c, (1, n, 3)) for n, c in enumerate(columns)]}, tmp_path / "a")
    dc.save({"w": whole("w", values[1])}, tmp_path / "b", "safetensors")
    dcp.save({"w": values[2]}, checkpoint_id=tmp_path / "c")
    (tmp_path / "d").mkdir()
    save_file({"w": values[3]}, tmp_path / "d" / "model.safetensors")
    weights = [3.0, 1.0, 0.7, 2.1]
    sources = [tmp_path / name for name in "abcd"]
    for to, place in (("ep", "new"), ("hf", "folder")):
        report = merge_checkpoints(
            sources, tmp_path / place, to, weights=weights, accumulate="fp64", memory_budget=LEAST
        )
        assert report.conversion.tensors == 1
    found = read(tmp_path / "new")["w"]
    assert np.array_equal(found.numpy(), average(values, weights))
    again = merge_checkpoints([tmp_path / "new", tmp_path / "folder"], tmp_path / "same.pt", "torch")
    assert again.conversion.proof[0].after == report.conversion.proof[0].after


@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "fp32"),
        pytest.param(torch.float64, "fp32", marks=pytest.mark.ci),
        pytest.param(torch.float32, "fp64", marks=pytest.mark.ci),
        pytest.param(torch.complex64, "fp64", marks=pytest.mark.ci),
    ],
)
def test_bits_do_not_depend_on_order_or_memory(tmp_path: Path, dtype: torch.dtype, accumulate: str) -> None:
    """Sources in any order, with their weights, of other shards and names, in other memory, give the same bits."""
    torch.manual_seed(2)
    sources = []
    for number in range(5):
        values = (torch.randn(240, 3001) * 10.0 ** torch.randint(-8, 8, (240, 3001))).to(dtype)
        values[0, number] = torch.inf
        values[1, :2] = torch.nan
        sources.append(tmp_path / f"{number}")
        shards = [ShardedTensor.from_rank_offsets("w", c, (0, n, 5)) for n, c in enumerate(values.chunk(5))]
        dc.save({"w": shards if number % 2 else whole("w", values)}, sources[-1])
    weights, order = [0.1, 0.7, 3.0, 0.1, 0.4], [3, 1, 4, 0, 2]
    one = merge_checkpoints(sources, tmp_path / "one", weights=weights, accumulate=accumulate, memory_budget=LEAST)
    shuffled = [sources[n] for n in order]
    other = merge_checkpoints(
        shuffled, tmp_path / "other", "safetensors", weights=[weights[n] for n in order], accumulate=accumulate
    )
    assert one.conversion.proof == other.conversion.proof


@table("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_average_of_the_largest_numbers_is_not_infinite(tmp_path: Path, dtype: torch.dtype) -> None:
    """An attention mask of the dtype's lowest number is the same in the average, by any weights; an infinity stays."""
    lowest = torch.finfo(dtype).min
    mask = torch.tensor([lowest, -lowest, 1.0, -math.inf], dtype=dtype)
    for name in "abc":
        dc.save({"mask": whole("mask", mask)}, tmp_path / name)
    for number, weights in enumerate((None, [1.0, 20.0, 0.3])):
        merge_checkpoints([tmp_path / name for name in "abc"], tmp_path / f"{number}", weights=weights)
        assert read(tmp_path / f"{number}")["mask"].equal(mask)


@table("scale", [2.0**-148, 1e-46, 2.0**126, 1e300])
def test_only_the_ratios_of_weights_count(tmp_path: Path, scale: float) -> None:
    """Weights at the ends of what float32 holds, or beyond, merge as those next to 1 do."""
    torch.manual_seed(4)
    values = [torch.randn(64), torch.randn(64)]
    for number, value in enumerate(values):
        dc.save({"w": whole("w", value)}, tmp_path / f"{number}")
    merge_checkpoints([tmp_path / "0", tmp_path / "1"], tmp_path / "new", weights=[scale, 3 * scale])
    np.testing.assert_allclose(read(tmp_path / "new")["w"], average(values, [1, 3]), rtol=1e-5)


@table("count", range(1, 13))
def test_the_comparisons_sort(count: int) -> None:
    """Whatever is added up is sorted first: all sequences of zeros and ones are, and so any sequence is."""
    found = [(torch.arange(1 << count) >> place & 1).float() for place in range(count)]
    for low, high in list_comparisons(count):
        found[low], found[high] = torch.minimum(found[low], found[high]), torch.maximum(found[low], found[high])
    assert all(bool((one <= other).all()) for one, other in pairwise(found))


def test_the_sign_of_zero_does_not_depend_on_the_order(tmp_path: Path) -> None:
    """The sum of zeros is -0 where all are -0, else 0, in whatever order they come."""
    values = [torch.tensor([0.0, -0.0, -0.0, -0.0]), torch.tensor([-0.0, 0.0, -0.0, -0.0])]
    for number, each in enumerate(values):
        dc.save({"w": whole("w", each)}, tmp_path / f"{number}")
    for order in ("01", "10"):
        merge_checkpoints([tmp_path / name for name in order], tmp_path / f"new-{order}")
        assert read(tmp_path / f"new-{order}")["w"].signbit().tolist() == [False, False, True, True]


def slerp(one: torch.Tensor, other: torch.Tensor, part: float) -> np.ndarray[Any, Any]:
    """Spherical interpolation of flattened tensors by numpy."""
    a, b = one.double().numpy(), other.double().numpy()
    angle = np.arccos((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    return np.asarray((np.sin((1 - part) * angle) * a + np.sin(part * angle) * b) / np.sin(angle))


def test_slerp(tmp_path: Path) -> None:
    """Slerp goes along the sphere of each flattened tensor, from complex to real, too; of parallel ones on a line."""
    torch.manual_seed(3)
    state = [{"w": torch.randn(60, 70), "same": torch.ones(9), "zero": torch.zeros(4)} for _ in range(2)]
    state[0]["mixed"], state[1]["mixed"] = torch.tensor([1j]), torch.tensor([1.0])
    for number, values in enumerate(state):
        dc.save({key: whole(key, value * (1 + number)) for key, value in values.items()}, tmp_path / f"{number}")
    merge_checkpoints([tmp_path / "0", tmp_path / "1"], tmp_path / "new", slerp=0.25, accumulate="fp64")
    found = read(tmp_path / "new")
    np.testing.assert_allclose(found["w"], slerp(state[0]["w"], 2 * state[1]["w"], 0.25), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found["mixed"], [2 * math.sin(math.pi / 8) + 1j * math.cos(math.pi / 8)], rtol=1e-6)
    assert found["same"].eq(1.25).all()
    assert found["zero"].eq(0).all()


def save_trained(path: Path, number: int, **more: Any) -> Path:
    """A checkpoint of a model with its optimizer."""
    state = {
        "w": whole("model.w", torch.full((4, 4), float(number))),
        "count": whole("model.count", torch.tensor(7)),
        "moment": whole("optimizer.state.exp_avg.w", torch.full((4, 4), 10.0 * number)),
        "groups": ShardedObject("optimizer.groups", {"lr": number}, (1,), (0,)),
        "rng": ShardedObject("rng", number, (1,), (0,)),
        "optimizer": {"step": number},
        "step": number,
        **more,
    }
    dc.save(state, path)
    return path


@table(("optimizer", "moment"), [("average", 15.0), ("base", 10.0), ("drop", None)])
def test_optimizer_and_common_state(tmp_path: Path, optimizer: Any, moment: float | None) -> None:
    """Optimizer state is averaged, that of the base, or gone; objects and common state are the base's."""
    sources = [save_trained(tmp_path / f"{n}", n) for n in (1, 2)]
    report = merge_checkpoints(sources, tmp_path / "new", optimizer=optimizer, base=0)
    found = read(tmp_path / "new")
    assert found["model.w"].eq(1.5).all()
    assert found["model.count"] == 7
    with dc.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.common["step"] == 1
        objects = {key.split("/")[0]: checkpoint.read_object(key) for key in checkpoint.objects}
        if moment is None:
            assert sorted(found) == ["model.count", "model.w"]
            assert "optimizer" not in checkpoint.common
            assert objects == {"rng": 1}
            left_out = {key.split("/")[0] for key in report.conversion.left_out}
            assert left_out == {"optimizer", "optimizer.groups", "optimizer.state.exp_avg.w"}
        else:
            assert found["optimizer.state.exp_avg.w"].eq(moment).all()
            assert objects == {"rng": 1, "optimizer.groups": {"lr": 1}}


def test_missing_tensors(tmp_path: Path) -> None:
    """A tensor that a source lacks is an error that names both, or is dropped, or merged from those that have it."""
    one = save_trained(tmp_path / "1", 1, more=whole("model.more", torch.ones(2)))
    two, three = (save_trained(tmp_path / f"{n}", n, more=whole("model.more", torch.ones(2) * n)) for n in (2, 3))
    four = save_trained(tmp_path / "4", 4)
    with pytest.raises(KeyMismatchError, match=r"1 of 4 are not in .*4 \('model.more'\).*--missing"):
        merge_checkpoints([one, two, four], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    report = merge_checkpoints([one, two, four], tmp_path / "new", missing="drop")
    assert report.conversion.left_out == ("model.more",)
    merge_checkpoints([one, three, four], tmp_path / "all", missing="available", weights=[1, 3, 9])
    assert read(tmp_path / "all")["model.more"].eq(2.5).all()
    for weights in ([1, -1, 9], [0, 0, 1], [1, -1.0000001, 9]):
        with pytest.raises(
            CheckpointingException, match=r"'model.more' is in .*1, .*3 alone, whose weights .* not be 0"
        ):
            merge_checkpoints(
                [one, three, four], tmp_path / "no", missing="available", weights=weights, optimizer="drop"
            )


def test_scales_stay_with_the_tensor_that_they_scale(tmp_path: Path) -> None:
    """A merge says what scales a tensor that its base lacks, and nothing of scales that it leaves out."""
    codes, scales = whole("codes", torch.ones(2, 4).to(torch.float8_e4m3fn)), whole("scales", torch.ones(2, 2))
    codes.block_scales = BlockScales("scales", (1, 2))
    dc.save({"codes": codes, "scales": scales}, tmp_path / "1", "safetensors")
    dc.save({"other": whole("other", torch.ones(2))}, tmp_path / "2", "safetensors")
    sources = [tmp_path / "1", tmp_path / "2"]
    merge_checkpoints(sources, tmp_path / "all", "safetensors", missing="available")
    assert dc.load_tensors_metadata(tmp_path / "all")["codes"].block_scales == BlockScales("scales", (1, 2))
    merge_checkpoints(sources, tmp_path / "one", "safetensors", missing="available", leave_out=["scales"], base=0)
    assert dc.load_tensors_metadata(tmp_path / "one")["codes"].block_scales is None


def test_what_cannot_be_merged_is_named(tmp_path: Path) -> None:
    """Integers that differ, shapes that differ, and bad weights are errors that say which and what to do."""
    one = save_trained(tmp_path / "1", 1)
    two = save_trained(tmp_path / "2", 2, count=whole("model.count", torch.tensor(8)))
    with pytest.raises(CheckpointingException, match=r"'model.count' has other values in .*2 than in .*--leave-out"):
        merge_checkpoints([one, two], tmp_path / "new")
    merge_checkpoints([one, two], tmp_path / "fine", leave_out=["model.count"])
    assert "model.count" not in read(tmp_path / "fine")
    three = save_trained(tmp_path / "3", 3, w=whole("model.w", torch.ones(3, 4)))
    with pytest.raises(ShapeMismatchError, match=r"'model.w' is .*\[4, 4\] in .*1.*\[3, 4\] in .*3"):
        merge_checkpoints([one, three], tmp_path / "new")
    for options, what in (
        ({"weights": [1, -1]}, "sum, which must not be 0"),
        ({"weights": [1]}, "give one for each"),
        ({"weights": [2, -1]}, "second moments"),
        ({"slerp": 1.5}, "from 0 to 1"),
        ({"leave_out": ["gone"]}, "leave_out: no source has a tensor, object or entry named 'gone'"),
        ({"memory_budget": LEAST - 1}, "to merge takes at least 32MiB"),
        ({"base": 2}, "numbered from 0"),
    ):
        with pytest.raises(CheckpointingException, match=what):
            merge_checkpoints([one, one], tmp_path / "new", **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="two checkpoints or more"):
        merge_checkpoints([one], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_damage_is_found(tmp_path: Path) -> None:
    """A flipped bit in a source is an error that names the key, and nothing is written."""
    sources = [save_trained(tmp_path / f"{n}", n) for n in (1, 2)]
    file = next((tmp_path / "1").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    where = content.find(torch.full((4, 4), 1.0).numpy().tobytes())
    content[where] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointingException, match=r"model\.w"):
        merge_checkpoints(sources, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_averaged_step_counts_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The step of AdamW is a tensor a parameter, and becomes the average: a warning says so, with the ways out."""
    places = []
    for count in (1, 3):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(count):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        places.append(tmp_path / f"step-{count}")
        dc.save(to_sharded_state_dict(model, optimizer), places[-1])
    merge_checkpoints(places, tmp_path / "base", optimizer="base")
    merge_checkpoints(places, tmp_path / "folder", to="hf")
    assert "step counts" not in caplog.text
    merge_checkpoints(places, tmp_path / "merged")
    assert "step counts are averaged as its moments are (optimizer." in caplog.text
    assert "optimizer='base' or 'drop'" in caplog.text


def test_sources_and_numbers_are_any_lists_and_numpys_numbers(tmp_path: Path) -> None:
    """An iterator of sources, an array of weights, and a number of numpy's give what lists and Python's give."""
    for name in "ab":
        dc.save({"w": whole("w", torch.full((3,), float(ord(name))))}, tmp_path / name)
    sources = [tmp_path / name for name in "ab"]
    report = merge_checkpoints(iter(sources), tmp_path / "1", weights=np.array([1, 3]), base=np.int64(0))  # type: ignore[arg-type]
    assert (report.weights, report.base, type(report.base)) == ((0.25, 0.75), 0, int)
    assert read(tmp_path / "1")["w"].tolist() == [97.75] * 3
    report = merge_checkpoints(sources, tmp_path / "2", slerp=np.float32(0.25))  # type: ignore[arg-type]
    assert [type(weight) for weight in report.weights] == [float, float]


@table(
    ("options", "message"),
    [
        ({"sources": "ab"}, "sources='ab': give a list of checkpoints"),
        ({"sources": {"a", "b"}}, "sources=.*: give a list of checkpoints, in their order"),
        ({"sources": None}, "sources=None: give a list"),
        ({"weights": "12"}, "weights='12': give a list of numbers"),
        ({"weights": {1, 2}}, "weights=.*: give a list of numbers, in their order"),
        ({"weights": 0.5}, "weights=0.5: give a list of numbers"),
        ({"slerp": "0.5"}, "slerp='0.5': expected a number"),
        ({"base": None}, "base=None: expected a whole number"),
        ({"base": 0.5}, "base=0.5: expected a whole number"),
        ({"accumulate": ["fp32"]}, "expected 'fp32' or 'fp64'"),
    ],
    ids=str,
)
def test_values_that_no_merge_has_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """No raw error, no letters of a text as sources, and no weights in an order that nobody has said."""
    sources = options.pop("sources", ["a", "b"])
    with pytest.raises(CheckpointingException, match=message):
        merge_checkpoints(sources, tmp_path / "new", **options)
