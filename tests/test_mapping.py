from __future__ import annotations

import copy
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    PlainObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def test_from_rank_offsets_places_a_cell_of_a_regular_grid() -> None:
    """Piece i of n along an axis becomes offset and global shape, prepended axes counted."""
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6), (0, 1, 3), (2, 1, 2), prepend_axis_num=1)
    assert shard.global_shape == (3, 4, 12)
    assert shard.global_offset == (1, 0, 6)
    assert shard.axis_fragmentations == (3, 1, 2)
    assert shard.has_regular_grid
    assert shard.local_chunk_offset_in_global() == (1, 0, 1)


@table(
    ("fields", "fault"),
    [
        ({"dtype": torch.int8}, "dtype"),
        ({"local_shape": (5,)}, "offset"),
        ({"global_offset": (2,)}, "offset"),
        ({"global_offset": (0, 0)}, "differ in length"),
        ({"prepend_axis_num": 1}, "prepended"),
        ({"global_offset": (-4,)}, "negative"),
        ({"axis_fragmentations": (1, 1)}, "axis_fragmentations"),
        ({"global_shape": (6,), "global_offset": (2,)}, "multiple"),
        ({"flattened_range": slice(0, 9)}, "flattened"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(fields: dict[str, object], fault: str) -> None:
    """Shapes, offsets, dtype and data are checked when the description is made, and the fault is named."""
    good = {
        "key": "w",
        "data": torch.zeros(4),
        "dtype": torch.float32,
        "local_shape": (4,),
        "global_shape": (4,),
        "global_offset": (0,),
        "axis_fragmentations": (1,),
    }
    ShardedTensor(**good)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=fault):
        ShardedTensor(**{**good, **fields})  # type: ignore[arg-type]


@table("offsets", [((0, 2, 2),), ((0, 0, 1), (0, 0, 1)), ((1, 0, 2),)])
def test_rank_offsets_outside_the_grid_are_refused(offsets: tuple[tuple[int, int, int], ...]) -> None:
    """A shard that does not exist, an axis named twice and an axis out of range are errors."""
    with pytest.raises(ShardingError, match="axis"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(4), *offsets)


@table(
    ("key", "data", "offsets", "fault"),
    [
        ("w", None, (), r"'w': data is None, expected the local tensor; .*\.without_data\(\)"),
        ("w", [1.0], (), "data is an object of type list"),
        (7, torch.ones(2), (), "key is 7, expected the name"),
        ("w", torch.ones(2), (0, 0, 2), r"rank offset 0 is no tuple \(axis, i, n\)"),
        ("w", torch.ones(2), ((0, 2),), r"rank offset \(0, 2\) is no tuple"),
        ("w", torch.ones(2), ((0, 0.5, 2),), r"rank offset \(0, 0\.5, 2\) is no tuple"),
        ("w", torch.ones(2), ((0, 0, 0),), "has 0 shards along axis 0, expected 1 or more"),
        ("w", torch.ones(2), ((0, 2, 2),), "shard 2 of 2 along axis 0 does not exist"),
        ("w", torch.ones(2), ((0, 0, 1), (0, 0, 1)), "axis 0 is named twice"),
        ("w", torch.ones(2), ((torch.tensor(0), 0, 1), (torch.tensor(0), 0, 1)), "axis 0 is named twice"),
        ("w", torch.ones(2), ((1, 0, 2),), "there is no axis 1: the 1 axes count from 0"),
    ],
)
def test_wrong_arguments_are_named(key: Any, data: Any, offsets: tuple[Any, ...], fault: str) -> None:
    """What is no tensor, no name or no place in a grid is refused in words, in both forms."""
    with pytest.raises(ShardingError, match=fault):
        ShardedTensor.from_rank_offsets(key, data, *offsets)
    with pytest.raises(ShardingError, match=fault):
        ShardedTensor.from_rank_offsets_flat(key, data, (2,), *offsets, flattened_range=slice(0, 2))


def test_rank_offsets_of_numpy_and_torch_become_integers() -> None:
    """Numbers of a mesh or an array are those of Python, which print and compare as other ranks' do."""
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, torch.tensor(1), torch.tensor(2)))
    assert repr(shard) == repr(ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 2)))


def test_narrow_moves_every_rank_alike() -> None:
    """Narrowing a local axis shrinks the global one by the same share."""
    shard = ShardedTensor.from_rank_offsets("w", torch.arange(8.0).reshape(4, 2), (0, 1, 2))
    (narrowed,) = shard.narrow(0, 1, 2)
    assert (narrowed.local_shape, narrowed.global_shape, narrowed.global_offset) == ((2, 2), (4, 2), (2, 0))
    assert narrowed.data is not None
    assert narrowed.data.tolist() == [[2, 3], [4, 5]]


def test_narrow_takes_an_axis_from_the_end() -> None:
    """A negative axis or start counts from the end of the local tensor, whatever axes are prepended."""
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 1, 2), prepend_axis_num=1)
    assert repr(shard.narrow(-1, 0, 1)) == repr(shard.narrow(1, 0, 1))
    assert repr(shard.narrow(1, -1, 1)) == repr(shard.narrow(1, 1, 1))


