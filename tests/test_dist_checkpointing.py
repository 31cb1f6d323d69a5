from __future__ import annotations

import argparse
import functools
import warnings
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.errors import (
    CheckpointingException,
    DtypeMismatchError,
    KeyMismatchError,
    ShapeMismatchError,
    ShardingError,
    UnsafePickleError,
)
from shardckpt.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.strategy import LoadStrategy, SaveStrategy
from tests import backends
from tests.dist_checkpointing import LAYOUTS, load_by, save_by
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


@backends.both_in_proof
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_any_layout_loads_as_any_other(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """What 4 ranks saved under one layout, 1 to 4 ranks load under every other, bit for bit, in place."""
    path = str(tmp_path / "ckpt")
    ranks.run(4, save_by, path, layout)
    for number, other in enumerate(sorted(LAYOUTS)):
        ranks.run(1 + number % 4, load_by, path, other, 4)
    ranks.run(4, load_by, path, layout, 4)


@backends.both_in_proof
@pytest.mark.parametrize("world", [3, *in_proof(1, 2)])
def test_any_number_of_ranks_saves(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """1 to 3 ranks save, more and fewer load."""
    path = str(tmp_path / "ckpt")
    ranks.run(world, save_by, path, "uneven")
    for other in (1, 4):
        ranks.run(other, load_by, path, "columns", world)


@backends.both_in_proof
def test_one_process_without_a_group(tmp_path: Path) -> None:
    """No process group is needed; every layout round-trips."""
    assert not dist.is_initialized()
    for layout in LAYOUTS:
        path = str(tmp_path / layout)
        save_by(path, layout)
        load_by(path, "columns", 1)


def _tensor(key: str = "w", value: float = 1.0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((3, 2), value))


@backends.both_in_proof
def test_the_callers_objects_stay_the_callers(tmp_path: Path) -> None:
    """save() changes neither the dict, nor the descriptions, nor the tensors; load() hands back filled tensors."""
    factory = ShardedTensorFactory(
        "f", torch.ones(2), lambda k, t, *_: [ShardedTensor.from_rank_offsets(k, t)], lambda x: x[0]
    )
    tensor, common = _tensor(), {"deep": [1, 2]}
    state = {"w": tensor, "f": factory, "common": common}
    dc.save(state, tmp_path / "c", content_metadata={"v": 1})
    assert list(state) == ["w", "f", "common"]
    assert state["w"] is tensor
    assert state["f"] is factory
    assert tensor.without_data() == _tensor().without_data()
    assert torch.equal(tensor.data, torch.ones(3, 2))
    assert common == {"deep": [1, 2]}


@backends.both_in_proof
def test_queries(tmp_path: Path) -> None:
    """Every query says what was stored, without tensors being asked for."""
    obj = ShardedObject("o", {"a": 1}, (1,), (0,))
    dc.save({"w": _tensor(), "o": obj, "n": 5}, tmp_path / "c", content_metadata={"kind": "test"})
    assert dc.check_is_distributed_checkpoint(tmp_path / "c")
    assert not dc.check_is_distributed_checkpoint(tmp_path)
    assert not dc.check_is_distributed_checkpoint(tmp_path / "absent")
    assert dc.load_common_state_dict(tmp_path / "c") == {"n": 5, "content_metadata": {"kind": "test"}}
    assert dc.load_content_metadata(tmp_path / "c") == {"kind": "test"}
    assert dc.load_content_metadata(preloaded_state_dict={"content_metadata": 3}) == 3
    tensors = dc.load_tensors_metadata(tmp_path / "c")
    assert set(tensors) == {"w"}
    assert (tensors["w"].global_shape, tensors["w"].dtype, tensors["w"].data) == ((3, 2), torch.float32, None)
    assert set(dc.load_sharded_metadata(tmp_path / "c")) == {"w", "o/shard_0_1"}
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], torch.ones(3, 2))
    assert isinstance(dc.get_default_save_sharded_strategy("torch_dist", 1), SaveStrategy)
    assert isinstance(dc.get_default_save_sharded_strategy(), SaveStrategy)
    assert isinstance(dc.get_default_load_sharded_strategy(tmp_path / "c"), LoadStrategy)
    with pytest.raises(CheckpointingException, match="needs a checkpoint_dir"):
        dc.load_content_metadata()


