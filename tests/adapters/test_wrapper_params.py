"""Quantized parameters of modules: their bits are stored; values are loaded where a checkpoint has values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, register_tensor_class, to_sharded_state_dict
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

_ROWS, _COLUMNS = 64, 64


class _Blocks(torch.Tensor):
    """A weight of 8-bit codes, a scale for each 32 elements, and a table that all share."""

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, *_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, kind: str = "linear") -> None:
        self.codes, self.scale, self.table, self.kind = codes, scale, table, kind

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale", "table"], {"kind": self.kind, "of": object}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: dict[str, Any], *_: Any) -> _Blocks:
        return cls(inner["codes"], inner["scale"], inner["table"], context["kind"])

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """Return the values."""
        values = self.table[self.codes.long()].view(-1, 32) * self.scale.view(-1, 1)
        return values.view(self.shape)

    def quantize_(self, values: torch.Tensor) -> None:
        """Take values."""
        blocks = values.reshape(-1, 32)
        self.scale.copy_(blocks.abs().amax(1))
        scaled = (blocks / self.scale.view(-1, 1)).view(self.shape)
        self.codes.copy_((scaled.unsqueeze(-1) - self.table).abs().argmin(-1))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):  # a view of the same shape
            self = args[0]
            return cls(self.codes, self.scale, self.table, self.kind)
        raise NotImplementedError(str(func))


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_tensor_class(_Blocks, shared=["table"])


def _make(seed: int, kind: str = "linear") -> nn.Module:
    """Return a module with a quantized weight, sharded by rows where there are ranks."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (_ROWS, _COLUMNS), generator=generator, dtype=torch.uint8)
    scale = torch.rand(_ROWS * _COLUMNS // 32, generator=generator)
    table = torch.linspace(-1, 1, 256)
    model = nn.Linear(_COLUMNS, _ROWS, bias=False)
    if dist.is_initialized():
        world, rank = dist.get_world_size(), dist.get_rank()
        local = _Blocks(codes.chunk(world)[rank].clone(), scale.chunk(world)[rank].clone(), table, kind)
        mesh = init_device_mesh("cpu", (world,))
        weight: Any = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    else:
        weight = _Blocks(codes, scale, table, kind)
    model.weight = nn.Parameter(weight, requires_grad=False)
    return model


def _read(model: Any) -> list[Any]:
    """Return the codes and scales, whole."""
    weight = model.weight.data if isinstance(model.weight, DTensor) else model.weight
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    parts: list[Any] = [(local.codes, local.scale)]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (local.codes, local.scale))
    return [torch.cat(each).tolist() for each in zip(*parts, strict=True)]


def _save(path: str, seed: int = 1) -> list[Any]:
    model = _make(seed)
    dist_checkpointing.save(to_sharded_state_dict(model), path)
    return _read(model)


def _load(path: str) -> list[Any]:
    model = _make(seed=2)
    load_into(dist_checkpointing.load(to_sharded_state_dict(model), path), model)
    return _read(model)


@table(("saving", "loading"), [(2, 2), (4, 2), (2, 4)])
def test_codes_and_scales_of_a_sharded_parameter_are_those_that_were_saved(
    tmp_path: Path, ranks: Ranks, saving: int, loading: int
) -> None:
    """Another number of ranks has the codes and scales of a sharded parameter as they were saved."""
    saved = ranks.run(saving, _save, str(tmp_path / "c"))
    assert ranks.run(loading, _load, str(tmp_path / "c")) == [saved[0]] * loading


def test_a_manager_stores_the_bits_of_a_quantized_parameter(tmp_path: Path) -> None:
    """A manager resumes a quantized parameter bit for bit."""
    saved, model = _make(1), _make(2)
    for each, step in ((saved, "save"), (model, "load")):
        with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "c"), interval=1), {"model": each}) as manager:
            manager.save(1) if step == "save" else manager.load()
    assert _read(model) == _read(saved)


def test_values_that_are_stored_are_quantized_anew(tmp_path: Path) -> None:
    """The checkpoint of a model that was not quantized is loaded into one that is."""
    dense, model = nn.Linear(_COLUMNS, _ROWS, bias=False), _make(2)
    dist_checkpointing.save(to_sharded_state_dict(dense), tmp_path / "c")
    load_into(dist_checkpointing.load(to_sharded_state_dict(model), tmp_path / "c"), model)
    wanted: Any = _make(2)
    wanted.weight.quantize_(dense.weight.detach())
    assert _read(model) == _read(wanted)


def test_bits_that_mean_something_else_are_refused(tmp_path: Path) -> None:
    """A load into a tensor of the class with other flags says so."""
    dist_checkpointing.save(to_sharded_state_dict(_make(1)), tmp_path / "c")
    with pytest.raises(ShardingError, match=r"'kind': 'linear'.*loaded into.*'kind': 'log'.*quantize the model"):
        dist_checkpointing.load(to_sharded_state_dict(_make(1, "log")), tmp_path / "c")


