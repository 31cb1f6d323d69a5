"""A cast that changes a value is an error, at every door, unless it is asked for."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import CheckpointingException, DtypeMismatchError
from shardckpt.huggingface import load_from_huggingface
from shardckpt.local import TensorAwareStateDict
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from shardckpt.tensors import casts
from tests import backends
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

INF, NAN = float("inf"), float("nan")
#: Stored values, the wanted dtype, and the first value that it cannot hold.
CHANGED = [
    (torch.tensor([3, 2**24 + 1], dtype=torch.int32), torch.float32, 2**24 + 1),
    (torch.tensor([-(2**24) - 1]), torch.float32, -(2**24) - 1),
    (torch.tensor([2**53 + 1]), torch.float64, 2**53 + 1),
    (torch.tensor([2**63 - 1]), torch.float32, 2**63 - 1),
    (torch.tensor([257]), torch.bfloat16, 257),
    (torch.tensor([70000]), torch.float16, 70000),
    (torch.tensor([2**24 + 1]), torch.complex64, 2**24 + 1),
    (torch.tensor([2**24 + 1], dtype=torch.uint32), torch.float32, 2**24 + 1),
    (torch.tensor([-1]).view(torch.uint64), torch.float64, 2**64 - 1),
    (torch.tensor([1.0, 65520.0]), torch.float16, 65520.0),
    (torch.tensor([NAN, INF, -1e6]), torch.float16, -1e6),
    (torch.tensor([1e5]).bfloat16(), torch.float16, 99840.0),
    (torch.tensor([1e39], dtype=torch.float64), torch.float32, 1e39),
    (torch.tensor([torch.finfo(torch.float32).min]), torch.bfloat16, torch.finfo(torch.float32).min),
    (torch.tensor([1e39], dtype=torch.float64), torch.complex64, 1e39),
    (torch.tensor([1 + 1e39j], dtype=torch.complex128), torch.complex64, 1e39),
    (torch.tensor([1e6]), torch.float8_e5m2, 1e6),
    (torch.tensor([1e6]), torch.float8_e4m3fn, 1e6),
    (torch.tensor([57344.0]).to(torch.float8_e5m2), torch.float8_e4m3fn, 57344.0),
    (torch.tensor(2**24 + 1), torch.float32, 2**24 + 1),
    (torch.tensor([NAN, 1.0, -INF]), torch.float8_e4m3fn, -INF),
    (torch.tensor([1.0, INF]).to(torch.float8_e5m2), torch.float8_e5m2fnuz, INF),
    (torch.tensor([2.0, -4.0]), torch.float8_e8m0fnu, -4.0),
    (torch.tensor([2.0, -4.0]).to(torch.float8_e4m3fn), torch.float8_e8m0fnu, -4.0),
]
#: Stored values and a dtype that holds them or their nearest.
KEPT = [
    (torch.tensor([2**24, -(2**24), 2**40, 1001]), torch.float32),
    (torch.tensor([2**63 - 2**39, -(2**63)]), torch.float32),
    (torch.tensor([256, 254]), torch.bfloat16),
    (torch.tensor([-(2**63)]).view(torch.uint64), torch.float64),
    (torch.tensor([65519.0, -65504.0, 1e-9, 1 / 3]), torch.float16),
    (torch.tensor([INF, -INF, NAN, 1 / 3]), torch.float16),
    (torch.tensor([INF, 1e38, 0.1]), torch.bfloat16),
    (torch.tensor([448.0, 1.0]).to(torch.float8_e5m2), torch.float8_e4m3fn),
    (torch.tensor([460.0, -0.3, NAN]), torch.float8_e4m3fn),
    (torch.tensor([-INF, INF, 1.0]).bfloat16(), torch.float8_e5m2),
    (torch.tensor([0.25, 3.1, 1e-30, NAN]), torch.float8_e8m0fnu),
    (torch.tensor([]), torch.float16),
    (torch.tensor([True]), torch.float16),
]


def _save(path: Path, stored: torch.Tensor) -> None:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", stored)}, path)


def _want(stored: torch.Tensor, wanted: torch.dtype, *, with_data: bool = True) -> dict[str, Any]:
    into = torch.zeros(stored.shape, dtype=torch.float32).to(wanted)
    shard = ShardedTensor.from_rank_offsets("w", into)
    return {"w": shard if with_data else shard.without_data()}


@table(
    "stored, wanted",
    [(torch.float32, torch.float16), (torch.float32, torch.float8_e5m2), (torch.complex128, torch.complex64)],
)
def test_a_value_in_any_piece_is_found(
    stored: torch.dtype, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at a piece at a time, to save memory, is looked at to its end, whatever its strides."""
    monkeypatch.setattr(casts, "_PIECE", 4)
    values = torch.ones(3, 7, dtype=stored)
    for tensor in (values, values.t()):
        assert not casts.may_be_changed(tensor.to(wanted), stored)
    values[2, 6] = torch.finfo(stored.to_real()).max
    for tensor in (values, values.t()):
        assert casts.may_be_changed(tensor.to(wanted), stored)