@backends.both_in_proof
def test_metadata_of_a_checkpoint_is_a_state_dict_to_load(tmp_path: Path) -> None:
    """What load_sharded_metadata gives can be loaded as it is: everything, whole."""
    dc.save({"w": _tensor(), "o": ShardedObject("o", [1], (1,), (0,))}, tmp_path / "c")
    loaded = dc.load(dict(dc.load_sharded_metadata(tmp_path / "c")), tmp_path / "c")
    assert torch.equal(loaded["w"], torch.ones(3, 2))
    assert loaded["o/shard_0_1"] == [1]


def _load_cast(directory: str, **options: Any) -> tuple[str, str, float]:
    """Rank 0 wants fitting dtypes, rank 1 one that does not fit; what is raised, and the sum of what was filled."""
    fine = torch.zeros(3, 2, dtype=torch.float64)
    bad = torch.zeros(3, 2, dtype=torch.int32 if dist.get_rank() else torch.float16)
    wanted = {"a": fine, "b": bad}
    described = {key: ShardedTensor.from_rank_offsets(key, data, replicated=True) for key, data in wanted.items()}
    try:
        dc.load(described, directory, validate_access_integrity=False, **options)
    except CheckpointingException as exc:
        return type(exc).__name__, str(exc), float(fine.sum() + bad.sum())
    return "", "", float(fine.sum() + bad.sum())


@backends.both_in_proof
def test_casts_that_cut_values_are_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Floats wanted as integers on one rank: the same error on all, with key and dtypes, before anything is filled."""
    dc.save({"a": _tensor("a", 1.5), "b": _tensor("b", 2.7)}, tmp_path / "c")
    refused = ranks.run(2, _load_cast, str(tmp_path / "c"))
    assert len(set(refused)) == 1
    kind, message, filled = refused[0]
    assert (kind, filled) == ("DtypeMismatchError", 0)
    assert "'b': stored torch.float32, wanted torch.int32" in message
    assert "'a'" not in message
    cast = _load_cast_with_leave(ranks, tmp_path / "c")
    assert cast == [("", "", pytest.approx(6 * (1.5 + 2.7), rel=1e-3)), ("", "", 6 * (1.5 + 2))]


def _load_cast_with_leave(ranks: Ranks, directory: Path) -> list[Any]:
    return ranks.run(2, functools.partial(_load_cast, allow_dtype_cast=True), str(directory))


@backends.both_in_proof
@table(
    ("stored", "wanted", "expected"),
    [
        (torch.tensor([0.7, float("nan")]), torch.int64, None),
        (torch.tensor([0.7, 300.0]), torch.uint8, None),
        (torch.tensor([0.0, 0.7]), torch.bool, None),
        (torch.tensor([1 + 2j]), torch.float32, None),
        (torch.tensor([1 << 40]), torch.int32, None),
        (torch.tensor([-1], dtype=torch.int8), torch.uint8, None),
        (torch.tensor([2], dtype=torch.uint8), torch.bool, None),
        (torch.tensor([True, False]), torch.float32, [1.0, 0.0]),
        (torch.tensor([7, 8]), torch.float32, [7.0, 8.0]),
        (torch.tensor([7], dtype=torch.uint8), torch.int16, [7]),
        (torch.tensor([0.5]), torch.complex64, [0.5 + 0j]),
        (torch.tensor([0.5]).to(torch.float8_e5m2), torch.float32, [0.5]),
        (torch.tensor([0.5]), torch.float8_e5m2, [0.5]),
        (torch.tensor([1.5]), torch.bfloat16, [1.5]),
    ],
)
def test_a_cast_keeps_what_values_mean(
    tmp_path: Path, stored: torch.Tensor, wanted: torch.dtype, expected: list[Any] | None
) -> None:
    """The table of casts: what would be cut or wrapped is refused, and done with allow_dtype_cast as torch does it."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", stored)}, tmp_path / "c")
    into = torch.zeros(stored.shape, dtype=torch.float32).to(wanted)
    described = {"w": ShardedTensor.from_rank_offsets("w", into)}
    if expected is None:
        with pytest.raises(DtypeMismatchError, match=f"'w': stored {stored.dtype}, wanted {wanted}"):
            dc.load(described, tmp_path / "c")
        assert not into.any()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says of complex numbers what it drops
            assert torch.equal(dc.load(described, tmp_path / "c", allow_dtype_cast=True)["w"], stored.to(wanted))
    else:
        assert dc.load(described, tmp_path / "c")["w"].to(torch.complex64).tolist() == expected
        assert into.dtype == wanted


