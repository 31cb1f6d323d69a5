from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.validation.keys import (
    StrictHandling,
    _suggest_prefix,
    compare_keys,
    describe_mismatch,
    name_keys,
    parse_strict_flag,
    use_bare_keys,
)
from shardckpt.validation.sharding import validate_shards
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _cell(index: int, count: int, key: str = "w", **fields: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(2, 3), (0, index, count), **fields)


def _piece(start: int, rows: int, total: int, **fields: Any) -> ShardedTensor:
    data = torch.zeros(rows, 3)
    return ShardedTensor("w", data, data.dtype, (rows, 3), (total, 3), (start, 0), None, **fields)


def _check(*shards: Any) -> None:
    validate_shards(shards, Comm(alone=True))


def test_sound_shards_pass() -> None:
    """Cells, irregular pieces, replicas, empty shards, flattened slices and object grids that cover everything pass."""
    _check(_cell(0, 2), _cell(1, 2), _cell(0, 2, replica_id=1))
    _check(_piece(0, 1, 6), _piece(1, 5, 6), _piece(6, 0, 6))
    _check(
        ShardedTensor.from_rank_offsets("s", torch.tensor(1.0)), ShardedTensor.from_rank_offsets("e", torch.zeros(0, 4))
    )
    _check(*(ShardedObject("o", None, (2, 2), (i, j)) for i in range(2) for j in range(2)))
    halves = (slice(0, 5), slice(5, 6))
    _check(
        *(
            ShardedTensor.from_rank_offsets_flat("f", torch.zeros(p.stop - p.start), (2, 3), flattened_range=p)
            for p in halves
        )
    )


@table(
    ("shards", "fault"),
    [
        ([_cell(0, 2)], r"no shard describes \[2:4, 0:3\]"),
        ([_cell(0, 2), _cell(0, 2), _cell(1, 2)], r"\[0:2, 0:3\] is described as the main replica twice"),
        ([_cell(0, 2, replica_id=1), _cell(1, 2, replica_id=1)], "no rank holds a main replica"),
        ([_piece(0, 3, 6), _piece(2, 4, 6)], r"\[2:3, 0:3\] is described as the main replica twice"),
        ([_piece(0, 3, 6), _piece(4, 2, 6)], r"no shard describes \[3:4, 0:3\]"),
        ([_piece(0, 3, 3), _piece(3, 3, 6)], "disagree on its global_shape"),
        ([ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3, dtype=torch.int8), (0, 0, 2)), _cell(1, 2)], "dtype"),
        ([ShardedObject("o", 1, (2,), (0,))], r"object 'o': no object describes \[1:2\]"),
        ([ShardedObject("o", 1, (1,), (0,)), ShardedObject("o", 2, (1,), (0,))], "main replica twice"),
        ([ShardedTensor.from_rank_offsets("s", torch.tensor(1.0), replica_id=1)], "no shard describes"),
        ([ShardedTensorFactory("f", torch.zeros(1), lambda *_: [], lambda x: x)], "build factories first"),
    ],
)
def test_unsound_shards_are_refused_with_the_place(shards: list[Any], fault: str) -> None:
    """Holes, overlaps and disagreement are found for regular and irregular grids, and the region is named."""
    with pytest.raises(ShardingError, match=fault):
        _check(*shards)


def test_all_faults_are_in_one_error() -> None:
    """Several faulty keys are all named, sorted."""
    with pytest.raises(ShardingError) as error:
        _check(_cell(0, 2, key="b"), _cell(0, 2, key="a"))
    assert str(error.value).index("'a'") < str(error.value).index("'b'")


def test_strict_flags() -> None:
    """Modes are given as enum, value or bool; anything else is an error that lists them."""
    assert parse_strict_flag(True) is StrictHandling.RAISE_ALL
    assert parse_strict_flag(False) is StrictHandling.LOG_ALL
    assert parse_strict_flag("return_all") is StrictHandling.RETURN_ALL
    assert parse_strict_flag(StrictHandling.IGNORE_ALL) is StrictHandling.IGNORE_ALL
    with pytest.raises(CheckpointingException, match="log_unexpected"):
        parse_strict_flag("nonsense")


