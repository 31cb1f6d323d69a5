"""Tensors as bytes: what has its values in its own memory is used there, all else is converted or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from shardckpt.errors import ShardingError
from shardckpt.tensors.memory import (
    find_host_addresses,
    is_plain,
    plain_cpu,
    synchronize_devices,
    tensor_bytes,
    tensor_bytes_of_each,
    unfilled_bytes,
)
from tests.tables import table

VALUES = torch.arange(6.0)


class Quantized(torch.Tensor):
    """A wrapper as Transformer Engine makes them: 8-bit data and a scale inside, another dtype outside."""

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, dtype: torch.dtype, restored: torch.dtype) -> Any:
        """A tensor without memory of its own."""
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype)
        made.inner, made.restored = data, restored
        return made

    def dequantize(self) -> torch.Tensor:
        """Half of what is inside."""
        return self.inner.to(self.restored) / 2

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """No operation works on it."""
        raise NotImplementedError(func)


class Labelled(torch.Tensor):
    """A subclass with memory of its own."""


def test_bytes_are_the_memory() -> None:
    """Writing into the bytes of a tensor changes the tensor; they keep it alive."""
    tensor = torch.zeros(4, dtype=torch.int32)
    tensor_bytes(tensor)[4:8] = (7).to_bytes(4, "little")
    assert tensor.tolist() == [0, 7, 0, 0]
    assert bytes(tensor_bytes(torch.full((2,), 9, dtype=torch.int8))) == b"\t\t"
    assert tensor_bytes(torch.empty(0, 3)).nbytes == 0


def test_bytes_of_each_are_those_of_one_by_one() -> None:
    """All together, tensors have the bytes that each has alone: empty ones, parts of others, in any order of memory."""
    memory = torch.arange(24.0)
    one = torch.tensor([True, False])
    tensors = [memory[12:], torch.empty(0, 3), one, memory[:5], torch.nn.Parameter(torch.ones(3)), torch.tensor(7)]
    found = tensor_bytes_of_each(tensors)
    assert found is not None
    assert [bytes(view) for view in found] == [bytes(tensor_bytes(tensor)) for tensor in tensors]
    found[2][1] = 1
    assert one.tolist() == [True, True]
    for few in ([], [torch.empty(0)], [torch.empty(0), torch.empty(0, 2)]):
        assert tensor_bytes_of_each(few) == [memoryview(b"")] * len(few)


@table("is_on_host", [True, False])
def test_one_that_is_not_its_memory_is_noticed_among_others(*, is_on_host: bool) -> None:
    """A tensor whose bytes are not its values, anywhere among others, has to be asked for alone."""
    freed = torch.ones(100)
    freed_part = freed[7:]
    freed.untyped_storage().resize_(0)
    with_strides = [
        torch.ones(4, dtype=torch.cfloat).conj(),
        torch._neg_view(torch.ones(4)),
        torch.ones(4, 2)[:, 0],
    ]
    without_memory = [
        freed,
        freed_part,
        torch.ones(2, 2).to_sparse(),
        torch.empty(3, device="meta"),
        TwoTensor(torch.ones(3), torch.ones(3)),
        Labelled(torch.ones(3)),
    ]
    plain = [torch.ones(n) for n in range(5)]
    for odd in with_strides if is_on_host else without_memory:
        for place in (0, 3, 5):
            tensors = [*plain[:place], odd, *plain[place:]]
            assert tensor_bytes_of_each(tensors) is None
            assert (find_host_addresses(tensors) is not None) == is_on_host


@table("view", [torch.ones(4, dtype=torch.cfloat).conj(), torch._neg_view(torch.ones(4)), torch.ones(4, 2)[:, 0]])
def test_views_are_not_their_memory(view: torch.Tensor) -> None:
    """A conj or neg view, or one with gaps, is refused as bytes, and made plain with its values."""
    with pytest.raises(ValueError, match="needs a contiguous CPU tensor without conj or neg bit"):
        tensor_bytes(view)
    plain = plain_cpu(view)
    assert torch.equal(plain, view)
    assert is_plain(plain)
    assert tensor_bytes(plain).nbytes == plain.nbytes


def test_plain_tensors_are_not_copied() -> None:
    """A contiguous CPU tensor is used as it is, parameters and subclasses with their own memory too."""
    for tensor in (VALUES, torch.nn.Parameter(VALUES), VALUES.as_subclass(Labelled)):
        assert plain_cpu(tensor).data_ptr() == VALUES.data_ptr()


@table("restored", [torch.bfloat16, torch.float32])
def test_quantized_wrappers_give_their_values(restored: torch.dtype) -> None:
    """A wrapper that dequantizes is stored as its values, in its outward dtype."""
    wrapper = Quantized(VALUES.to(torch.float8_e4m3fn), torch.bfloat16, restored)
    plain = plain_cpu(wrapper)
    assert not is_plain(wrapper)
    assert type(plain) is torch.Tensor
    assert plain.dtype == torch.bfloat16
    assert plain.tolist() == [0, 0.5, 1, 1.5, 2, 2.5]


def test_quantized_wrappers_that_would_lose_values() -> None:
    """A wrapper whose outward dtype cannot hold what it dequantizes to is refused, with both dtypes."""
    wrapper = Quantized(VALUES.to(torch.float8_e4m3fn), torch.float8_e4m3fn, torch.bfloat16)
    with pytest.raises(ShardingError, match=r"Quantized shows the dtype torch\.float8_e4m3fn .* torch\.bfloat16"):
        plain_cpu(wrapper)


@table(
    ("tensor", "said"),
    [
        (TwoTensor(VALUES, VALUES + 10), r"two_tensor\.TwoTensor"),
        (TwoTensor(VALUES, VALUES + 10)[2:], r"two_tensor\.TwoTensor"),  # not address 0: 8 bytes behind it
        (torch.empty(3, device="meta"), "on meta"),
        (torch.eye(3).to_sparse(), r"torch\.sparse_coo"),
    ],
)
def test_tensors_without_memory_are_refused(tensor: torch.Tensor, said: str) -> None:
    """A tensor without memory of its own is refused with its type and what to do, never read at address 0."""
    assert not is_plain(tensor)
    for convert in (plain_cpu, tensor_bytes):
        with pytest.raises(ShardingError, match=rf"{said}.*shardckpt\.adapters"):
            convert(tensor)


def test_nothing_to_wait_for() -> None:
    """Tensors without a device queue need no accelerator to be synchronized."""
    synchronize_devices([VALUES, torch.empty(2, device="meta"), TwoTensor(VALUES, VALUES)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: there is no stream to wait for")
def test_waits_for_the_side_stream() -> None:
    """What was queued on the caller's side stream is done afterwards."""
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(1)
        synchronize_devices([tensor, VALUES])
        assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("nbytes", [0, 1, 2, 100, 5 << 20])
def test_bytes_that_are_filled_once(nbytes: int) -> None:
    """New bytes hold what was put into their view, are no others' bytes, and outlive the view."""
    expected = bytes(n % 251 for n in range(nbytes))
    data, view = unfilled_bytes(nbytes)
    view[:] = expected
    del view
    assert type(data) is bytes
    assert data == expected
    assert {data: 1}[expected] == 1
    other, view = unfilled_bytes(nbytes)
    view[:] = bytes(255 for _ in range(nbytes))
    assert data == expected
    assert other == b"\xff" * nbytes