class _Scaled(torch.Tensor):
    """A weight that is a multiple of the tensor inside it."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, scale: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor, scale: int) -> None:
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["inner"], {"scale": self.scale}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return cls(args[0].inner, args[0].scale)


def test_a_number_of_the_class_is_compared(tmp_path: Path) -> None:
    """A class that says nothing of its tensor inside is stored with its numbers, and loads into its like alone."""
    saved, like, other, dense = (nn.Linear(6, 6, bias=False) for _ in range(4))
    for model, scale in ((saved, 2), (like, 2), (other, 8)):
        model.weight = nn.Parameter(_Scaled(torch.full((6, 6), float(scale)), scale))
    found: Any = like.weight
    found.inner.zero_()
    dist_checkpointing.save(to_sharded_state_dict(saved), tmp_path / "c")
    load_into(dist_checkpointing.load(to_sharded_state_dict(like), tmp_path / "c"), like)
    assert found.inner.unique().tolist() == [2.0]
    with pytest.raises(ShardingError, match=r"'scale': '2'.*'scale': '8'"):
        dist_checkpointing.load(to_sharded_state_dict(other), tmp_path / "c")
    with pytest.raises(KeyMismatchError, match=r"codes and scales: weight\. Quantize the model.*dequantize=True"):
        dist_checkpointing.load(to_sharded_state_dict(dense), tmp_path / "c")


@table(("saved", "loaded"), [(6, 8), (8, 6), (6, 1), (6, 36)])
def test_a_number_of_the_class_that_is_a_size_too_is_compared(tmp_path: Path, saved: int, loaded: int) -> None:
    """A number may be an extent or a stride of its tensor by chance: where shapes are equal, it must be equal, too."""
    models = {scale: nn.Linear(6, 6, bias=False) for scale in (saved, loaded)}
    for scale, model in models.items():
        model.weight = nn.Parameter(_Scaled(torch.full((6, 6), float(scale)), scale))
    dist_checkpointing.save(to_sharded_state_dict(models[saved]), tmp_path / "c")
    dist_checkpointing.load(to_sharded_state_dict(models[saved]), tmp_path / "c")
    with pytest.raises(ShardingError, match=rf"'scale': '{saved}'.*'scale': '{loaded}'"):
        dist_checkpointing.load(to_sharded_state_dict(models[loaded]), tmp_path / "c")


class _Cast(torch.Tensor):
    """A weight that is computed in another dtype, and kept as it is: as torchao's float8 training has them."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return func(*(each.inner if isinstance(each, cls) else each for each in args), **(kwargs or {}))


def test_a_weight_that_is_cast_when_it_is_used_is_stored_as_any_other(tmp_path: Path) -> None:
    """A model with or without the cast loads the weight, whose key is its own."""
    register_tensor_class(_Cast, values="inner")
    saved, dense, again = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    values = saved.weight.detach().clone()
    saved.weight = nn.Parameter(_Cast(values))
    again.weight = nn.Parameter(_Cast(torch.zeros(4, 4)))
    dist_checkpointing.save(to_sharded_state_dict(saved), tmp_path / "c")
    for model in (dense, again):
        load_into(dist_checkpointing.load(to_sharded_state_dict(model), tmp_path / "c"), model)
    found: Any = again.weight
    assert torch.equal(dense.weight, values)
    assert torch.equal(found.inner, values)