@backends.both_in_proof
@table("stored, wanted, first", CHANGED)
def test_values_that_a_dtype_cannot_hold_are_refused(
    tmp_path: Path, stored: torch.Tensor, wanted: torch.dtype, first: float
) -> None:
    """The error has the key, both dtypes and the first such value; allow_dtype_cast does what torch does."""
    _save(tmp_path / "c", stored)
    text = f"'w': stored {stored.dtype}, wanted {wanted}: {first} would be "
    for with_data in (True, False):
        with pytest.raises(DtypeMismatchError, match=re.escape(text)) as caught:
            dc.load(_want(stored, wanted, with_data=with_data), tmp_path / "c")
        assert "allow_dtype_cast=True" in str(caught.value)
    loaded = dc.load(_want(stored, wanted), tmp_path / "c", allow_dtype_cast=True)["w"]
    assert torch.equal(loaded.to(torch.complex128).nan_to_num(), stored.to(wanted).to(torch.complex128).nan_to_num())


@table("stored, wanted", KEPT)
def test_what_is_held_or_rounded_loads(tmp_path: Path, stored: torch.Tensor, wanted: torch.dtype) -> None:
    """Floats are rounded, integers come through exactly, and infinities and nan stay what they are."""
    _save(tmp_path / "c", stored)
    loaded = dc.load(_want(stored, wanted), tmp_path / "c")["w"]
    assert loaded.double().tolist() == pytest.approx(stored.to(wanted).double().tolist(), nan_ok=True)


def _load_parts(path: str, *, fully_parallel: bool) -> None:
    part = torch.zeros(2, dtype=torch.float16)
    shard = ShardedTensor.from_rank_offsets("w", part, (0, dist.get_rank(), dist.get_world_size()))
    dc.load({"w": shard}, path, fully_parallel=fully_parallel)


@pytest.mark.parametrize("fully_parallel", [False, True])
def test_the_error_is_that_of_all_ranks(ranks: Ranks, tmp_path: Path, fully_parallel: bool) -> None:
    """One rank's part has such a value: every rank raises the same error, however many others look again."""
    _save(tmp_path / "c", torch.tensor([1.0, INF, INF, 1e5, 1.0, 2.0]))
    for outcome in ranks.outcomes(3, _Load(fully_parallel=fully_parallel), str(tmp_path / "c")):
        assert "stored torch.float32, wanted torch.float16: 100000.0 would be inf" in outcome.message


class _Load:
    def __init__(self, *, fully_parallel: bool) -> None:
        self.fully_parallel = fully_parallel

    def __call__(self, path: str) -> None:
        _load_parts(path, fully_parallel=self.fully_parallel)


