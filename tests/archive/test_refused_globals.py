"""All globals that a load refuses are named in one error, with their places where these are known."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.archive import decode_object, encode_object
from shardckpt.errors import ShardingError, UnsafePickleError
from shardckpt.mapping import ShardedObject

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@dataclass
class Plan:
    """A class that no load knows."""

    steps: int = 3


@dataclass
class Job:
    """One that has another."""

    plan: Plan = field(default_factory=Plan)
    parts: list[Any] = field(default_factory=list)


class Names(dict[str, int]):
    """A dict of a class of its own."""


def _name(*classes: type) -> list[str]:
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in classes]


STATE = {"a": Plan(), "b": [1, {"c": Job(parts=[Fraction(1, 2)])}], "d": Plan(4), "e": torch.ones(2)}


def test_a_quantized_tensor_is_refused_without_advice_that_cannot_help() -> None:
    """Whatever is allowed, it cannot be read: the error says what to save in its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to remove them, and checkpoints stay
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsafePickleError, match=r"'x'\['q'\]: .*\n.*int_repr\(\), scale and zero point") as caught:
        encode_object({"q": quantized}, "'x'", ())
    assert "allow_globals" not in str(caught.value)
    assert not caught.value.can_be_allowed


def test_the_save_names_all_of_a_value() -> None:
    """One error has each place with its classes, and a list to allow them all, with which the value is saved."""
    with pytest.raises(UnsafePickleError) as caught:
        encode_object(STATE, "object 'run'", ())
    text = str(caught.value)
    plan, job, fraction = _name(Plan, Job, Fraction)
    assert f"object 'run'['a']: {plan}\n" in text
    assert f"object 'run'['b'][1]['c']: {job}, {plan}, {fraction}\n" in text
    assert f"object 'run'['d']: {plan}\n" in text
    assert "allow_globals=[Plan, Job, Fraction]" in text
    assert caught.value.refused == (plan, job, fraction)
    back = decode_object(encode_object(STATE, "object 'run'", [Plan, Job, Fraction]), "it", [Plan, Job, Fraction])
    assert back["b"] == STATE["b"]


def test_what_is_allowed_is_not_named() -> None:
    """Only what is missing from the list is said; one class alone has the sentence that it has always had."""
    with pytest.raises(UnsafePickleError) as caught:
        encode_object(STATE, "object 'run'", [Job, Plan])
    assert caught.value.refused == ("fractions.Fraction",)
    assert "object 'run'['b'][1]['c']: the pickle asks for fractions.Fraction, which is not on" in str(caught.value)


def test_a_load_names_all_of_an_archive() -> None:
    """The reader of a checkpoint sees all that it would have to allow, whatever the classes are inside of."""
    value = [STATE, Names(x=1), (Plan,)]
    data = encode_object(value, "it", [Plan, Job, Fraction, Names])
    with pytest.raises(UnsafePickleError, match=r"^object 'run': the pickle asks for globals that are not") as caught:
        decode_object(data, "object 'run'", ())
    assert caught.value.refused == tuple(_name(Plan, Job, Fraction, Names))
    assert "nothing was run" in str(caught.value)


_CALLS: list[str] = []


def call(value: Any) -> int:
    """Remember what it was called with."""
    _CALLS.append(type(value).__name__)
    return 1


class Calls:
    """An object that a function of the caller's makes of another."""

    def __reduce__(self) -> Any:
        return call, (Plan(),)


def test_what_the_caller_allows_is_not_called_with_stubs() -> None:
    """To name all that is refused, nothing of the caller's runs on what stands for refused objects."""
    data = encode_object([Calls(), Job()], "it", [call, Plan, Job])
    _CALLS.clear()
    with pytest.raises(UnsafePickleError) as caught:
        decode_object(data, "it", [call])
    assert caught.value.refused == tuple(_name(Plan, Job))
    assert _CALLS == []


def _save(path: str) -> None:
    rank = dist.get_rank()
    values = {"one": Plan(), "two": [Job()]}
    state = {key: ShardedObject(key, value, (1,), (0,), replica_id=rank) for key, value in values.items()}
    dc.save(state, path, "torch_dist")


def test_a_save_names_all_of_its_objects(ranks: Ranks, tmp_path: Path) -> None:
    """Several objects of a state are one error, which every rank raises."""
    outcomes = ranks.outcomes(2, _save, str(tmp_path / "c"))
    for outcome in outcomes:
        plan, job = _name(Plan, Job)
        for part in (f"object 'one/shard_0_1'[0]: {plan}", f"object 'two/shard_0_1'[0][0]: {job}, {plan}"):
            assert part in outcome.message


def test_what_has_no_codec_is_named_at_once(tmp_path: Path) -> None:
    """A format without pickles refuses values by their classes: all of a state's objects and of its common state."""
    state = {"one": ShardedObject("one", STATE, (1,), (0,)), "two": ShardedObject("two", [Job()], (1,), (0,))}
    with pytest.raises(ShardingError) as caught:
        dc.save(state, tmp_path / "c", "safetensors")
    places = ["one/shard_0_1'['a']", "one/shard_0_1'['b'][1]['c']", "one/shard_0_1'['d']", "two/shard_0_1'[0]"]
    for place, cls in zip(places, [Plan, Job, Plan, Job], strict=True):
        assert f"object '{place} cannot be stored: a {_name(cls)[0]} " in str(caught.value)
    with pytest.raises(ShardingError, match=r"(?s)the common state\['a'\] cannot .*the common state\['d'\] cannot"):
        dc.save(STATE, tmp_path / "c", "safetensors")


def test_the_common_state_is_no_exception(tmp_path: Path) -> None:
    """A save of plain values of several classes says all of them, and so does a load."""
    state = {"plan": Plan(), "args": {"job": Job()}}
    with pytest.raises(UnsafePickleError, match=r"(?s)\['plan'\]: .*Plan\n.*\['args'\]\['job'\]: .*Job, .*Plan"):
        dc.save(state, tmp_path / "c", "torch_dist")
    dc.save(state, tmp_path / "c", "torch_dist", allow_globals=[Plan, Job])
    with pytest.raises(UnsafePickleError, match=r"allow_globals=\[Plan, Job\]") as caught:
        dc.load_common_state_dict(tmp_path / "c")
    assert caught.value.refused == tuple(_name(Plan, Job))