def _make_nf4(seed: int) -> Any:
    """Return a module with an NF4 weight of torchao's, under FSDP2 where there are ranks; and the weight alone."""
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    values = torch.randn(512, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    model: Any = nn.Sequential(nn.Linear(64, 512, bias=False, dtype=torch.bfloat16))
    model[0].weight = nn.Parameter(nf4.to_nf4(values, 64, 32), requires_grad=False)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, model[0].weight.to_local()
    return model, model[0].weight


def _save_nf4(path: str) -> None:
    dist_checkpointing.save(to_sharded_state_dict(_make_nf4(1)[0]), path)


def _loads_nf4(path: str) -> bool:
    """Return whether all tensors inside are those that were saved."""
    (model, found), (_, wanted) = _make_nf4(2), _make_nf4(1)
    load_into(dist_checkpointing.load(to_sharded_state_dict(model), path), model)
    return all(torch.equal(getattr(found, n), getattr(wanted, n)) for n in wanted.__tensor_flatten__()[0])


@table(("saving", "loading"), [(0, 0), (2, 4), (4, 2), (0, 2), (2, 0)])  # 0: without a process group
def test_nf4_weights_of_torchao_keep_their_bits(tmp_path: Path, ranks: Ranks, saving: int, loading: int) -> None:
    """All tensors inside torchao's NF4 weights come back, with any number of ranks of FSDP2."""
    path = str(tmp_path / "c")
    _ = ranks.run(saving, _save_nf4, path) if saving else _save_nf4(path)
    assert all(ranks.run(loading, _loads_nf4, path) if loading else [_loads_nf4(path)])


def _is_refused_by_nf4(path: str) -> bool:
    """Return whether shards of an NF4 weight, which stay as they were, take no values."""
    (model, found), (_, wanted) = _make_nf4(2), _make_nf4(2)
    with pytest.raises(ShardingError, match="load before the model is quantized"):
        dist_checkpointing.load(to_sharded_state_dict(model), path)
    return all(torch.equal(getattr(found, n), getattr(wanted, n)) for n in wanted.__tensor_flatten__()[0])


def test_shards_of_an_nf4_weight_take_no_values(tmp_path: Path, ranks: Ranks) -> None:
    """Their scales have one mean on all ranks, which a rank's values do not give: the error says when to load."""
    dist_checkpointing.save(to_sharded_state_dict(_make_nf4(1)[0], dequantize=True), tmp_path / "c")
    assert all(ranks.run(2, _is_refused_by_nf4, str(tmp_path / "c")))


def test_the_hub_gets_values_or_an_error(tmp_path: Path) -> None:
    """Codes are refused with the setting that stores values, whose export has the weight, which a load quantizes."""
    model = _make(1)
    for dequantize in (False, True):
        state = to_sharded_state_dict(model, dequantize=dequantize)
        dist_checkpointing.save(state, tmp_path / f"{dequantize}")
    (tmp_path / "config.json").write_text("{}")
    contiguous = SafetensorsSaveShardedStrategy(layout="contiguous", assets=[tmp_path / "config.json"])
    for door in (
        lambda: export_to_huggingface(tmp_path / "False", tmp_path / "hf"),
        lambda: dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "hf", contiguous),
    ):
        with pytest.raises(CheckpointingException, match=r"codes and scales.*: weight; save their values, by dequant"):
            door()
        assert not (tmp_path / "hf").exists()
    export_to_huggingface(tmp_path / "True", tmp_path / "hf")
    weight: Any = model.weight
    values = load_file(tmp_path / "hf" / "model.safetensors")["weight"]
    assert torch.equal(values, weight.dequantize())
    found, wanted = _make(2), _make(2)
    load_into(load_from_huggingface(to_sharded_state_dict(found), tmp_path / "hf"), found)
    wanted_weight: Any = wanted.weight
    wanted_weight.quantize_(values)
    assert _read(found) == _read(wanted)


def test_the_last_save_of_a_manager_that_exports_it_has_values(tmp_path: Path) -> None:
    """Other saves keep the bits."""
    model: Any = _make(1)
    config = CheckpointConfig(folder=str(tmp_path / "c"), interval=1, last_save_in_hf=True)
    with CheckpointManager(config, {"model": model}) as manager:
        manager.save(1)
        manager.save(2, last_step=True)
    assert "model.weight.(inner).codes" in dist_checkpointing.load_tensors_metadata(tmp_path / "c" / "step-1")
    exported = load_file(tmp_path / "c" / "step-2-hf" / "model.safetensors")
    assert torch.equal(exported["weight"], model.weight.dequantize())


def test_what_a_manager_leaves_out_leaves_the_rest_of_a_load_as_it_is(tmp_path: Path) -> None:
    """With exclude_from_last_save, too, values that are stored are quantized anew."""
    dense, model = nn.Linear(_COLUMNS, _ROWS, bias=False), _make(2)
    config = CheckpointConfig(folder=str(tmp_path / "c"), interval=1, exclude_from_last_save=("freqs_cis",))
    for each, step in ((dense, "save"), (model, "load")):
        each.register_buffer("freqs_cis", torch.zeros(2))
        with CheckpointManager(config, {"model": each}) as manager:
            manager.save(1) if step == "save" else manager.load()
    wanted: Any = _make(2)
    wanted.weight.quantize_(dense.weight.detach())
    assert _read(model) == _read(wanted)


@table("kind", ["blocks", "nf4"])
def test_an_excluded_quantized_parameter_is_left_out_whole(tmp_path: Path, kind: str) -> None:
    """exclude_from_last_save by its name leaves out all that is inside; a step that has it all is loaded with it."""
    saved, model = ((_make_nf4(n)[0][0] if kind == "nf4" else _make(n)) for n in (1, 2))
    config = {"folder": str(tmp_path / "c"), "interval": 1, "exclude_from_last_save": ("weight",)}
    for each in (saved, model):
        each.register_buffer("count", torch.full((2,), float(each is saved)))
    with CheckpointManager(CheckpointConfig(**config), {"model": saved}) as manager:
        manager.save(1)
        manager.save(2, last_step=True)
    assert list(dist_checkpointing.load_tensors_metadata(tmp_path / "c" / "step-2")) == ["model.count"]
    before = _list_inner(model)
    for step, wanted in ((2, before), (1, _list_inner(saved))):
        with CheckpointManager(CheckpointConfig(**config, load_step=step), {"model": model}) as manager:
            assert manager.load()
        assert _list_inner(model) == wanted
        assert model.count.eq(1).all()


def _list_inner(model: Any) -> list[Any]:
    return [getattr(model.weight, name).tolist() for name in model.weight.__tensor_flatten__()[0]]