def _layer(dtype: torch.dtype, value: float = 0.0) -> torch.nn.Linear:
    layer = torch.nn.Linear(2, 2).to(dtype)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def test_a_manager_refuses_them_unless_its_configuration_allows_them(tmp_path: Path) -> None:
    """The error names the option of the configuration; with it the model has what torch casts."""

    def manage(layer: torch.nn.Module, **options: Any) -> CheckpointManager:
        return CheckpointManager(CheckpointConfig(folder=str(tmp_path), **options), {"model": layer})

    with manage(_layer(torch.float32, 1e5)) as manager:
        manager.save(1, force=True)
    with manage(_layer(torch.float16)) as manager, pytest.raises(DtypeMismatchError) as caught:
        manager.load()
    assert "'model.weight': stored torch.float32, wanted torch.float16: 100000.0 would be inf" in str(caught.value)
    assert "CheckpointConfig(allow_dtype_cast=True)" in str(caught.value)
    layer = _layer(torch.float16)
    with manage(layer, allow_dtype_cast=True) as manager:
        manager.load()
    assert layer.weight.isinf().all()


def test_a_hugging_face_folder_is_no_exception(tmp_path: Path) -> None:
    """Weights that overflow in the model's dtype are an error by their key, unless they are asked for."""
    save_file({"weight": torch.full((2, 2), 1e5), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    layer = _layer(torch.float16)
    with pytest.raises(DtypeMismatchError, match=r"'weight'.*100000\.0 would be inf") as caught:
        load_from_huggingface(to_sharded_state_dict(layer), tmp_path)
    assert "allow_dtype_cast=True" in str(caught.value)
    load_from_huggingface(to_sharded_state_dict(layer), tmp_path, allow_dtype_cast=True)
    assert layer.weight.isinf().all()
    config = {"folder": str(tmp_path / "steps"), "initial_load_path": str(tmp_path), "initial_load_in_hf": True}
    with CheckpointManager(CheckpointConfig(**config), {"model": layer}) as manager, pytest.raises(DtypeMismatchError):
        manager.load()
    with CheckpointManager(CheckpointConfig(**config, allow_dtype_cast=True), {"model": layer}) as manager:
        assert manager.load()


@table(
    "value, wanted, said",
    [
        (torch.full((2, 2), 1e5), torch.float16, r"100000\.0 would be inf"),
        (torch.full((2, 2), 1 + 1e39j, dtype=torch.complex128).conj(), torch.complex64, r"-1e\+39 would be -inf"),
        (torch.full((2, 2), 1.5), torch.int32, r"stored torch\.float32, wanted torch\.int32"),
    ],
)
def test_load_into_refuses_them_before_it_changes_anything(
    tmp_path: Path, value: torch.Tensor, wanted: torch.dtype, said: str
) -> None:
    """Values that a caller hands over in another dtype are looked at before the first parameter changes."""
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(torch.zeros(2))
    module.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=wanted), requires_grad=False)
    with pytest.raises(DtypeMismatchError, match=rf"(?s)'weight'.*{said}"):
        load_into({"first": torch.ones(2), "weight": value}, module)
    assert not module.first.any()
    load_into({"first": torch.ones(2), "weight": torch.ones(2, 2, dtype=torch.bfloat16).to(wanted)}, module)
    assert module.first.all()


def test_checkpoints_in_memory_are_no_exception() -> None:
    """A tensor-aware state dict gives no values that a dtype cannot hold, unless they are asked for."""
    stored = torch.tensor([2**24 + 1])
    kept, _ = TensorAwareStateDict.from_state_dict({"w": ShardedTensor.from_rank_offsets("w", stored)}, algo="atomic")
    for with_data in (True, False):
        wanted = _want(stored, torch.float32, with_data=with_data)
        with pytest.raises(CheckpointingException, match="16777217 would be 16777216"):
            kept.to_state_dict(wanted, algo="atomic")
    loaded = kept.to_state_dict(_want(stored, torch.float32), algo="atomic", allow_dtype_cast=True)
    assert math.isclose(loaded["w"].item(), 2**24)


def test_a_conjugate_view_is_filled_with_a_cast(tmp_path: Path) -> None:
    """A destination that is a lazy conjugate gets values of another dtype, as any other does."""
    _save(tmp_path / "c", torch.tensor([1 + 2j, -3j], dtype=torch.complex128))
    into = torch.zeros(2, dtype=torch.complex64).conj()
    dc.load({"w": ShardedTensor.from_rank_offsets("w", into)}, tmp_path / "c")
    assert into.tolist() == [1 + 2j, -3j]
