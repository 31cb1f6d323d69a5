"""What is saved and loaded: global tensors by key, the same for every adapter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ITEMSIZE = {"bfloat16": 2, "float32": 4}
#: A slice of a tensor is one part of so many, along its rows.
SLICES = 64


class Spec(NamedTuple):
    """A global tensor; every extent is a multiple of 16, those of large tensors of 64."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def sliced(self) -> bool:
        """Whether a slice of its rows is loaded, where slices are."""
        return len(self.shape) > 1 and self.shape[0] % SLICES == 0


def specs(workload: str, scale: float) -> list[Spec]:
    """The tensors of a workload, with about ``scale`` times its bytes."""
    return list(WORKLOADS[workload](scale))


def _big(scale: float) -> Iterator[Spec]:
    """8 tensors, 1 GiB."""
    shape = (_extent(4096, scale), _extent(8192, scale))
    return (Spec(f"big.{number}", shape, "float32") for number in range(8))


def _tiny(scale: float) -> Iterator[Spec]:
    """10,000 tensors of 1 KiB."""
    return (Spec(f"tiny.{number}", (16, 16), "float32") for number in range(_count(10_000, scale)))


def _small(scale: float) -> Iterator[Spec]:
    """20,000 tensors of 4 to 64 KiB, 0.36 GiB."""
    sizes = (1, 1, 2, 2, 4, 4, 8, 16)
    count = _count(20_000, scale)
    return (Spec(f"small.{n}", (16 * sizes[n % len(sizes)], 64), "float32") for n in range(count))


def _llama(scale: float) -> Iterator[Spec]:
    """4 blocks and an embedding in bf16, their two Adam moments in fp32: 2 GiB."""
    hidden, inner = _extent(2048, scale), _extent(5632, scale)
    groups = _extent(512, scale)
    blocks = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (groups, hidden),
        "self_attn.v_proj": (groups, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (_extent(16384, scale), hidden)}
    shapes |= {f"layers.{layer}.{name}.weight": shape for layer in range(4) for name, shape in blocks.items()}
    return _with_moments(shapes)


def _moe(scale: float) -> Iterator[Spec]:
    """2 blocks of 64 experts, each expert's matrices by themselves, bf16 and fp32 moments: 2 GiB."""
    hidden, inner = _extent(1024, scale), _extent(512, scale)
    matrices = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        shapes[f"layers.{layer}.attention.weight"] = (4 * hidden, hidden)
        shapes[f"layers.{layer}.router.weight"] = (64, hidden)
        for expert in range(64):
            shapes |= {f"layers.{layer}.experts.{expert}.{name}.weight": s for name, s in matrices.items()}
    return _with_moments(shapes)


def _with_moments(shapes: dict[str, tuple[int, ...]]) -> Iterator[Spec]:
    for key, shape in shapes.items():
        yield Spec(f"model.{key}", shape, "bfloat16")
        yield Spec(f"optimizer.exp_avg.{key}", shape, "float32")
        yield Spec(f"optimizer.exp_avg_sq.{key}", shape, "float32")


def _extent(full: int, scale: float) -> int:
    return max(64, round(full * math.sqrt(scale) / 64) * 64)


def _count(full: int, scale: float) -> int:
    return max(8, round(full * scale))


WORKLOADS: dict[str, Callable[[float], Iterator[Spec]]] = {
    "big": _big,
    "tiny": _tiny,
    "small": _small,
    "llama": _llama,
    "moe": _moe,
}
#: As the table calls them.
TITLES = {
    "big": "few big tensors",
    "tiny": "1 KiB tensors",
    "small": "4-64 KiB tensors",
    "llama": "Llama-like with Adam",
    "moe": "64-expert MoE with Adam",
}

__all__ = ["SLICES", "TITLES", "WORKLOADS", "Spec", "specs"]
