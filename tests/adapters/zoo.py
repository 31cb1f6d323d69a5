"""A zoo of tiny models: what torch lets a module keep, and how ``torch.save``'s users get it back."""

from __future__ import annotations

import functools
import io
import re
from collections import OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization.observer import PerChannelMinMaxObserver
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, prune

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests import backends
from tests.adapters.own_keys import Scaled
from tests.adapters.same import list_bits

if TYPE_CHECKING:
    from collections.abc import Callable


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random values of any dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype is torch.float4_e2m1fn_x2:
        return draw(seed, *shape, dtype=torch.uint8).view(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


class Holder(nn.Module):
    """A module of the given tensors: parameters are parameters, others are buffers."""

    def __init__(self, **tensors: torch.Tensor | None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def _with_linear(seed: int, **buffers: torch.Tensor | None) -> Holder:
    """Return a holder of buffers with a weight that learns."""
    return Holder(weight=nn.Parameter(draw(seed, 4, 4)), **buffers)


def _linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def _tied(seed: int) -> nn.Module:
    first, last = nn.Embedding(4, 4, _weight=draw(seed, 4, 4)), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, last)


def _one_module_twice(seed: int) -> nn.Module:
    layer = _linear(seed)
    return nn.Sequential(layer, nn.ReLU(), layer)


def _not_persistent(seed: int) -> nn.Module:
    model = _with_linear(seed)
    model.register_buffer("mask", draw(seed, 3), persistent=False)
    return model


def _buffer_is_parameter(seed: int) -> nn.Module:
    model = _linear(seed)
    model.register_buffer("same", model.weight)
    model.register_buffer("detached", model.weight.detach())
    model.register_buffer("transposed", model.weight.detach().t())
    return model


def _parts_of_one(seed: int) -> nn.Module:
    whole = draw(seed, 6)
    return _with_linear(seed, whole=whole, first=whole[:4], second=whole[2:], other=whole[::2])


def _dtypes(seed: int) -> nn.Module:
    dtypes = [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
        *(torch.uint64, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        torch.float4_e2m1fn_x2,
    ]
    return _with_linear(seed, **{f"of_{dtype}".replace(".", "_"): draw(seed, 3, dtype=dtype) for dtype in dtypes})


def _low_precision(seed: int) -> nn.Module:
    frozen = nn.Parameter(draw(seed, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
    learns = (nn.Parameter(draw(seed, 4, 2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16))
    return Holder(codes=frozen, **dict(zip(("bf16", "fp16"), learns, strict=True)))


def _complex_weights(seed: int) -> nn.Module:
    return Holder(weight=nn.Parameter(draw(seed, 4, 2, dtype=torch.complex64)))


def _lazy_bits(seed: int) -> nn.Module:
    conjugate, other = (draw(seed + number, 3, dtype=torch.complex64).conj() for number in range(2))
    return _with_linear(seed, conjugate=conjugate, negative=other.imag)


def _strides(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 4, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_buffer("transposed", draw(seed, 2, 3).t())
    model.register_buffer("strided", draw(seed, 6)[::2])
    model.register_buffer("padded", draw(seed, 4, 4)[:, :3])
    return model


def _frozen(seed: int) -> nn.Module:
    model = nn.Sequential(_linear(seed), _linear(seed + 10))
    model[0].requires_grad_(requires_grad=False)
    return model


class Renaming(nn.Linear):
    """Hooks add, rename and remove keys, and take them back."""

    def __init__(self, seed: int) -> None:
        super().__init__(4, 4)
        self.config: Any = {"seed": seed, "names": ["a", "b"], "nothing": None, "mean": draw(seed, 2)}
        self.weight.data, self.bias.data = draw(seed, 4, 4), draw(seed, 4)
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _save(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}scale/shift"] = state.pop(f"{prefix}weight").clone()
        del state[f"{prefix}bias"]
        state[f"{prefix}config"] = module.config

    @staticmethod
    def _take(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}scale/shift")
        state[f"{prefix}bias"] = module.bias.detach()
        module.config = state.pop(f"{prefix}config")


class Halving(nn.Linear):
    """Stores something else than it has, under the names of its parameters, and no bias."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach() / 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}weight"] * 2)


class Extra(nn.Linear):
    """Has extra state of a given value."""

    def __init__(self, seed: int, extra: Any) -> None:
        super().__init__(4, 4)
        self.weight.data, self.bias.data = draw(seed, 4, 4), draw(seed, 4)
        self.extra = extra

    def get_extra_state(self) -> Any:
        """Return the value."""
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        """Take the value."""
        self.extra = state


def _plain_extra(seed: int) -> Any:
    return {"seed": seed, "texts": ("a", b"b"), "nothing": None, 3: [1.5, float("nan"), 2j], "dtype": torch.float16}


def _extra_tensors(seed: int) -> Any:
    tensors = [draw(seed, 2, 3).t(), draw(seed, 2, dtype=torch.bfloat16), nn.Parameter(draw(seed, 2))]
    return {"tensors": tensors, "empty": draw(seed, 0, 2)}


class Own:
    """No load rebuilds it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed


class Versioned(nn.Linear):
    """Keeps what it was given beside its tensors, and doubles weights without a version."""

    def __init__(self, seed: int) -> None:
        super().__init__(4, 4)
        self.weight.data, self.bias.data = draw(seed, 4, 4), draw(seed, 4)
        self.register_buffer("given", torch.zeros(2), persistent=False)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.given = torch.tensor([float(local_metadata.get(name) or 0) for name in ("version", "layout")])
        if not self.given[0]:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Upgraded(Versioned):
    """Has a version."""

    _version = 3


def _version_of_instance(seed: int) -> nn.Module:
    model = Versioned(seed)
    model._version = 5
    return model


def _marked(seed: int) -> nn.Module:
    """Return a module with more metadata than its version."""
    model = checkpoint_wrapper(Upgraded(seed))
    model._checkpoint_wrapped_module._register_state_dict_hook(lambda *given: given[-1].update(layout=7))
    return nn.Sequential(model)


class Growing(nn.Module):
    """Has a tensor for each of its calls, and takes all that are stored."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(seed, 2))
        self.cache = {f"{n}": draw(seed + n, 2) for n in range(3 if seed % 2 else 1)}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}cache.{n}": each for n, each in self.cache.items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        key = f"{prefix}cache."
        self.cache = {name.removeprefix(key): state_dict.pop(name) for name in list(state_dict) if name.startswith(key)}
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _observer(seed: int) -> nn.Module:
    model = nn.Sequential(PerChannelMinMaxObserver(), _linear(seed))
    if seed % 2:
        model[0](draw(seed, 4, 3))
    return model


def _old_spectral(seed: int) -> nn.Module:
    model = nn.utils.spectral_norm(_linear(seed))
    model(draw(seed, 2, 4))
    return model


def _containers(seed: int) -> nn.Module:
    def parameter(number: int) -> nn.Parameter:
        return nn.Parameter(draw(seed + number, 2))

    names = ["a-b", "a b", "a/b", "a\\b", "(inner)", "0", "été", "%2e", "_versions", "state"]
    model = nn.Module()
    model.list = nn.ParameterList([parameter(0), parameter(1)])
    model.dict = nn.ParameterDict({name: parameter(number) for number, name in enumerate(names)})
    children = {name: Holder(**{name: parameter(number)}) for number, name in enumerate(names)}
    model.modules_ = nn.ModuleDict(children)
    return model


def _names_of_wrappers(seed: int) -> nn.Module:
    """Children that are named as those of wrappers, or as what is stored beside tensors."""
    names = ["_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_versions", "model"]
    found = nn.ModuleDict({name: _linear(seed + number) for number, name in enumerate(names)})
    found["optimizer"] = Holder(state=nn.Parameter(draw(seed, 2)), param_groups=draw(seed, 2))
    return found


def _lazy(seed: int, *, materialised: bool) -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    if materialised:
        torch.manual_seed(seed)
        model(draw(seed, 3, 5))
        model.requires_grad_(requires_grad=False)  # an optimizer takes no lazy parameter
    return model


def _meta_first(seed: int) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.to_empty(device="cpu")
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.copy_(draw(seed + number, *tensor.shape))
    return model


def _spectral(seed: int) -> nn.Module:
    model = parametrizations.spectral_norm(_linear(seed))
    model(draw(seed, 2, 4))  # changes the vectors that it iterates
    return model


def _orthogonal(seed: int) -> nn.Module:
    model = parametrizations.orthogonal(_linear(seed))
    model.weight = nn.init.orthogonal_(draw(seed, 4, 4))  # type: ignore[assignment]
    return model


def _compiled(seed: int) -> nn.Module:
    inner = nn.Sequential(_linear(seed), torch.compile(_linear(seed + 1), backend="eager"))
    return torch.compile(inner, backend="eager")  # type: ignore[return-value]


def _recurrent(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LSTM(4, 4, 2, bidirectional=True, proj_size=2), nn.MultiheadAttention(4, 2, kdim=3, vdim=5))


def _checkpointed(seed: int) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(nn.Sequential(_linear(seed), checkpoint_wrapper(Renaming(seed)))))


def _statistics(seed: int) -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    model(draw(seed, 3, 4))
    return model


class Subclass(torch.Tensor):
    """A tensor of another class, with its values in its own memory."""


class SubclassParameter(nn.Parameter):
    """A parameter of another class."""


def _subclasses(seed: int) -> nn.Module:
    weight = SubclassParameter(draw(seed, 4, 4))
    weight.tag = seed
    return Holder(weight=weight, buffer=draw(seed, 3).as_subclass(Subclass), marked=nn.Buffer(draw(seed, 2)))


def _torchao(seed: int, name: str) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(_seeded(nn.Linear(64, 512, bias=False), seed).bfloat16(), _linear(seed))
    if name == "NF4":
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        model[0].weight = nn.Parameter(nf4.to_nf4(model[0].weight.detach(), 64, 32), requires_grad=False)
    else:
        quantization.quantize_(model[0], getattr(quantization, name)())
        model[0].requires_grad_(requires_grad=False)
    return model


def _any_values(seed: int) -> Any:
    """Return values of classes that a load rebuilds without being told."""
    return {
        "ordered": OrderedDict(b=draw(seed, 2), a=seed),
        "deque": deque([draw(seed, 2), seed], maxlen=3),
        "numpy": [np.arange(seed), np.float32(seed), np.array(["a", "b"])],
        "torch": [torch.Size([seed]), torch.device("cpu"), torch.bfloat16, torch.get_rng_state()],
        "python": [{seed, 2}, frozenset({seed}), seed + 1j, range(seed), 10**40, b"a"],
        (seed, "a"): {None: 1, 2: 3, True: 4},
        "deep": functools.reduce(lambda inner, _: [inner], range(50), seed),
    }


def _aliases(seed: int) -> Any:
    shared = draw(seed, 4)
    return {"one": shared, "same": shared, "view": shared[:2], "list": [shared]}


class Aliased(nn.Linear):
    """Stores its weight under a second name, too, and a tensor of its own before it is asked."""

    def __init__(self, seed: int) -> None:
        super().__init__(4, 4)
        _seeded(self, seed)
        self.seed = seed
        self.register_state_dict_pre_hook(lambda module, *_: module.register_buffer("made", draw(seed, 2)))
        self.register_state_dict_post_hook(self._save)

    @staticmethod
    def _save(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}old.weight"] = state[f"{prefix}weight"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.pop(f"{prefix}old.weight")
        self.register_buffer("made", state_dict[f"{prefix}made"].clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _odd_names(seed: int) -> nn.Module:
    names = [
        "a\nb",
        "a\tb",
        "..".replace(".", "\N{ONE DOT LEADER}"),
        "\N{SNOWMAN}",
        "CON",
        "a" * 300,
        " ",
        "'\"",
        "{x}",
        "%s",
    ]
    return nn.ParameterDict({name: nn.Parameter(draw(seed + number, 2)) for number, name in enumerate(names)})


def _mixed(seed: int) -> nn.Module:
    """Return all that come back, in one."""
    left_out = {
        "mixed",
        *REFUSED,
        *MAY_BE_REFUSED,
        *NOT_SHARDED,
        *(name for each in REFUSED_BY.values() for name in each),
    }
    names = [name for name in ZOO if name not in left_out]
    return nn.Sequential(*(ZOO[name](seed + 2 * number) for number, name in enumerate(names)))


#: Models by name; two of one name with other seeds differ in all values that are stored.
ZOO: dict[str, Callable[[int], nn.Module]] = {
    "tied": _tied,
    "one module twice": _one_module_twice,
    "statistics": _statistics,
    "not persistent": _not_persistent,
    "none, scalar and empty": lambda seed: _with_linear(
        seed, none=None, scalar=draw(seed), empty=draw(seed, 0), rows=draw(seed, 0, 3), columns=draw(seed, 3, 0)
    ),
    "dtypes": _dtypes,
    "low precision": _low_precision,
    "complex weights": _complex_weights,
    "lazy bits": _lazy_bits,
    "buffer is parameter": _buffer_is_parameter,
    "parts of one": _parts_of_one,
    "strides": _strides,
    "frozen": _frozen,
    "hooks": Renaming,
    "own keys": lambda seed: Scaled(float(seed)),
    "other values": lambda seed: _seeded(Halving(4, 4), seed),
    "extra state": lambda seed: Extra(seed, _plain_extra(seed)),
    "extra tensors": lambda seed: Extra(seed, _extra_tensors(seed)),
    "extra None": lambda seed: Extra(seed, None if seed == 1 else 2),
    "extra bytes": lambda seed: Extra(seed, io.BytesIO(bytes([seed]))),
    "extra object": lambda seed: Extra(seed, Own(seed)),
    "extra tensor": lambda seed: Extra(seed, draw(seed, 3)),
    "version of an instance": _version_of_instance,
    "pruned": lambda seed: prune.random_unstructured(_linear(seed), "weight", 0.5),
    "old spectral norm": _old_spectral,
    "extra tensor of another size": lambda seed: Extra(seed, draw(seed, seed, dtype=torch.uint8)),
    "extra tensor of another dtype": lambda seed: Extra(
        seed, draw(seed, 2, dtype=[torch.uint8, torch.float32][seed % 2])
    ),
    "extra tensor or none": lambda seed: Extra(seed, draw(seed, 2) if seed % 2 else None),
    "extra none or tensor": lambda seed: Extra(seed, None if seed % 2 else draw(seed, 2)),
    "growing": lambda seed: nn.Sequential(Growing(seed)),
    "metadata": _marked,
    "observer": _observer,
    "torch's quantized": lambda seed: _with_linear(
        seed, codes=torch.quantize_per_tensor(draw(seed, 4), 0.1 * seed, 3, torch.qint8)
    ),
    "lazy": lambda seed: nn.Sequential(nn.LazyLinear(4), _linear(seed)),
    "lazy target": lambda seed: _lazy(seed, materialised=seed % 2 == 1),
    "no parameters": lambda seed: nn.Sequential(nn.ReLU(), nn.Identity()),
    "versions": lambda seed: nn.Sequential(Upgraded(seed), _linear(seed)),
    "weight norm": lambda seed: parametrizations.weight_norm(_linear(seed)),
    "spectral norm": _spectral,
    "orthogonal": _orthogonal,
    "subclasses": _subclasses,
    "NF4": lambda seed: _torchao(seed, "NF4"),
    "Int8": lambda seed: _torchao(seed, "Int8WeightOnlyConfig"),
    "extra values": lambda seed: Extra(seed, _any_values(seed)),
    "extra slice": lambda seed: Extra(seed, slice(seed)),
    "extra path": lambda seed: Extra(seed, Path(f"{seed}")),
    "extra aliases": lambda seed: Extra(seed, _aliases(seed)),
    "aliases": Aliased,
    "no list": lambda seed: nn.Sequential(nn.ParameterList(), nn.ModuleDict(), _linear(seed)),
    "containers": _containers,
    "odd names": _odd_names,
    "NUL": lambda seed: Holder(**{"a\0b": nn.Parameter(draw(seed, 2))}),
    "names of wrappers": _names_of_wrappers,
    "materialised": lambda seed: _lazy(seed, materialised=True),
    "meta first": _meta_first,
    "meta": lambda seed: nn.Linear(2, 2, device="meta"),
    "expanded": lambda seed: _with_linear(seed, row=draw(seed, 1).expand(5), rows=draw(seed, 3).expand(2, 3)),
    "COO": lambda seed: _with_linear(seed, sparse=draw(seed, 3, 3).relu().to_sparse()),
    "CSR": lambda seed: _with_linear(seed, sparse=draw(seed, 3, 3).relu().to_sparse_csr()),
    "compiled": _compiled,
    "script": lambda seed: torch.jit.script(nn.Sequential(_linear(seed), nn.BatchNorm1d(4))),
    "script and hooks": lambda seed: nn.Sequential(torch.jit.script(_linear(seed)), Renaming(seed)),
    "averaged": lambda seed: torch.optim.swa_utils.AveragedModel(_linear(seed)),
    "recurrent": _recurrent,
    "checkpointed": _checkpointed,
    "mixed": _mixed,
}

#: What torch says of some of them.
WARNINGS = (
    "Sparse CSR tensor support is in beta",
    "torch.quantize_per_tensor",
    "Lazy modules are a new feature",
    "`torch.jit",
)
#: Those that a save refuses, and the key and the reason that its error says.
REFUSED: dict[str, str] = {
    "extra object": r"'model\._extra_state/shard_0_1'.*Own",
    "lazy": r"'model\.0\.weight'.*lazy",
    "torch's quantized": r"'model\.codes'.*torch\.qint8",
    "meta": r"'model\.weight'.*on meta .*no memory",
}
_OF_EXTRA_STATE = r"'model\._extra_state/shard_0_1'.*"
#: The same, of the formats that do.
REFUSED_BY: dict[str, dict[str, str]] = {
    "safetensors": {
        "extra bytes": _OF_EXTRA_STATE + "BytesIO",
        "extra path": _OF_EXTRA_STATE + "PosixPath",
        "extra slice": _OF_EXTRA_STATE + "slice",
        "NUL": r"'model\.a\\x00b' cannot be stored: .*no NUL",
    }
}
#: Those that FSDP2 does not take.
NOT_SHARDED = {
    "strides": "non-contiguous parameters",
    "names of wrappers": "containers that do not implement forward",
    "lazy": "uninitialized parameter",
    "script": "not supported on ScriptModules",
    "script and hooks": "not supported on ScriptModules",
    "Int8": "unimplemented operator",
    "lazy target": "uninitialized parameter",
}
#: Those that a save, or a load, may refuse, if its error says the key.
MAY_BE_REFUSED = {"expanded": r"'model\.rows?'", "COO": r"'model\.sparse'", "CSR": r"'model\.sparse'"}
#: All that the zoo shows in fewer models: those that come back in one, and each that does not.
FEW = ("mixed", *REFUSED, *MAY_BE_REFUSED)


def _seeded(module: nn.Module, seed: int) -> nn.Module:
    for number, tensor in enumerate(module.parameters()):
        tensor.data = draw(seed + number, *tensor.shape)
    return module


def train(model: nn.Module) -> torch.optim.Optimizer | None:
    """Return an optimizer that has made a step with the parameters that learn; None without any."""
    learning = [each for each in model.parameters() if each.requires_grad and not is_lazy(each)]
    if not learning or learning[0].is_meta:
        return None
    optimizer = torch.optim.Adam(learning, lr=0.01)
    torch.stack([each.abs().float().sum() for each in learning]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def read(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the bits of a model's state dict and of all its buffers, the strides, and the bits of its optimizer."""
    tensors = {n: each for n, each in [*model.named_parameters(), *model.named_buffers()] if not is_lazy(each)}
    return {
        "state": list_bits(model.state_dict()),
        "buffers": list_bits(dict(model.named_buffers())),
        "strides": {n: each.stride() for n, each in tensors.items() if each.layout is torch.strided},
        "optimizer": None if optimizer is None else list_bits(optimizer.state_dict()),
    }


def resume_by_torch(saved: Any, fresh: Any) -> None:
    """Load the state dict of a model, or of an optimizer, into another through a file of ``torch.save``."""
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=False))


def check(
    name: str,
    save: Callable[[nn.Module, Any], None],
    load: Callable[[nn.Module, Any], None],
    *,
    by_reference: Callable[[Any, Any], None] = resume_by_torch,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> None:
    """Check that a model and its optimizer come back as from ``torch.save``, or are refused by name at the save.

    Args:
        name: Of the zoo.
        save: Saves the two; without parameters that learn the optimizer is None.
        load: Loads into two fresh ones.
        by_reference: Loads by torch.
        wrap: Shards a model.
    """
    (model, optimizer), (fresh, other), (wanted, wanted_optimizer) = (
        (each, train(each)) for each in (wrap(ZOO[name](1)), wrap(ZOO[name](2)), wrap(ZOO[name](2)))
    )
    refusal = {**REFUSED, **REFUSED_BY.get(backends.current().name, {})}.get(name)
    may_be_refused = MAY_BE_REFUSED.get(name)
    if refusal:
        with pytest.raises(CheckpointingException, match=refusal):
            save(model, optimizer)
        return
    try:
        save(model, optimizer)
        load(fresh, other)
    except CheckpointingException as error:
        if may_be_refused and re.search(may_be_refused, str(error)):
            return
        raise
    if may_be_refused:  # torch does not load it
        wanted, wanted_optimizer = model, optimizer
    else:
        by_reference(model, wanted)
        if optimizer is not None:
            by_reference(optimizer, wanted_optimizer)
    found, expected = read(fresh, other), read(wanted, wanted_optimizer)
    for part in found:
        assert found[part] == expected[part], f"other {part}: {found[part]}, and not {expected[part]}"


def check_manager(name: str, path: Path, mode: Any) -> None:
    """Check what :func:`check` does by a manager.

    Args:
        name: Of the zoo.
        path: The folder of its checkpoints.
        mode: Its ``async_mode``.
    """
    config = CheckpointConfig(folder=str(path), interval=1, async_mode=mode, keep_latest_k=0)

    def manage(model: nn.Module, optimizer: Any) -> CheckpointManager:
        return CheckpointManager(config, {"model": model, **({} if optimizer is None else {"optimizer": optimizer})})

    def save(model: nn.Module, optimizer: Any) -> None:
        with manage(model, optimizer) as manager:
            manager.save(1)

    def load(model: nn.Module, optimizer: Any) -> None:
        with manage(model, optimizer) as manager:
            manager.load()

    check(name, save, load)