@table(("dim", "start", "length"), [(2, 0, 1), (-3, 0, 1), (0, 3, 4), (0, -1, 2), (1, 0, -1)])
def test_narrow_refuses_what_is_not_there(dim: int, start: int, length: int) -> None:
    """An axis or indices that the local tensor lacks are an error by key, of a description without data, too."""
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2))
    for each in (shard, shard.without_data()):
        with pytest.raises(ShardingError, match=rf"'w': narrow\({dim}, {start}, {length}\) keeps indices that"):
            each.narrow(dim, start, length)


@table(
    ("change", "fault"),
    [
        ({"local_shape": 4}, r"of another type than the class says \('int' object is not iterable\)"),
        ({"global_offset": None}, "of another type than the class says"),
        ({"prepend_axis_num": "0"}, "of another type than the class says"),
        ({"global_offset": (0.0,)}, r"global_offset \(0\.0,\) or local_shape \(4,\) has a float in it"),
        ({"dtype": "float32", "data": None}, "dtype is 'float32', expected one such as torch.float32"),
        ({"axis_fragmentations": (0,)}, r"axis_fragmentations \(0,\) does not have 1 axes of 1 shard or more"),
    ],
)
def test_fields_of_another_type_are_named(change: dict[str, Any], fault: str) -> None:
    """A field of a type that a description does not have is an error by key, not a TypeError now or in a load."""
    data = torch.ones(4)
    given = {"data": data, "dtype": data.dtype, "local_shape": (4,), "global_shape": (4,), "global_offset": (0,)}
    with pytest.raises(ShardingError, match=rf"ShardedTensor 'w': .*{fault}"):
        ShardedTensor("w", **{**given, "axis_fragmentations": (1,), **change})


class _Named(ShardedTensor):
    """A description of a user's own."""

    name = "unnamed"


def test_copies_have_every_field() -> None:
    """A copy of a description has all values of it, a subclass's too, and not its promise to stay as it is."""
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    for number, each in enumerate(fields(ShardedTensor)):
        setattr(shard, each.name, (each.name, number))
    copied = copy.copy(shard)
    assert [getattr(copied, each.name) for each in fields(ShardedTensor)] == [
        getattr(shard, each.name) for each in fields(ShardedTensor)
    ]
    named = _Named(**vars(ShardedTensor.from_rank_offsets("w", torch.ones(3))))
    named.name = "mine"
    named.fix_fields()
    assert named.fixed_fields is not None
    renamed = copy.copy(named)
    assert type(renamed) is _Named
    assert renamed.name == "mine"
    assert renamed.fixed_fields is None
    plain = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    plain.fix_fields()
    assert copy.copy(plain).fixed_fields is None


def test_without_data_and_init_data() -> None:
    """A description without data allocates it on demand, once."""
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(3)).without_data()
    assert shard.data is None
    shard.init_data("cpu", torch.zeros)
    assert shard.data is not None
    kept = shard.data
    shard.init_data("cpu", torch.ones)
    assert shard.data is kept


def test_flattened_shards_are_slices_of_a_cell() -> None:
    """The legacy flattened form has one axis of data and the cell's geometry."""
    shard = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(5), (4, 6), (0, 1, 2), flattened_range=slice(2, 7))
    assert (shard.global_shape, shard.local_shape, shard.data_shape) == ((8, 6), (4, 6), (5,))
    with pytest.raises(ShardingError, match="from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(5), flattened_range=slice(0, 5))  # type: ignore[arg-type]


def test_arguments_of_flattened_shards_and_names_are_checked() -> None:
    """A shape that is one number, a range that is a pair, and a name that is no text are errors by name."""
    data: Any = torch.zeros(5)
    for shape in (24, None, "24", ("a",)):
        with pytest.raises(ShardingError, match=r"'w': non_flat_local_shape is .*, expected the shape of the cell"):
            ShardedTensor.from_rank_offsets_flat("w", data, shape, flattened_range=slice(2, 7))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=r"'w': flattened_range is .*, expected slice\(start, stop\)"):
        ShardedTensor.from_rank_offsets_flat("w", data, (4, 6), flattened_range=(2, 7))  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="unique_key=None: expected the name"):
        ShardedObject.empty_from_unique_key(None)  # type: ignore[arg-type]


