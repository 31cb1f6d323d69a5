from __future__ import annotations

import pytest
import torch

from shardckpt.chunks.casts import check_cast
from shardckpt.errors import ShardingError
from tests.tables import table


@table(
    ("stored", "wanted"),
    [(torch.int4, torch.float32), (torch.int4, torch.complex64), (torch.complex64, torch.float4_e2m1fn_x2)],
)
def test_a_packed_dtype_is_cast_to_no_other(stored: torch.dtype, wanted: torch.dtype) -> None:
    """A cast that torch does not have is refused by the key before anything is read; the others pass without a word."""
    with pytest.raises(ShardingError, match=rf"'w' is stored as {stored}, which torch cannot cast to {wanted}"):
        check_cast("w", stored, wanted)
    check_cast("w", torch.complex64, torch.float32)
    check_cast("w", torch.bfloat16, torch.complex32)
