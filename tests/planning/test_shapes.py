from __future__ import annotations

import pytest
import torch

from shardckpt.errors import ShapeMismatchError
from shardckpt.mapping import ShardedTensor
from shardckpt.planning.shapes import check_shapes
from tests.tables import table


def _wanted(shape: tuple[int, ...], **fields: bool) -> ShardedTensor:
    return ShardedTensor("w", None, torch.float32, shape, shape, (0,) * len(shape), None, **fields)  # type: ignore[arg-type]


@table(
    ("stored", "wanted", "hint"),
    [
        ((2, 3), (3, 2), "transposed"),
        ((128, 8), (130, 8), r"resize=\["),
        ((4, 2, 3), (2, 3), "1 prepended axes"),
        ((2, 3), (4, 2, 3), "without prepended axes"),
        ((8, 5, 6), (2, 5, 6), "one rank's part"),
        ((2, 3), (5, 7), r"wanted \(5, 7\)$"),
    ],
)
def test_a_mismatch_names_both_shapes_and_the_likeliest_reason(
    stored: tuple[int, ...], wanted: tuple[int, ...], hint: str
) -> None:
    """Another global shape is an error with key, both shapes, and what it looks like."""
    with pytest.raises(ShapeMismatchError, match=rf"'w': stored .*{hint}"):
        check_shapes([_wanted(wanted)], {"w": stored})


def test_what_fits_passes() -> None:
    """Equal shapes, other shapes with leave, and keys that are not stored are no mismatch."""
    check_shapes([_wanted((2, 3))], {"w": (2, 3)})
    check_shapes([_wanted((4, 3), allow_shape_mismatch=True)], {"w": (2, 3)})
    check_shapes([_wanted((4, 3))], {})
    with pytest.raises(ShapeMismatchError):
        check_shapes([_wanted((4, 3), allow_shape_mismatch=True)], {"w": (2, 3, 1)})
