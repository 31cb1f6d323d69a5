from __future__ import annotations

import pytest
import torch

from shardckpt.errors import DtypeMismatchError
from shardckpt.mapping import ShardedTensor
from shardckpt.planning.dtypes import check_dtypes, describe_casts, is_exact, keeps_meaning
from tests.tables import table

FLOATS = (torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _wanted(key: str, dtype: torch.dtype) -> ShardedTensor:
    return ShardedTensor.from_global_shape(key, dtype, (3,))


@table("stored", [torch.bool, *INTEGERS, *FLOATS, *COMPLEX])
@table("wanted", [torch.bool, *INTEGERS, *FLOATS, *COMPLEX])
def test_what_is_kept_comes_back(stored: torch.dtype, wanted: torch.dtype) -> None:
    """A cast keeps the meaning exactly where torch itself casts between the kinds, and integers in their range."""
    if stored in INTEGERS and wanted in INTEGERS:
        values = torch.tensor([torch.iinfo(stored).min, torch.iinfo(stored).max], dtype=stored)
        keeps = values.to(wanted).tolist() == values.tolist()
    else:
        keeps = torch.can_cast(stored, wanted)  # bool < integers < floats < complex numbers
    assert keeps_meaning(stored, wanted) == keeps


@table("stored", [torch.bool, *INTEGERS, *FLOATS[1:], *COMPLEX])
@table("wanted", [*INTEGERS, *FLOATS[1:], *COMPLEX])
def test_an_exact_cast_keeps_every_value(stored: torch.dtype, wanted: torch.dtype) -> None:
    """What is said to be exact brings the outermost values and the smallest steps there and back."""
    if not keeps_meaning(stored, wanted) or not is_exact(stored, wanted):
        return
    if stored == torch.bool or stored in INTEGERS:
        values = [0, 1] if stored == torch.bool else [torch.iinfo(stored).min, torch.iinfo(stored).max]
    else:
        values = [torch.finfo(stored).max, 1 + torch.finfo(stored).eps, torch.finfo(stored).tiny]
    there = torch.tensor(values, dtype=stored).to(wanted)
    there = there.real if wanted.is_complex and not stored.is_complex else there
    assert torch.equal(there.to(stored), torch.tensor(values, dtype=stored))


def test_faults_are_named_with_both_dtypes() -> None:
    """One error has every tensor that would be cut, and none that is merely rounded."""
    wanted = [
        _wanted("a", torch.int32),
        _wanted("b", torch.bool),
        _wanted("c", torch.bfloat16),
        _wanted("d", torch.int8),
    ]
    stored = {"a": torch.float32, "b": torch.uint8, "c": torch.float32, "d": torch.int8}
    with pytest.raises(DtypeMismatchError, match=r"'a': stored torch\.float32, wanted torch\.int32") as caught:
        check_dtypes(wanted, stored, allow_cast=False)
    assert "'b': stored torch.uint8, wanted torch.bool" in str(caught.value)
    assert "allow_dtype_cast=True" in str(caught.value)
    assert "'c'" not in str(caught.value)
    casts = check_dtypes(wanted, stored, allow_cast=True)
    assert casts == {
        (torch.float32, torch.int32): ["a"],
        (torch.uint8, torch.bool): ["b"],
        (torch.float32, torch.bfloat16): ["c"],
    }
    assert describe_casts(casts).startswith(
        "torch.float32 to torch.bfloat16 (1: 'c', ...), torch.float32 to torch.int32"
    )


def test_what_is_not_stored_is_not_compared() -> None:
    """Keys that the checkpoint lacks are another check's."""
    assert check_dtypes([_wanted("w", torch.int32)], {}, allow_cast=False) == {}
