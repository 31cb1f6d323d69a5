from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

from shardckpt.archive import Archive, LazyTensor
from shardckpt.errors import CorruptCheckpointError
from tests.torch_checkpointing.golden import GOLDEN


def describe(data: bytes) -> tuple[Any, int]:
    """Return what an archive has, and how many bytes were read of it."""
    count = 0

    def read(offset: int, nbytes: int) -> bytes:
        nonlocal count
        count += nbytes
        return data[offset : offset + nbytes]

    return Archive(read, len(data), "here").describe(), count


def test_tensors_are_located_without_being_read() -> None:
    """The structure of an archive with a large tensor takes few bytes; the payload is where the values are."""
    stream = io.BytesIO()
    torch.save({"large": torch.arange(1 << 18), "step": 3}, stream)
    found, count = describe(stream.getvalue())
    payload = found["large"].payload
    assert found["step"] == 3
    assert count < 1 << 14
    assert (payload.dtype, payload.shape, payload.crc != 0) == (torch.int64, (1 << 18,), True)
    values = torch.frombuffer(bytearray(stream.getvalue()[payload.offset :][: payload.nbytes]), dtype=torch.int64)
    assert torch.equal(values, torch.arange(1 << 18))


def test_dtensors_are_described_by_their_local_tensor_and_mesh() -> None:
    """The spec of a pickled DTensor is an inert stub with the mesh's coordinates and the placements."""
    found, _ = describe((GOLDEN / "mesh-4" / "model_3.pt").read_bytes())
    weight = found["0.weight"]
    assert isinstance(weight, LazyTensor)
    assert (weight.global_shape, weight.payload.shape) == ((8, 6), (2, 6))
    assert weight.spec is not None
    assert weight.spec.mesh.state["_coordinate_on_dim"] == (1, 1)
    assert [type(placement).__name__ for placement in weight.spec.placements] == ["_StridedShard", "Shard"]


class _Rebuilt:
    """Pickles as a DTensor without its parts."""

    def __reduce__(self) -> Any:
        arguments = (torch.Tensor, torch.float32, (2,), (1,), 0, torch.strided, torch.device("cpu"), False)
        rebuild = torch._tensor._rebuild_from_type_v2
        return rebuild, (torch._utils._rebuild_wrapper_subclass, torch.Tensor, arguments, {})


def test_a_dtensor_without_its_parts_is_an_error() -> None:
    """A pickle that names a wrapper and gives it no local tensor is refused."""
    stream = io.BytesIO()
    torch.save([_Rebuilt()], stream, pickle_module=pickle)
    with pytest.raises(CorruptCheckpointError, match="a DTensor has no local tensor"):
        describe(stream.getvalue())
