"""Optimizer state of any shape, dtype, layout and type comes back bit for bit: random states, by one rank and two."""

from __future__ import annotations

import copy
import math
import tempfile
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from tests import backends
from tests.adapters.same import list_bits

if TYPE_CHECKING:
    from tests.ranks import Ranks

pytestmark = backends.both_in_proof

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8)
_OTHER_DTYPES = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16, torch.uint32)
#: The first is the parameter's.
_SHAPES = ((6, 4), (), (6,), (4,), (6, 1), (1, 4), (4, 6), (0,), (3, 0), (2, 3, 2), (1,))


def _view(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor with the same values and other strides."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim():
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bits, so that there are NaNs, infinities and subnormal numbers."""
    dtype = draw(st.sampled_from((*_DTYPES, *_OTHER_DTYPES)))
    shape = draw(st.sampled_from(_SHAPES))
    nbytes = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=nbytes, max_size=nbytes)) or b"\0")
    if dtype is torch.bool:
        data = bytearray(each & 1 for each in data)
    tensor = torch.frombuffer(data, dtype=torch.uint8)[:nbytes].view(dtype).view(shape) if nbytes else None
    found = torch.empty(shape, dtype=dtype) if tensor is None else tensor.clone()
    return _view(found, draw(st.sampled_from(["contiguous", "transposed", "strided"])))


_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
)
#: No control characters, and no texts of numbers: keys with NUL are refused, and 1 beside '1' is.
_TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4).filter(lambda text: not text.isdecimal())
_NAMES = st.one_of(st.sampled_from(["step", "exp_avg", "mu", "0", "a.b", "(x)", ""]), _TEXTS)
_VALUES = st.recursive(
    st.one_of(_tensors(), _PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda found: deque(found, maxlen=4)),
        st.dictionaries(st.one_of(_NAMES, st.integers(1, 3)), inner, max_size=3),
        st.dictionaries(_NAMES, inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=6,
)
_STATES = st.dictionaries(_NAMES, _VALUES, max_size=4)


class _Optimizer(torch.optim.Optimizer):
    """An optimizer that never steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def _start(state: Any = None) -> tuple[nn.Module, _Optimizer]:
    """Return a module of one parameter, sharded where there are ranks, and its optimizer with some state."""
    model = nn.Module()
    weight: Any = torch.zeros(_SHAPES[0])
    if dist.is_initialized():
        weight = distribute_tensor(weight, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    model.weight = nn.Parameter(weight)
    optimizer = _Optimizer(model.parameters())
    if state is not None:
        optimizer.state[model.weight] = _shard(copy.deepcopy(state), model.weight)
    return model, optimizer


def _shard(value: Any, param: torch.Tensor) -> Any:
    """Return a state whose tensors of the parameter's shape are sharded as the parameter is."""
    if isinstance(value, torch.Tensor):
        is_like = isinstance(param, DTensor) and value.shape == param.shape and value.is_floating_point()
        return distribute_tensor(value, param.device_mesh, param.placements) if is_like else value  # type: ignore[union-attr]
    if isinstance(value, dict):
        return type(value)((key, _shard(each, param)) for key, each in value.items())
    if isinstance(value, deque):
        return deque((_shard(each, param) for each in value), value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(_shard(each, param) for each in value)
    return value


def _resume(state: Any, path: str) -> tuple[Any, Any]:
    """Return the state that was saved, and what a fresh optimizer has after the load."""
    job, fresh = _start(state), _start()
    dist_checkpointing.save(to_sharded_state_dict(*job), path)
    load_into(dist_checkpointing.load(to_sharded_state_dict(*fresh), path), *fresh)
    return tuple(list_bits(dict(each.state[model.weight])) for model, each in (job, fresh))  # type: ignore[return-value]


@settings(max_examples=150)
@given(_STATES)
def test_any_state_of_a_parameter_comes_back(state: dict[str, Any]) -> None:
    """Tensors of any dtype, shape and strides, numbers, texts, and containers of them, with keys of any type."""
    with tempfile.TemporaryDirectory() as folder:
        saved, loaded = _resume(state, f"{folder}/c")
    assert loaded == saved


def _resume_on_ranks(state: Any, path: str) -> bool:
    saved, loaded = _resume(state, path)
    return bool(saved == loaded)


@settings(max_examples=25)
@given(state=_STATES)
def test_any_state_of_a_sharded_parameter_comes_back(ranks: Ranks, state: dict[str, Any]) -> None:
    """So it does on two ranks: what has the parameter's shape is sharded as it is, the rest is whole on both."""
    with tempfile.TemporaryDirectory() as folder:
        assert all(ranks.run(2, _resume_on_ranks, state, f"{folder}/c"))
