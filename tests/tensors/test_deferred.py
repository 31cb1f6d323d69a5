from __future__ import annotations

import copy
import pickle

import pytest
import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.tensors import DeferredTensor, is_ordinary, is_plain, plain_cpu, tensor_bytes
from shardckpt.testing.tensors import DTYPES
from tests.tables import table


class Reads:
    """Returns values, and counts how often."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.count = 0

    def __call__(self) -> torch.Tensor:
        """Return the values."""
        self.count += 1
        return self.values

    def tensor(self) -> DeferredTensor:
        """A tensor with these values."""
        return DeferredTensor(tuple(self.values.shape), self.values.dtype, self)


@pytest.fixture
def reads() -> Reads:
    """Six floats."""
    return Reads(torch.arange(6.0).view(2, 3))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@table("dtype", DTYPES)
@table("count", [0, 3])
def test_values_are_read_when_bytes_are_needed(dtype: torch.dtype, count: int) -> None:
    """Shape, dtype and size are known without a read; `plain_cpu` reads, once, without a copy."""
    values = torch.ones(count * dtype.itemsize, dtype=torch.uint8).view(dtype)
    reads = Reads(values)
    tensor = reads.tensor().detach()
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == (values.shape, dtype, values.nbytes)
    assert tensor.is_cpu
    assert tensor.is_contiguous()
    assert not is_ordinary(tensor)
    assert not is_plain(tensor)
    assert reads.count == 0
    assert tensor_bytes(plain_cpu(tensor)) == tensor_bytes(values)
    assert plain_cpu(tensor).data_ptr() == values.data_ptr()
    assert reads.count == 2


def test_an_operation_gets_the_values(reads: Reads) -> None:
    """Views, arithmetic, copies and exports of a deferred tensor are those of its values."""
    tensor = reads.tensor()
    for result in (tensor.view(3, 2), tensor[1], tensor + 1, torch.cat([tensor, tensor]), tensor.clone()):
        assert type(result) is torch.Tensor
    assert torch.equal(tensor[:, 1], reads.values[:, 1])
    assert torch.equal(torch.empty(2, 3).copy_(tensor), reads.values)
    assert tensor.cpu().contiguous().numpy().tolist() == tensor.tolist() == reads.values.tolist()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor))])
def test_a_copy_is_an_ordinary_tensor(reads: Reads, duplicate: object) -> None:
    """What is copied deeply or pickled has memory of its own."""
    made = duplicate(reads.tensor())  # type: ignore[operator]
    assert type(made) is torch.Tensor
    assert torch.equal(made, reads.values)
    assert made.data_ptr() != reads.values.data_ptr()


def test_an_error_of_the_read_stays_itself() -> None:
    """The error of a checkpoint that cannot be read keeps its class: it decides whether a read starts over."""

    def read() -> torch.Tensor:
        raise CorruptCheckpointError("digest differs")

    with pytest.raises(CorruptCheckpointError, match="digest differs"):
        plain_cpu(DeferredTensor((2,), torch.float32, read))
