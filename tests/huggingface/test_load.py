from __future__ import annotations

import json
import math
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    KeyMismatchError,
    NotACheckpointError,
    ShapeMismatchError,
    ShardingError,
    StorageError,
)
from shardckpt.huggingface import (
    Rule,
    RuleMapping,
    export_to_huggingface,
    get_shard_info,
    huggingface_index,
    load_from_huggingface,
    save_state_dict,
)
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning.boxes import Box
from shardckpt.plugins.key_mapping import KeyMapEntry
from shardckpt.storage.reader import CheckpointReader
from tests.huggingface.samples import global_tensors, local_shards, read, same, save, sharded_state
from tests.states import entire, error_of
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def write(folder: Path, state: dict[str, torch.Tensor], limit: int = 1 << 30, config: Any = None) -> Path:
    """A folder as other tools write it: several files and an index where the limit asks for it."""
    folder.mkdir(parents=True)
    is_sharded, total, weight_map = get_shard_info(state, None, limit)
    for file in set(weight_map.values()):
        save_state_dict({name: state[name] for name, where in weight_map.items() if where == file}, folder / file)
    if is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros of the same dtypes and shapes."""
    nothing = {name: torch.zeros(tensor.nbytes, dtype=torch.uint8) for name, tensor in tensors.items()}
    return {name: nothing[name].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}


def _load_shards(folder: Path) -> list[str]:
    """Load this rank's shards of the sample; names of those that are not the slices of the global tensor."""
    expected = sharded_state(global_tensors())
    wanted = sharded_state(_blank(global_tensors()))
    loaded = load_from_huggingface(wanted, folder)
    return [
        name
        for name in expected
        for one, other in zip(loaded[name], expected[name], strict=True)
        if not same(one, other.data)
    ]


def test_any_sharding_is_filled_from_any_folder(ranks: Ranks, tmp_path: Path) -> None:
    """One file and several, loaded by a process alone and by 1 to 4 ranks in rows and columns, bit for bit."""
    save(tmp_path / "c")
    export_to_huggingface(tmp_path / "c", tmp_path / "one")
    export_to_huggingface(tmp_path / "c", tmp_path / "many", max_shard_size=150)
    assert _load_shards(tmp_path / "one") == _load_shards(tmp_path / "many") == []
    for world in (1, 2, 3, 4):
        assert ranks.run(world, _load_shards, tmp_path / "many") == [[]] * world


def test_what_a_caller_gives_is_filled_and_cast(tmp_path: Path) -> None:
    """Tensors are filled in place, in the dtype they have; without data new ones are made; strides do not matter."""
    whole = torch.linspace(-2, 2, 30).reshape(5, 6)
    write(tmp_path / "hf", {"w": whole, "n": torch.arange(4)})
    mine = torch.zeros(6, 5, dtype=torch.bfloat16).t()
    wanted = {
        "w": ShardedTensor.from_rank_offsets("model.w", mine),
        "n": ShardedTensor.from_global_shape("model.n", torch.int64, (4,)),
    }
    loaded = load_from_huggingface(wanted, tmp_path / "hf", prefix="model.")
    assert loaded["w"] is mine
    assert torch.equal(mine, whole.bfloat16())
    assert loaded["n"].tolist() == [0, 1, 2, 3]
    flat = torch.zeros(7)
    part = ShardedTensor.from_rank_offsets_flat("w", flat, (5, 6), flattened_range=slice(4, 11))
    load_from_huggingface({"w": part}, tmp_path / "hf", validate_access_integrity=False)
    assert torch.equal(flat, whole.reshape(-1)[4:11])
    layer = ShardedTensor.from_rank_offsets("w", torch.zeros(6), (0, 2, 5), prepend_axis_num=1)
    loaded = load_from_huggingface({"w": layer}, tmp_path / "hf", validate_access_integrity=False)
    assert torch.equal(loaded["w"], whole[2])