@backends.both_in_proof
def test_casts_are_logged_once_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However many tensors are cast: one line, a warning where digits are lost, and none where nothing is cast."""
    dc.save({str(n): _tensor(str(n), 1.5) for n in range(9)}, tmp_path / "c")
    for dtype, level in ((torch.bfloat16, "WARNING"), (torch.float64, "INFO"), (torch.float32, None)):
        caplog.clear()
        with caplog.at_level("INFO", "shardckpt.engine.loading"):
            wanted = {str(n): torch.zeros(3, 2, dtype=dtype) for n in range(9)}
            dc.load({key: ShardedTensor.from_rank_offsets(key, data) for key, data in wanted.items()}, tmp_path / "c")
        lines = [record for record in caplog.records if "cast" in record.getMessage()]
        assert [record.levelname for record in lines] == ([] if level is None else [level])
        assert all(f"torch.float32 to {dtype} (9: '0', ...)" in record.getMessage() for record in lines)


@backends.both_in_proof
def test_shape_mismatches_are_all_named(tmp_path: Path) -> None:
    """Other global shapes are one error with every key and both shapes, and nothing is filled."""
    dc.save({"a": _tensor("a"), "b": _tensor("b"), "c": _tensor("c")}, tmp_path / "c")
    fine, bad = torch.zeros(3, 2), torch.zeros(4, 2)
    wanted = {"a": ShardedTensor.from_rank_offsets("a", fine)}
    wanted |= {key: ShardedTensor.from_rank_offsets(key, bad) for key in "bc"}
    with pytest.raises(ShapeMismatchError, match=r"(?s)'b': stored \(3, 2\), wanted \(4, 2\).*'c'"):
        dc.load(wanted, tmp_path / "c")
    assert not fine.any()


@backends.both_in_proof
@table("rows", [2, 5])
def test_allow_shape_mismatch_loads_what_is_common(tmp_path: Path, rows: int) -> None:
    """Padded or cut vocabularies: the common rows are loaded, the rest is zero."""
    dc.save({"w": _tensor()}, tmp_path / "c")
    wanted = ShardedTensor.from_rank_offsets("w", torch.full((rows, 2), 9.0), allow_shape_mismatch=True)
    got = dc.load({"w": wanted}, tmp_path / "c")["w"]
    assert got[:3].eq(1).all()
    assert got[3:].eq(0).all()


@backends.both_in_proof
def test_strict_modes_at_the_front_door(tmp_path: Path) -> None:
    """Keys that do not match are dropped and returned, or raised, as the mode says."""
    dc.save({"have": _tensor("have"), "both": _tensor("both")}, tmp_path / "c")
    wanted = {"both": _tensor("both", 0.0), "want": _tensor("want", 0.0)}
    with pytest.raises(KeyMismatchError, match="want"):
        dc.load(wanted, tmp_path / "c")
    loaded, missing, unexpected = dc.load(wanted, tmp_path / "c", strict=dc.StrictHandling.RETURN_ALL)
    assert (set(loaded), missing, unexpected) == ({"both"}, {"have"}, {"want"})
    assert set(dc.load(wanted, tmp_path / "c", strict=False)) == {"both"}
    with pytest.raises(KeyMismatchError, match="have"):
        dc.load({"both": _tensor("both")}, tmp_path / "c", strict=True)


@backends.both_in_proof
def test_a_part_of_a_tensor_needs_leave(tmp_path: Path) -> None:
    """Loading one shard alone is refused as a hole, and allowed with validate_access_integrity=False."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0))}, tmp_path / "c")
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 3))
    with pytest.raises(CheckpointingException, match="no shard describes"):
        dc.load({"w": part}, tmp_path / "c")
    assert dc.load({"w": part}, tmp_path / "c", validate_access_integrity=False)["w"].tolist() == [2, 3]


def test_remote_paths_are_refused_by_name(tmp_path: Path) -> None:
    """A URL is not silently taken for a local directory."""
    with pytest.raises(CheckpointingException, match="s3://bucket/x"):
        dc.save({"w": _tensor()}, "s3://bucket/x")


def _save_in_subgroup(path: str) -> bool:
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    if rank in (1, 3):
        index = (1, 3).index(rank)
        full = torch.arange(8.0)
        dc.save(
            {"w": ShardedTensor.from_rank_offsets("w", full.chunk(2)[index], (0, index, 2))}, path, process_group=group
        )
        wanted = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, index, 2))
        return torch.equal(dc.load({"w": wanted}, path, process_group=group)["w"], full.chunk(2)[index])
    return True