@pytest.mark.parametrize(
    ("mode", "unexpected", "missing"),
    [
        (StrictHandling.LOG_UNEXPECTED, {"want"}, set()),
        (StrictHandling.LOG_ALL, {"want"}, {"have"}),
        (StrictHandling.RETURN_UNEXPECTED, {"want"}, set()),
        (StrictHandling.RETURN_ALL, {"want"}, {"have"}),
        (StrictHandling.IGNORE_ALL, {"want"}, set()),
        (StrictHandling.RAISE_UNEXPECTED, None, None),
        (StrictHandling.RAISE_ALL, None, None),
        (StrictHandling.ASSUME_OK_UNEXPECTED, None, None),
    ],
)
def test_strict_modes(
    mode: StrictHandling, unexpected: set[str] | None, missing: set[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each mode logs, returns or raises as Megatron's does, in both vocabularies."""
    wanted = [_cell(0, 1, key="both"), _cell(0, 1, key="want")]
    stored = name_keys([_cell(0, 1, key="both"), _cell(0, 1, key="have")])
    if unexpected is None:
        with pytest.raises(
            KeyMismatchError,
            match=r"^In the state dict, not in the checkpoint \(Megatron: Unexpected keys; torch: missing keys\): want",
        ):
            compare_keys(wanted, stored, mode, Comm(alone=True))
        return
    with caplog.at_level(logging.WARNING):
        keys = compare_keys(wanted, stored, mode, Comm(alone=True))
    assert (keys.unexpected, keys.missing) == (unexpected, missing)
    assert bool(caplog.records) == (mode in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL))


def test_who_ignores_all_mismatches_hears_of_none(caplog: pytest.LogCaptureFixture) -> None:
    """Unused keys warn by default, but not a caller who passed ``IGNORE_ALL``; who asks for an error gets it."""
    wanted = [_cell(0, 1, key="both")]
    stored = name_keys([*wanted, _cell(0, 1, key="have")])
    with caplog.at_level(logging.WARNING):
        compare_keys(wanted, stored, StrictHandling.IGNORE_ALL, Comm(alone=True), on_unused="warn")
    assert not caplog.records
    with pytest.raises(KeyMismatchError, match="unused keys"):
        compare_keys(wanted, stored, StrictHandling.IGNORE_ALL, Comm(alone=True), on_unused="error")


def _cells_of(key: str, *cells: int, count: int = 2) -> list[Any]:
    return [ShardedObject(key, None, (count,), (cell,)) for cell in cells]


def test_keys_of_objects_are_those_that_the_caller_gave() -> None:
    """A filter by suffix finds objects: a mismatch is the key, not the name of one shard, and shards are told apart."""
    stored = name_keys([*_cells_of("l.0._extra_state", 0, 1), *_cells_of("l.1._extra_state", 0, 1)])
    wanted = [*_cells_of("l.0._extra_state", 0), *_cells_of("l.2._extra_state", 0, 1)]
    keys = compare_keys(wanted, stored, StrictHandling.RETURN_ALL, Comm(alone=True))
    assert keys.missing == {"l.0._extra_state", "l.1._extra_state"}
    assert keys.unexpected == {"l.2._extra_state"}
    assert keys.absent == {"l.2._extra_state/shard_0_2", "l.2._extra_state/shard_1_2"}
    with pytest.raises(KeyMismatchError) as error:
        compare_keys(wanted, stored, StrictHandling.RAISE_ALL, Comm(alone=True))
    unexpected, missing = str(error.value).splitlines()
    assert unexpected.endswith(": l.2._extra_state")
    assert missing.endswith(": l.0._extra_state/shard_1_2, l.1._extra_state")


def test_an_object_that_is_stored_in_part_is_a_mismatch() -> None:
    """Without validation, too, the modes that look at all keys see that the checkpoint lacks a shard."""
    wanted = _cells_of("o", 0)
    stored = name_keys(wanted)
    with pytest.raises(KeyMismatchError, match=r"Unexpected keys.*: o \(the checkpoint has 1 of its 2 shards\)$"):
        compare_keys(wanted, stored, StrictHandling.RAISE_ALL, Comm(alone=True))
    assert compare_keys(wanted, stored, StrictHandling.RETURN_ALL, Comm(alone=True)).unexpected == {"o"}
    assert not compare_keys(wanted, stored, StrictHandling.RAISE_UNEXPECTED, Comm(alone=True)).unexpected


def test_an_object_of_another_grid_of_ranks_is_told_from_one_that_is_not_stored() -> None:
    """Random numbers of 4 ranks, wanted by 1: the error has both grids and the way out, beside the key."""
    stored = name_keys([ShardedObject("rng", None, (2, 2), (dp, tp)) for dp in range(2) for tp in range(2)])
    with pytest.raises(KeyMismatchError) as error:
        compare_keys(_cells_of("rng", 0, count=1), stored, StrictHandling.ASSUME_OK_UNEXPECTED, Comm(alone=True))
    assert "another grid of ranks: rng as (2, 2), wanted as (1,). Ask for them as" in str(error.value)
    with pytest.raises(KeyMismatchError) as error:  # one of the same grid was lost
        compare_keys(
            _cells_of("rng", 1), name_keys(_cells_of("rng", 0)), StrictHandling.ASSUME_OK_UNEXPECTED, Comm(alone=True)
        )
    assert "another grid" not in str(error.value)


def test_names_of_a_damaged_index_do_not_hide_the_keys_that_do_not_match() -> None:
    """A name that is none of an object in a grid is passed over by what explains the mismatch."""
    stored = {"rng/junk": "rng", "rng/shard_x_2": "rng"}
    for mode in (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_ALL):
        with pytest.raises(KeyMismatchError, match="rng"):
            compare_keys(_cells_of("rng", 0, count=1), stored, mode, Comm(alone=True))


def test_keys_that_are_stored_behind_a_prefix_are_said_with_what_loads_them(tmp_path: Path) -> None:
    """Of a model that was saved with its optimizer, the error names the prefix; with that the model is loaded."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    dc.save(to_sharded_state_dict(model, optimizer), tmp_path / "c")
    with pytest.raises(KeyMismatchError, match=r"to_sharded_state_dict\(model, prefix='model\.'\)") as raised:
        dc.load(to_sharded_state_dict(model), tmp_path / "c")
    assert "log_unexpected" not in str(raised.value)  # it would load nothing
    other = torch.nn.Linear(4, 4)
    dc.load(to_sharded_state_dict(other, prefix="model."), tmp_path / "c")
    assert torch.equal(other.weight, model.weight)


class _CountedSet(set[str]):
    lookups = 0

    def __contains__(self, key: object) -> bool:
        self.lookups += 1
        return super().__contains__(key)


def test_advice_about_prefixes_looks_up_each_key_a_few_times() -> None:
    """Where all stored keys end with a short absent one, the cost is that of the keys, not of all pairs of them."""
    count = 200
    absent = _CountedSet({"scale", *(f"z.{n}" for n in range(count))})
    stored = _CountedSet({f"layers.{n}.scale" for n in range(count)} | {"layers.7.z.1"})
    assert "has 'layers.7.scale' and not 'scale' (2 keys so)" in _suggest_prefix(absent, stored)
    assert absent.lookups + stored.lookups < 10 * count
    tail = ".w" * 100_000  # all its tails would take gigabytes
    assert _suggest_prefix({"v.w"}, {f"a{tail}"}) == ""


@table(
    ("nest", "said"),
    [
        (lambda model, optim: {"model": model, "optim": optim}, "'optimizer' as 'optim'"),
        (
            lambda model, optim: {"app": {"model": model, "optim": optim}},
            "'model' as 'app.model', 'optimizer' as 'app.optim'",
        ),
    ],
    ids=["optim", "app"],
)
def test_the_names_of_torchs_tutorials_are_said_with_what_loads_them(
    tmp_path: Path, nest: Callable[[Any, Any], dict[str, Any]], said: str
) -> None:
    """Where plain DCP has the optimizer as ``optim``, or all in ``app``, the error names what loads it: the manager."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    dcp.save(nest(*get_state_dict(model, optimizer)), checkpoint_id=tmp_path / "old", no_dist=True)
    with pytest.raises(KeyMismatchError, match="a CheckpointManager loads it as it is") as raised:
        dc.load(to_sharded_state_dict(model, optimizer), tmp_path / "old")
    assert said in str(raised.value)
    assert "log_unexpected" not in str(raised.value)  # it would leave the optimizer as it is
    assert "prefix=" not in str(raised.value)
    other = torch.nn.Linear(4, 4)
    states = {"model": other, "optimizer": (again := torch.optim.AdamW(other.parameters()))}
    options: dict[str, Any] = {"initial_load_path": str(tmp_path / "old"), "initial_load_model_only": False}
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "new"), **options), states) as manager:
        assert manager.load()
    assert len(again.state) == 2