def test_only_the_wanted_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's rows of a large tensor are as many bytes as are read, of its file alone."""
    write(tmp_path / "hf", {"w": torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512), "v": torch.ones(9)}, 100)
    read: list[tuple[str, int]] = []
    into = CheckpointReader.read_into

    def counted(reader: CheckpointReader, name: str, offset: int, buffer: memoryview, what: str) -> None:
        read.append((name, buffer.nbytes))
        into(reader, name, offset, buffer, what)

    monkeypatch.setattr(CheckpointReader, "read_into", counted)
    rows = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 512), (0, 3, 128))
    loaded = load_from_huggingface({"w": rows}, tmp_path / "hf", validate_access_integrity=False)
    assert loaded["w"][0, 0] == 12 * 512
    assert sum(nbytes for _, nbytes in read) == 4 * 512 * 4
    assert {name for name, _ in read} == {"model-00001-of-00002.safetensors"}


def _experts(world: int, rank: int) -> dict[str, Any]:
    """Uneven experts on each rank, in rows of columns: an expert-parallel cut."""
    whole = torch.zeros(5, 8, 6)
    start, stop = 5 * rank // world, 5 * (rank + 1) // world
    part = whole[start:stop]
    return {"w": ShardedTensor("e.w", part, part.dtype, tuple(part.shape), (5, 8, 6), (start, 0, 0), None)}


def _load_experts(folder: Path, mapping: Any) -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    loaded = load_from_huggingface(_experts(world, rank), folder, mapping=mapping)
    return [5 * rank // world, loaded["w"]]


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_put_together_on_the_rank_that_has_them(ranks: Ranks, tmp_path: Path, transposed: bool) -> None:
    """Matrices an expert, halves and transposed ones, become grouped experts, those of a rank on that rank."""
    whole = torch.arange(5 * 8 * 6.0).reshape(5, 8, 6)
    mapping = RuleMapping([Rule("e.w", ("{expert}.gate", "{expert}.up"), transposed=transposed)])
    state = {}
    for expert in range(5):
        halves = {"gate": whole[expert, :4], "up": whole[expert, 4:]}
        state |= {f"{expert}.{n}": half.t().contiguous() if transposed else half for n, half in halves.items()}
    write(tmp_path / "hf", state, 300)
    for world in (1, 2, 4):
        for start, values in ranks.run(world, _load_experts, tmp_path / "hf", mapping):
            assert torch.equal(values, whole[start : start + len(values)])


def test_the_shards_of_a_tensor_are_matched_in_linear_time(tmp_path: Path) -> None:
    """A tensor with a shard for each expert takes one look at each expert's tensor, and not all of them a shard."""
    count = 8
    write(tmp_path / "hf", {f"{expert}.w": torch.full((2, 2), float(expert)) for expert in range(count)})
    shards = {
        f"{expert}": ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2), (0, expert, count), prepend_axis_num=1)
        for expert in range(count)
    }
    mapping = RuleMapping([Rule("w", ("{expert}.w",))])
    with mock.patch.object(
        HuggingFaceLoadStrategy, "_source", autospec=True, side_effect=HuggingFaceLoadStrategy._source
    ) as find:
        loaded = load_from_huggingface(shards, tmp_path / "hf", mapping=mapping)
    assert find.call_count == count
    assert all(torch.equal(loaded[f"{expert}"], torch.full((2, 2), float(expert))) for expert in range(count))


class _WithoutLast:
    """Maps a matrix to a tensor a row, and forgets the last row; it may map the first row to several."""

    def __init__(self, first: int) -> None:
        self.first = first

    def links(self, key: str, shape: tuple[int, ...]) -> list[KeyMapEntry]:
        rows = [*[0] * (self.first - 1), *range(shape[0] - 1)]
        return [KeyMapEntry(f"{key}.{n}", (1, 3), (0, 0), Box((row, 0), (1, 3))) for n, row in enumerate(rows)]


@pytest.mark.parametrize("first", [1, 2])
def test_a_mapping_that_lacks_elements_is_refused(first: int, tmp_path: Path) -> None:
    """Elements for which a mapping has no tensor are an error by name, not whatever the memory held."""
    write(tmp_path / "hf", {f"w.{row}": torch.ones(1, 3) for row in range(4)})
    wanted = {"w": ShardedTensor.from_global_shape("w", torch.float32, (4, 3))}
    with pytest.raises(ShardingError, match=r"the elements Box\(offset=\(3, 0\), shape=\(1, 3\)\) of 'w' of shape"):
        load_from_huggingface(wanted, tmp_path / "hf", mapping=_WithoutLast(first))


