"""The location of a tensor's values in an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class StoredPayload(NamedTuple):
    """The location of a tensor in an archive.

    Attributes:
        stride: Its strides, in elements.
        first: Index of its first element in the storage.
        offset: Where the storage begins in the archive, in bytes.
        nbytes: Size of the storage, in bytes.
        lazy: The lazy view bits, ``conj`` and ``neg``, that are to be applied to the stored values.
        crc: The CRC-32 of the storage; 0 if the writer made none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    offset: int
    nbytes: int
    lazy: frozenset[str] = frozenset()
    crc: int = 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the stored values are the tensor's, in row-major order without gaps."""
        if self.lazy:
            return False
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and 0 not in self.shape:
                return False
            expected *= size
        return True