def test_numbers_of_parameters_are_said_with_what_loads_them(tmp_path: Path) -> None:
    """Of an optimizer that was saved by its own ``state_dict()`` the error names what loads it: the manager."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    with pytest.raises(KeyMismatchError, match="numbers for the parameters of the optimizer: a CheckpointManager"):
        dc.load(to_sharded_state_dict(model, optimizer), tmp_path / "old")


def test_a_key_that_is_stored_without_its_first_part_is_said() -> None:
    """Who asks for ``model.w`` where ``w`` is stored reads that, and how to describe a model so."""
    wanted = [_cell(0, 1, "model.layer.w"), _cell(0, 1, "model.layer.b"), _cell(0, 1, "model.none")]
    stored = name_keys([_cell(0, 1, "layer.w"), _cell(0, 1, "layer.b")])
    expected = r"has 'layer\.b' and not 'model\.layer\.b' \(2 keys so\): describe the keys without 'model\.'"
    with pytest.raises(KeyMismatchError, match=expected):
        compare_keys(wanted, stored, StrictHandling.RAISE_UNEXPECTED, Comm(alone=True))


def test_what_to_do_about_many_keys_comes_before_the_most_of_them() -> None:
    """Of 40 keys that are not stored, the error says how many and three, then what loads them, then 20 others."""
    wanted = [_cell(0, 1, f"model.layers.{n:02}.w") for n in range(40)]
    stored = name_keys([_cell(0, 1, shard.key.removeprefix("model.")) for shard in wanted])
    with pytest.raises(KeyMismatchError) as raised:
        compare_keys(wanted, stored, StrictHandling.ASSUME_OK_UNEXPECTED, Comm(alone=True))
    first, advice, others = str(raised.value).splitlines()
    assert first.endswith(": 40: model.layers.00.w, model.layers.01.w, model.layers.02.w, ... and 37 more")
    assert "(40 keys so): describe the keys without 'model.'" in advice
    assert others.startswith("In the state dict, not in the checkpoint, after the first 3: model.layers.03.w, ")
    assert others.endswith("model.layers.22.w, ... and 17 more")


def test_a_misspelt_key_is_asked_about() -> None:
    """The nearest stored key that nothing asks for is named; one that is asked for is not."""
    stored = name_keys([_cell(0, 1, "layer.weight"), _cell(0, 1, "layer.weigth2")])
    for wanted, near in [(["layer.wieght"], "weight"), (["layer.wieght", "layer.weight"], "weigth2")]:
        shards = [_cell(0, 1, key) for key in wanted]
        with pytest.raises(KeyMismatchError, match=rf"\nlayer\.wieght: did you mean layer\.{near}\?\nTo load the rest"):
            compare_keys(shards, stored, StrictHandling.ASSUME_OK_UNEXPECTED, Comm(alone=True))


@table(
    ("stored", "expected"),
    [
        ({"w", "optimizer.w"}, ["w", "none", "optimizer.w"]),
        ({"w", "model.other"}, ["model.w", "model.none", "optimizer.w"]),
        ({"w", "none", "model.other"}, ["w", "none", "optimizer.w"]),
        ({"w", "none", "model.w", "model.none"}, ["model.w", "model.none", "optimizer.w"]),
        ({"other"}, ["model.w", "model.none", "optimizer.w"]),
    ],
)
def test_a_model_at_the_top_level_is_found(stored: set[str], expected: list[str]) -> None:
    """Keys lose ``model.`` where the checkpoint has some of them so and none with it, or all so and not all with it."""
    shards = [_cell(0, 1, key) for key in ("model.w", "model.none", "optimizer.w")]
    use_bare_keys(shards, stored, "model.")
    assert [shard.key for shard in shards] == expected


def test_megatrons_terms_are_in_the_messages_of_their_kind_alone() -> None:
    """Its callers look for "Missing keys" and "Unexpected keys", and that the other is not there."""
    assert "Missing keys" in describe_mismatch({"w"}, ())
    assert "Unexpected keys" not in describe_mismatch({"w"}, ())
    assert "Unexpected keys" in describe_mismatch((), {"w"})
    assert "Missing keys" not in describe_mismatch((), {"w"})
