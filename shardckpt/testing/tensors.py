"""Global tensors, drawn by hypothesis: the sources of shards, and the expected values of every loaded element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from shardckpt.tensors.dtype_names import KNOWN_DTYPES
from shardckpt.testing.memory import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex64, torch.complex128)
#: All that are stored, as far as this torch has them.
DTYPES = tuple(getattr(torch, known.torch_name) for known in KNOWN_DTYPES if hasattr(torch, known.torch_name))


def _wider(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The wide integer dtypes that have all values of one."""
    inner = torch.iinfo(dtype)
    outer = {other: torch.iinfo(other) for other in (torch.int32, torch.int64)}
    return tuple(other for other, has in outer.items() if has.min <= inner.min and inner.max <= has.max)


#: dtypes into which the values of others go in one well-defined way; some of them only with allow_dtype_cast.
CASTS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bool: (torch.uint8, torch.int64, torch.float32),
    **{dtype: (*_wider(dtype), torch.float64, torch.bfloat16) for dtype in INTEGERS},
    **dict.fromkeys(FLOATS, FLOATS),
    **dict.fromkeys(FLOAT8, (torch.float32, torch.bfloat16)),
    **dict.fromkeys(COMPLEX, COMPLEX),
}
MIB = 1 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A global tensor.

    Attributes:
        key: Its name.
        dtype: Its dtype.
        shape: Its shape.
        seed: Of its random bytes.
        constant_axis: An axis along which its values are equal, or None.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    constant_axis: int | None = None

    def values(self) -> torch.Tensor:
        """Return the tensor: random bytes as elements, so that NaNs of all kinds, infinities and denormals occur."""
        shape = tuple(1 if axis == self.constant_axis else size for axis, size in enumerate(self.shape))
        source = torch.Generator().manual_seed(self.seed)
        raw = torch.randint(256, (math.prod(shape) * self.dtype.itemsize,), dtype=torch.uint8, generator=source)
        flat = (raw % 2).bool() if self.dtype == torch.bool else raw.view(self.dtype)
        return plain(flat).view(shape).expand(self.shape).contiguous().view(self.dtype)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """0 to 5 axes of 0 to 20 elements, not more than some ten thousand together."""
    small = st.lists(st.integers(0, 20), max_size=3)
    flat = st.lists(st.integers(0, 6), min_size=4, max_size=5)
    return st.one_of(small, flat).map(tuple)


def large_shapes(dtype: torch.dtype) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 1 to 2 MiB, or a little over 5."""
    elements = st.sampled_from((MIB + 4096, 2 * MIB - 8, 5 * MIB + 72)).map(lambda size: size // dtype.itemsize)
    cut = st.sampled_from(((), (3,), (24,), (6, 8)))
    return st.builds(lambda count, lead: (*lead, -(-count // max(math.prod(lead), 1))), elements, cut)


@st.composite
def tensor_specs(
    draw: st.DrawFn, key: str, *, large: bool = False, dtypes: Sequence[torch.dtype] = DTYPES
) -> TensorSpec:
    """Draw a global tensor of any shape.

    Args:
        draw: By hypothesis.
        key: Its key.
        large: Whether it has 1 to 5 MiB, instead of some kB.
        dtypes: To choose from.
    """
    dtype = draw(st.sampled_from(tuple(dtypes)))
    shape = draw(large_shapes(dtype) if large else shapes())
    constant_axis = draw(st.sampled_from((None, None, None, *range(len(shape)))))
    return TensorSpec(key, dtype, shape, draw(st.integers(0, 999)), constant_axis)