def _load_fsdp(folder: Path) -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_from_huggingface(to_sharded_state_dict(model, prefix="model."), folder, prefix="model.")
    found: dict[str, Any] = model.state_dict()
    return [torch.equal(found[name].full_tensor(), tensor) for name, tensor in read(folder).items()]


def test_an_fsdp_model_is_filled_in_place(ranks: Ranks, tmp_path: Path) -> None:
    """The DTensors of a model under FSDP2, unevenly cut, have the folder's values afterwards."""
    plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).state_dict()
    write(tmp_path / "hf", plain, 100)
    assert ranks.run(2, _load_fsdp, tmp_path / "hf") == [[True] * 4] * 2


def _quantized(rows: int, columns: int, block: tuple[int, int], lead: tuple[int, ...] = ()) -> tuple[Any, Any, Any]:
    """8-bit weights, scales for blocks, and the values by the definition: each weight times its block's scale."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(*lead, rows, columns, generator=generator).to(torch.float8_e4m3fn)
    shape = (*lead, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    scale = torch.rand(shape, generator=generator) + 0.5
    row = torch.arange(rows).div(block[0], rounding_mode="floor")
    column = torch.arange(columns).div(block[1], rounding_mode="floor")
    return weight, scale, weight.float() * scale[..., row[:, None], column[None, :]]


def test_block_scaled_weights_become_what_they_stand_for(tmp_path: Path) -> None:
    """8 bits and a scale for 128 x 128: whole, in rows and columns that cut blocks, in bfloat16, or as they are."""
    weight, scale, values = _quantized(300, 200, (128, 128))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    write(tmp_path / "hf", {"p.weight": weight, "p.weight_scale_inv": scale}, config=config)
    for world in (1, 2, 3):
        for rank in range(world):
            wanted = local_shards("p.weight", torch.zeros(300, 200), rank, world)
            expected = local_shards("p.weight", values, rank, world)
            loaded = load_from_huggingface({"w": wanted}, tmp_path / "hf", validate_access_integrity=False)
            assert torch.equal(loaded["w"][0], expected[0].data)  # type: ignore[arg-type]
    low = ShardedTensor.from_rank_offsets("p.weight", torch.zeros(300, 200, dtype=torch.bfloat16))
    assert torch.equal(load_from_huggingface({"w": low}, tmp_path / "hf")["w"], values.bfloat16())
    raw = {
        "w": ShardedTensor.from_global_shape("p.weight", torch.float8_e4m3fn, (300, 200)),
        "s": ShardedTensor.from_global_shape("p.weight_scale_inv", torch.float32, (3, 2)),
    }
    loaded = load_from_huggingface(raw, tmp_path / "hf")
    assert same(loaded["w"], weight)
    assert torch.equal(loaded["s"], scale)


def test_scaled_experts_of_other_block_sizes(tmp_path: Path) -> None:
    """Blocks as config.json says, of matrices under leading axes, of e8m0 scales, put together as grouped experts."""
    config = {"quantization_config": {"weight_block_size": [4, 16]}}
    state, expected = {}, []
    for expert in range(3):
        weight, scale, values = _quantized(10, 40, (4, 16))
        state |= {f"{expert}.weight": weight, f"{expert}.weight_scale_inv": scale}
        expected.append(values)
    weight, scale, grouped = _quantized(10, 40, (4, 16), (2,))
    power = torch.full((2, 3, 3), 0.25).to(torch.float8_e8m0fnu)
    state |= {"g.weight": weight, "g.weight_scale_inv": scale, "h.weight": weight.clone(), "h.weight_scale_inv": power}
    write(tmp_path / "hf", state, config=config)
    mapping = RuleMapping([Rule("e", ("{expert}.weight",))])
    wanted = {
        "e": ShardedTensor.from_global_shape("e", torch.float32, (3, 10, 40)),
        "g": ShardedTensor.from_global_shape("g.weight", torch.float32, (2, 10, 40)),
        "h": ShardedTensor.from_global_shape("h.weight", torch.float32, (2, 10, 40)),
    }
    loaded = load_from_huggingface(wanted, tmp_path / "hf", mapping=mapping)
    assert torch.equal(loaded["e"], torch.stack(expected))
    assert torch.equal(loaded["g"], grouped)
    assert torch.equal(loaded["h"], weight.float() * 0.25)


def test_large_scaled_weights_are_dequantized_in_parts(tmp_path: Path) -> None:
    """More rows than are dequantized at a time, beginning inside a block."""
    weight, scale, values = _quantized(700, 1100, (128, 128))
    write(tmp_path / "hf", {"w": weight, "w_scale_inv": scale})
    part = torch.zeros(650, 900)
    shard = ShardedTensor("w", part, part.dtype, (650, 900), (700, 1100), (37, 150), None)
    load_from_huggingface({"w": shard}, tmp_path / "hf", validate_access_integrity=False)
    assert torch.equal(part, values[37:687, 150:1050])


def test_other_quantization_is_refused(tmp_path: Path) -> None:
    """8-bit weights without block scales are not cast silently where they are known to be quantized."""
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    wanted = {"w": ShardedTensor.from_global_shape("w", torch.float32, (4, 4))}
    write(tmp_path / "a", {"w": weight, "w_scale": torch.ones(1)})
    with pytest.raises(ShardingError, match=r"'w' is quantized, and 'w_scale_inv' is not there \(but \['w_scale'\]\)"):
        load_from_huggingface(wanted, tmp_path / "a")
    write(tmp_path / "b", {"w": weight}, config={"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ShardingError, match="'w' is quantized"):
        load_from_huggingface(wanted, tmp_path / "b")
    write(tmp_path / "c", {"w": weight, "w_scale_inv": torch.ones(2, 1)})
    with pytest.raises(CorruptCheckpointError, match=r"needs scales of shape \(1, 1\) for blocks of 128 x 128"):
        load_from_huggingface(wanted, tmp_path / "c")
    write(tmp_path / "d", {"w": weight}, config={"quantization_config": {"weight_block_size": [0, 1]}})
    with pytest.raises(CorruptCheckpointError, match="weight_block_size"):
        load_from_huggingface(wanted, tmp_path / "d")
    write(tmp_path / "u", {"w": weight, "w_scale_inv": torch.ones(1, 1, dtype=torch.uint8)})
    with pytest.raises(CorruptCheckpointError, match=r"of torch\.uint8"):
        load_from_huggingface(wanted, tmp_path / "u")
    pairs = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    write(tmp_path / "f", {"w": pairs, "w_scale_inv": torch.ones(1, 1)})
    with pytest.raises(ShardingError, match=r"'w' is stored as torch\.float4_e2m1fn_x2 and requested as"):
        load_from_huggingface(wanted, tmp_path / "f")
    write(tmp_path / "e", {"w": weight})
    assert torch.equal(load_from_huggingface(wanted, tmp_path / "e")["w"], torch.ones(4, 4))


def _fails(wanted: dict[str, Any], folder: Path, kind: type[Exception], text: str, **arguments: Any) -> None:
    with pytest.raises(kind, match=text):
        load_from_huggingface(wanted, folder, **arguments)


def test_what_is_not_there_or_not_so_is_named(tmp_path: Path) -> None:
    """Missing tensors, other shapes, ints wanted as floats, objects, wrong prefixes: before anything is filled."""
    write(tmp_path / "hf", {"w": torch.ones(3, 4), "n": torch.arange(3)})
    there = torch.zeros(3, 4)
    w = ShardedTensor.from_rank_offsets("w", there)
    other = ShardedTensor.whole
    fails = [
        ({"x": other("x", torch.float32, (2,))}, KeyMismatchError, "lacks 'x'", {}),
        ({"n": other("n", torch.int64, (4,))}, ShapeMismatchError, r"'n': stored \(3,\), wanted \(4,\)", {}),
        ({"n": other("n", torch.float32, (3,))}, ShardingError, "'n' is stored as torch.int64 and requested as", {}),
        ({"o": ShardedObject("o", None, (1,), (0,))}, KeyMismatchError, "no objects: leave o out", {}),
        ({}, KeyMismatchError, "'w' does not begin with the prefix 'net.'", {"prefix": "net."}),
    ]
    for extra, kind, text, arguments in fails:
        _fails({"w": w, **extra}, tmp_path / "hf", kind, text, **arguments)
        assert not there.any()
    rule = RuleMapping([Rule("e", ("{expert}.w",))])
    write(tmp_path / "e", {"0.w": torch.ones(2, 2), "1.w": torch.ones(2, 3)})
    wanted = {"e": other("e", torch.float32, (2, 2, 2))}
    _fails(wanted, tmp_path / "e", ShapeMismatchError, r"needs '1\.w' of shape \(2, 2\).*has \(2, 3\)", mapping=rule)
    wanted = {"e": other("e", torch.float32, (3, 2, 2))}
    _fails(wanted, tmp_path / "e", KeyMismatchError, r"lacks '2\.w'", mapping=rule)


def test_the_extra_state_of_modules_is_not_looked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Megatron's sharded_state_dict() goes in as it is: objects that no folder has are left out, and logged."""
    write(tmp_path / "hf", {"w": torch.ones(3)})
    extra = ShardedObject("fc1._extra_state", None, (1,), (0,))
    loaded = load_from_huggingface({**entire({"w": torch.zeros(3)}), "extra": extra}, tmp_path / "hf")
    assert loaded.keys() == {"w"}
    assert "fc1._extra_state" in caplog.text