@backends.both_in_proof
def test_a_subgroup_saves_and_loads(ranks: Ranks, tmp_path: Path) -> None:
    """process_group= takes any ranks; the others go on undisturbed."""
    assert all(ranks.run(4, _save_in_subgroup, str(tmp_path / "c")))


def test_what_a_load_would_refuse_a_save_refuses(tmp_path: Path) -> None:
    """A class outside the allow-list, and what cannot be pickled at all, fail at the save, by name and place."""
    with pytest.raises(UnsafePickleError, match=r"common state.*fractions\.Fraction.*allow_globals"):
        dc.save({"half": Fraction(1, 2)}, tmp_path / "c")
    with pytest.raises(ShardingError, match=r"common state\['deep'\]\[0\] cannot be pickled"):
        dc.save({"deep": [lambda: 0]}, tmp_path / "c")
    with pytest.raises(ShardingError, match=r"'common_state': the common state has that name"):
        dc.save({"o": ShardedObject("common_state", 1, (1,), (0,))}, tmp_path / "c")
    assert not list(tmp_path.iterdir())
    dc.save({"half": Fraction(1, 2)}, tmp_path / "c", allow_globals=[Fraction])
    assert dc.load_common_state_dict(tmp_path / "c", allow_globals=[Fraction]) == {"half": Fraction(1, 2)}


def test_megatrons_keywords_are_taken(tmp_path: Path) -> None:
    """What trainers pass to Megatron's save is accepted, by position and by name."""
    dc.save({"a": 1}, tmp_path / "c", None, True, False, dict, {"kind": "x"}, "mcore", True)
    assert dc.load_content_metadata(tmp_path / "c") == {"kind": "x"}
    assert (tmp_path / "c" / "integrity.json").exists()
    dc.save({"a": 1}, tmp_path / "d", async_sharded_save=False, preprocess_common_before_consistancy_check=dict)


@backends.both_in_proof
@table(
    ("destination", "why"),
    [
        pytest.param(lambda: torch.zeros(1).expand(3), "'w': its data is expanded.*clone", id="expanded"),
        pytest.param(lambda: torch.zeros(3).to_sparse(), "'w': its data is sparse.*dense tensor", id="sparse"),
        pytest.param(lambda: torch.zeros(3, device="meta"), "'w': its data is on the meta device", id="meta"),
    ],
)
def test_destinations_that_cannot_be_filled_are_refused_before_any_is(
    tmp_path: Path, destination: Callable[[], torch.Tensor], why: str
) -> None:
    """A tensor whose elements share a place, or that is sparse or on meta, is refused before another is filled."""
    one = {key: ShardedTensor.from_rank_offsets(key, torch.ones(3)) for key in ("a", "w")}
    dc.save(one, tmp_path / "c")
    first = torch.zeros(3)
    with pytest.raises(ShardingError, match=why):
        dc.load(
            {key: ShardedTensor.from_rank_offsets(key, data) for key, data in (("a", first), ("w", destination()))},
            tmp_path / "c",
        )
    assert not first.any()


@backends.both_in_proof
def test_sparse_tensors_are_refused_by_key(tmp_path: Path) -> None:
    """A save of a sparse tensor names it and says what to store in its place; nothing is there."""
    with pytest.raises(ShardingError, match=r"'w': its data is sparse \(torch.sparse_coo\).*to_dense"):
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.eye(3).to_sparse())}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