@table("key", ["a", "a/b/shard_0_1", "layers.0._extra_state", "shard_1_2", "x/", "", "a_b/c_d"])
@table(("shape", "offset"), [((1,), (0,)), ((2, 3), (1, 2)), ((), ())])
def test_unique_keys_decode_to_what_they_encode(key: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    """Any key, with slashes and with parts that look like the suffix, survives the unique key."""
    made = ShardedObject(key, None, shape, offset)
    assert ShardedObject.empty_from_unique_key(made.unique_key) == made


def test_unique_keys_of_old_releases_lack_the_last_extent() -> None:
    """Megatron 0.4 to 0.7 lost the last extent; it is taken as the offset plus one."""
    found = ShardedObject.empty_from_unique_key("rng_state/shard_0.1_1")
    assert (found.global_shape, found.global_offset) == ((1, 2), (0, 1))


@table("text", ["", "plain", "a/shard_", "a/shard_x_y", "a/shard_0"])
def test_other_names_are_not_unique_keys(text: str) -> None:
    """A name that is not of the form is an error of the family."""
    with pytest.raises(CheckpointingException, match="shard"):
        ShardedObject.empty_from_unique_key(text)


@table("text", ["a", "a/shard_0_2.amax", "a/shard_0_2.0", "a/shard_0_2.0.b", "a/shard_x"])
def test_other_names_are_those_of_plain_objects(text: str) -> None:
    """What is no place in a grid, as a value inside an object of one, is a plain object; a place stays one."""
    assert PlainObject.empty_from_unique_key(text) == PlainObject(text, None)
    assert PlainObject.empty_from_unique_key("a/shard_0_2") == ShardedObject("a", None, (2,), (0,))


def test_objects_lie_in_their_grid() -> None:
    """An offset outside the grid is refused."""
    with pytest.raises(ShardingError, match="outside"):
        ShardedObject("o", 1, (2,), (2,))
    with pytest.raises(ShardingError, match="length"):
        ShardedObject("o", 1, (2, 1), (0,))


def test_main_replica() -> None:
    """0 and tuples of zeros are written, all others are copies."""
    assert is_main_replica(0)
    assert is_main_replica((0, 0))
    assert not is_main_replica(1)
    assert not is_main_replica((0, 1))


def test_factory_builds_from_its_own_fields() -> None:
    """build() hands key, data, replica id and range to the function."""
    factory = ShardedTensorFactory(
        "k", torch.ones(2), lambda *args: list(args), lambda x: x, replica_id=3, flattened_range=slice(0, 1)
    )
    key, data, replica_id, part = factory.build()
    assert (key, data.tolist(), replica_id, part) == ("k", [1, 1], 3, slice(0, 1))
    with pytest.raises(CheckpointingException, match="ShardedTensorFactory"):
        factory.without_data()


@pytest.mark.parametrize("replica_id", [None, "0", 0.5, (0, None)])
def test_names_of_shards_are_checked(tmp_path: Path, replica_id: Any) -> None:
    """A key that is no text, and a replica id that is no integer, are errors by name, also where they are set later."""
    with pytest.raises(ShardingError, match="ShardedObject None: key is None, expected the name"):
        ShardedObject(None, 1, (1,), (0,))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="ShardedTensor 3: key is 3, expected the name"):
        dc.save({"w": ShardedTensor(3, torch.ones(2), torch.float32, (2,), (2,), (0,), (1,))}, tmp_path / "a")  # type: ignore[arg-type]
    for shard in (ShardedTensor.from_rank_offsets("w", torch.ones(2)), ShardedObject("w", 1, (1,), (0,))):
        shard.replica_id = replica_id
        with pytest.raises(ShardingError, match=r"'w': replica_id is .*, expected an integer or a tuple"):
            dc.save({"w": shard}, tmp_path / "a")


class _Name(str, Enum):
    TENSOR = "w"
    OBJECT = "o"


def test_a_member_of_an_enum_is_the_key_that_its_value_is(tmp_path: Path) -> None:
    """Keys of a class of texts are stored as these texts, not under the names that the class shows."""
    made = {
        "w": ShardedTensor.from_rank_offsets(_Name.TENSOR, torch.ones(2)),
        "o": ShardedObject(_Name.OBJECT, 1, (), ()),
    }
    dc.save(made, tmp_path / "a")
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "o": ShardedObject("o", None, (), ())}
    loaded = dc.load(wanted, tmp_path / "a")
    assert (loaded["w"].tolist(), loaded["o"]) == ([1, 1], 1)


@pytest.mark.parametrize("built", [None, torch.ones(2), "k"])
def test_a_factory_that_builds_no_shards_is_refused(tmp_path: Path, built: Any) -> None:
    """A build_fn without a `return` is said: its tensor was not stored, without a word."""
    state = {"w": ShardedTensorFactory("w", torch.ones(2), lambda *_: built, lambda loaded: loaded)}
    with pytest.raises(CheckpointingException, match="ShardedTensorFactory 'w': its build_fn returned"):
        dc.save(state, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_numpys_number_of_axes() -> None:
    """A number of prepended axes may be numpy's."""
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2), prepend_axis_num=np.int64(1))
    assert (shard.global_shape, type(shard.prepend_axis_num)) == ((1, 2), int)


def test_local_objects_unwrap() -> None:
    """A local object gives back what it wraps, under both spellings of its name."""
    value = object()
    assert LocalNonpersistentObject(value).unwrap() is value
    assert LocalNonpersitentObject is LocalNonpersistentObject


def test_a_number_in_the_place_of_a_shape_is_an_error_by_key() -> None:
    """A description without data takes a tuple; the error of a number shows the tuple of one axis."""
    with pytest.raises(ShardingError, match=r"'w': the shape 3 is no tuple: pass \(3,\) for one axis"):
        ShardedTensor.from_global_shape("w", torch.float32, 3)  # type: ignore[arg-type]