def _load_undescribed(folder: Path) -> list[str]:
    rank = dist.get_rank()
    state = entire({f"w{rank}": torch.zeros(2)}) | ({"raw": {"w0": torch.zeros(2)}} if rank else {})
    return [*load_from_huggingface(state, folder, validate_access_integrity=False)]


def test_tensors_that_no_shard_describes_are_said(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A module's own state dict in the place of its description is not left as it is in silence, on any rank."""
    folder = write(tmp_path / "m", {"w0": torch.ones(2), "w1": torch.ones(2)})
    assert load_from_huggingface({"w0": torch.zeros(2)}, folder) == {}
    assert "no shard describes 1 tensor of the state dict to load" in caplog.text
    assert ranks.run(2, _load_undescribed, folder) == [["w0"], ["w1"]]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """An index whose files are not all there is an error that names the file."""
    write(tmp_path / "hf", {"a": torch.ones(9), "b": torch.ones(9)}, 36)
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StorageError, match=r"model-00002-of-00002\.safetensors: No such file"):
        load_from_huggingface({"a": ShardedTensor.from_global_shape("a", torch.float32, (9,))}, tmp_path / "hf")


def test_what_a_folder_lacks_can_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without strict, or by name, the rest is loaded, the log has what is not, and the caller's tensor stays."""
    write(tmp_path / "hf", {"w": torch.ones(3)})
    mine = {"w": torch.zeros(3), "head": torch.full((2,), 7.0)}
    wanted = entire(mine)
    options: dict[str, Any]
    for options in ({"strict": False}, {"optional": ["head"]}):
        with caplog.at_level(0, "shardckpt"):
            loaded = load_from_huggingface(wanted, tmp_path / "hf", **options)
        assert loaded.keys() == {"w"}
        assert mine["w"].sum() == 3
        assert mine["head"].sum() == 14
        assert "head" in caplog.text
        caplog.clear()
    with pytest.raises(
        CheckpointingException, match=r"^load_from_huggingface: optional='d': expected a list of texts, such as \['d'\]"
    ):
        load_from_huggingface(wanted, tmp_path / "hf", optional="d")


