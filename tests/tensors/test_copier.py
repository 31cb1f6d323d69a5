from __future__ import annotations

import pytest
import torch

from shardckpt.tensors.copier import Copier
from shardckpt.tensors.memory import LARGE, tensor_bytes
from tests.tables import table


def _bytes(tensor: torch.Tensor, most: int) -> bytes:
    copier = Copier(tensor, most)
    found = []
    for piece in copier.pieces():
        assert piece.nbytes <= most
        found += [bytes(part) for part in copier.copy_piece(piece)]
    return b"".join(found)


@table("most", [8, 24, 100, LARGE - 1])
@table(
    "tensor",
    [
        torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1),
        torch.arange(90.0).view(9, 10)[1::2, 2:7],
        torch.arange(7, dtype=torch.int64).expand(5, 7),
        torch.arange(12.0).view(3, 4).t().to(torch.float8_e4m3fn),
        torch.tensor(3.0, dtype=torch.float64),
        torch.empty(0, 3),
    ],
    ids=["permuted", "strided", "expanded", "float8", "0-D", "empty"],
)
def test_pieces_are_the_tensor_in_row_major_order(tensor: torch.Tensor, most: int) -> None:
    """However a tensor lies in memory, and however small the pieces, their bytes are those of its values in order."""
    assert _bytes(tensor, most) == bytes(tensor_bytes(tensor.contiguous()))


def test_one_buffer_is_used_for_all_pieces() -> None:
    """No piece takes memory of its own: the next one's copy is where the last one's was."""
    copier = Copier(torch.arange(1000.0).view(10, 100).t(), 80)
    parts = [copier.copy_piece(piece)[0] for piece in copier.pieces()]
    assert len({bytes(part) for part in parts}) == 1


def test_pieces_that_would_be_written_from_the_buffer_are_refused() -> None:
    """Pieces that a writer does not join at once are refused: the next one would be written in their place."""
    with pytest.raises(ValueError, match=f"pieces of {LARGE} bytes"):
        Copier(torch.zeros(3), LARGE)