@backends.both_in_proof
@table("in_background", [False, True])
def test_a_large_transposed_tensor_of_a_packed_dtype_is_saved(tmp_path: Path, in_background: bool) -> None:
    """Torch can copy a transposed float4 of few elements only; one of many is saved and loaded bit for bit, too."""
    numbers = torch.arange(300 * 300).to(torch.uint8).view(300, 300)
    shard = ShardedTensor.from_rank_offsets("w", numbers.view(torch.float4_e2m1fn_x2).t())
    with AsyncCallsQueue() as queue:
        request = dc.save({"w": shard}, tmp_path / "c", async_sharded_save=in_background)
        if request is not None:
            queue.schedule_async_request(request)
    wanted = torch.empty(300, 300, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t()
    loaded = dc.load({"w": ShardedTensor.from_rank_offsets("w", wanted)}, tmp_path / "c")
    assert torch.equal(loaded["w"].view(torch.uint8), numbers.t())


def _save_elsewhere(path: str) -> None:
    dc.save({"a": 1}, f"{path}-{dist.get_rank()}")


@backends.both_in_proof
def test_ranks_save_to_one_place(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks that name different directories are told so, and nothing is written."""
    outcomes = ranks.outcomes(2, _save_elsewhere, str(tmp_path / "c"))
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "ranks disagree on checkpoint_dir" in outcomes[0].message
    assert not list(tmp_path.iterdir())


@table(
    "call, said",
    [
        (lambda state, at: dc.save(at / "new", state), "an object of type dict in the place of a checkpoint's path"),
        (lambda state, at: dc.save(state, None), "None in the place of a checkpoint's path or URL"),
        (lambda _, at: dc.save(torch.nn.Linear(2, 2), at / "new"), "the state dict is an object of type Linear"),
        (lambda state, at: dc.save([*state.values()], at / "new"), "the state dict is an object of type list"),
        (lambda state, at: dc.load(at, state), "an object of type dict in the place of a checkpoint's path"),
        (lambda _, at: dc.load(str(at), at), "the state dict to load is '.*': expected a dict"),
        (lambda _, at: dc.load(None, at), "the state dict to load is None: expected a dict"),
        (lambda state, at: dc.load([*state.values()], at), "the state dict to load is an object of type list"),
        (lambda state, at: dc.load(state.items(), at), "the state dict to load is an object of type dict_items"),
        (lambda state, at: dc.save(state, at, overwrite="false"), "overwrite='false': expected True or False"),
        (lambda state, at: dc.load(state, at, allow_dtype_cast="0"), "allow_dtype_cast='0': expected True or False"),
        (lambda _, at: dc.load(torch.ones(2), at), "the state dict to load is an object of type Tensor"),
    ],
)
def test_arguments_in_the_wrong_place(tmp_path: Path, call: Callable[[Any, Path], Any], said: str) -> None:
    """A state dict and a path that have changed places, or are missing, are said: a load of nothing was silent."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    dc.save(state, tmp_path / "a")
    with pytest.raises(CheckpointingException, match=said):
        call(state, tmp_path / "a")


def test_a_value_that_contains_itself_comes_back(tmp_path: Path) -> None:
    """A list that is in a tuple in itself is looked into once."""
    inner: list[Any] = []
    inner.append((inner, 1))
    dc.save({"values": (inner, 2)}, tmp_path / "a")
    found = dc.load({}, tmp_path / "a")["values"]
    assert found[0][0][0] is found[0]


def test_an_object_with_an_attribute_nbytes_comes_back(tmp_path: Path) -> None:
    """Whatever the attribute is: only tensors are counted by it."""
    for value in ("1GB", None, [1]):
        shard = ShardedObject("o", argparse.Namespace(nbytes=value), (1,), (0,))
        dc.save({"o": shard}, tmp_path / str(value)[:4])
        assert dc.load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path / str(value)[:4])["o"] == shard.data


def test_content_metadata_of_the_state_dict_is_not_dropped_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where content_metadata= takes the place of another, a warning has that; of an equal one there is none."""
    dc.save({"n": 5, "content_metadata": {"x": 1}}, tmp_path / "c", content_metadata={"x": 1})
    assert not caplog.records
    dc.save({"n": 5, "content_metadata": {"x": 1}}, tmp_path / "d", content_metadata={"f": 1})
    assert "content_metadata= is, in place of {'x': 1}" in caplog.text


@table(("shape", "offset"), [(2, 0), ((2,), 0), ((2.5,), (0,)), (None, None)])
def test_the_grid_of_an_object_is_of_integers(shape: Any, offset: Any) -> None:
    """What is no tuple of them is named, by the key."""
    with pytest.raises(ShardingError, match="ShardedObject 'o': global_shape and global_offset are tuples of integers"):
        ShardedObject("o", 1, shape, offset)


def test_an_option_that_megatrons_parser_leaves_unset_is_no_flag(tmp_path: Path) -> None:
    """Its ``--async-save`` that is not given is None: the save is a synchronous one."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
    dc.save(state, tmp_path / "c", async_sharded_save=None)  # type: ignore[call-overload]
    assert dc.load_plain_tensors(tmp_path / "c")["w"].equal(torch.ones(3))