def test_tied_weights_are_filled_through_each_other(tmp_path: Path) -> None:
    """A head that shares the embedding's memory is not missing in a folder that has the embedding only."""
    write(tmp_path / "hf", {"embed": torch.arange(6.0).reshape(3, 2)})
    shared = torch.zeros(3, 2)
    wanted = {key: ShardedTensor.from_rank_offsets(key, shared) for key in ("embed", "head")}
    loaded = load_from_huggingface(wanted, tmp_path / "hf")
    assert loaded["head"] is shared
    assert torch.equal(shared, torch.arange(6.0).reshape(3, 2))
    shared.zero_()
    load_from_huggingface({key: wanted[key] for key in ("head", "embed")}, tmp_path / "hf")  # the absent one first
    assert torch.equal(shared, torch.arange(6.0).reshape(3, 2))
    write(tmp_path / "both", {"head": torch.ones(3, 2), "embed": torch.arange(6.0).reshape(3, 2)})
    with pytest.raises(KeyMismatchError, match="'embed' and 'head' have one destination"):
        load_from_huggingface(wanted, tmp_path / "both")


@table("rows", [3, 7])
def test_padded_vocabularies(tmp_path: Path, rows: int) -> None:
    """With allow_shape_mismatch the common rows are loaded, and further ones are zero."""
    stored = torch.arange(10.0).reshape(5, 2) + 1
    write(tmp_path / "hf", {"w": stored})
    mine = torch.full((rows, 2), -1.0)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", mine, allow_shape_mismatch=True)}
    load_from_huggingface(wanted, tmp_path / "hf")
    common = min(rows, 5)
    assert torch.equal(mine[:common], stored[:common])
    assert not mine[common:].any()


def test_the_hubs_cache_is_a_folder(tmp_path: Path) -> None:
    """A snapshot of links into blobs is read; a link to anywhere else is refused, as in every checkpoint."""
    repository = tmp_path / "models--a--b"
    write(repository / "real", {"w": torch.ones(3), "v": torch.ones(2)}, 12, {"model_type": "llama"})
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted((repository / "real").iterdir())):
        path.rename(repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    wanted = {"w": ShardedTensor.from_global_shape("w", torch.float32, (3,))}
    assert load_from_huggingface(wanted, snapshot)["w"].tolist() == [1, 1, 1]
    link = snapshot / "model-00001-of-00002.safetensors"
    secret = shutil.copy(link, tmp_path / "secret")
    link.unlink()
    link.symlink_to(secret)
    with pytest.raises(StorageError, match="symbolic link"):
        load_from_huggingface(wanted, snapshot)


def _load_differently(folder: Path) -> None:
    name, shape = ("w", (3,)) if dist.get_rank() == 0 else ("x", (4,))
    load_from_huggingface({"w": ShardedTensor.from_global_shape(name, torch.float32, shape)}, folder)


def test_an_error_on_one_rank_is_everyones(ranks: Ranks, tmp_path: Path) -> None:
    """A tensor that only one rank wants and nobody has is the same error on all; so is a folder that is none."""
    write(tmp_path / "hf", {"w": torch.ones(3)})
    for folder, kind, rank in ((tmp_path / "hf", "KeyMismatchError", 1), (tmp_path, "NotACheckpointError", 0)):
        ((found, text),) = {*ranks.run(2, error_of, _load_differently, folder)}
        assert found == kind
        assert text.startswith(f"rank {rank}")


def test_a_checkpoint_is_told_from_a_folder_of_the_hub(tmp_path: Path) -> None:
    """A checkpoint of this library or of DCP, and a file, are refused with the call that reads them."""
    model = torch.nn.Linear(2, 2)
    dist_checkpointing.save(to_sharded_state_dict(model), tmp_path / "ours")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "dcp").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        shutil.copy(tmp_path / "ours" / name, tmp_path / "dcp")
    doors: list[Any] = [huggingface_index, partial(load_from_huggingface, to_sharded_state_dict(model))]
    for read_folder in doors:
        for name in ("ours", "dcp"):
            with pytest.raises(NotACheckpointError, match=r"checkpoint \(torch_dist 1\): load it by dist_ch"):
                read_folder(tmp_path / name)
        with pytest.raises(NotACheckpointError, match=r"convert_checkpoint\(SOURCE, NEW, 'hf'\)"):
            read_folder(tmp_path / "model.pt")


def test_a_tied_folder_does_not_fit_an_untied_model(tmp_path: Path) -> None:
    """The error says that the folder has one tensor for two, and what to do."""
    save_state_dict({"model.embed_tokens.weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    wanted = sharded_state({"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)})
    with pytest.raises(KeyMismatchError, match=r"lacks 'lm_head\.weight'.*the output layer is the embedding"):
        load_from_huggingface(wanted, tmp_path)


def test_a_plain_load_of_a_folder_names_the_call(tmp_path: Path) -> None:
    """`dist_checkpointing.load` does not say of a sound Hugging Face folder that a save did not end."""
    save_state_dict({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointingException, match=r"it is a Hugging Face folder, which load_from_huggingface"):
        dist_checkpointing.load(sharded_state({"w": torch.zeros(4)}), tmp_path)
