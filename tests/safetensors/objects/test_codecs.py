from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardckpt_safetensors
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, PluginError, ShardingError
from shardckpt_safetensors.objects import codecs, decode_object, encode_object, register_codec
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator

WHAT = "object 'plan'"


class Phase(enum.Enum):
    """An enum of a user."""

    WARM = 1


class Schedule(dict):  # type: ignore[type-arg]
    """A class of a user, which derives from one of the format's."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)


@pytest.fixture(autouse=True)
def _own_codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(codecs, "_BY_NAME", {})
    monkeypatch.setattr(codecs, "_BY_CLASS", {})
    return


def test_registered_classes_come_back() -> None:
    """Instances of classes with a codec are stored by it, with tensors and other such instances in them."""
    assert shardckpt_safetensors.register_codec is register_codec
    register_codec("acme.Phase", Phase, lambda member: member.name, lambda name: Phase[name])
    register_codec("acme.Schedule", Schedule, dict, lambda fields: Schedule(**fields))
    value = [Schedule(phase=Phase.WARM, weights=torch.arange(3)), {Phase.WARM: Schedule()}]
    back = decode_object(*encode_object(value, WHAT), WHAT)
    assert torch.equal(back[0].pop("weights"), value[0].pop("weights"))
    assert back == value
    assert type(back[0]) is Schedule
    assert encode_object(Phase.WARM, WHAT) == ("json", b'{"$":"acme.Phase","v":"WARM"}')


def test_a_reader_without_the_codec_refuses_the_object_by_name() -> None:
    """What a codec stored that is not registered is an error that names the object, the codec, and what to call."""
    data = b'["a",{"$":"acme.Phase","v":"WARM"}]'
    with pytest.raises(
        CheckpointingException, match=r"^object 'plan' .*'acme.Phase'.*register_codec\('acme.Phase', "
    ) as caught:
        decode_object("json", data, WHAT)
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_two_codecs_do_not_meet() -> None:
    """A name or class that is taken is an error that names both; override=True replaces what was there."""
    register_codec("acme.Phase", Phase, lambda member: member.name, lambda name: Phase[name])
    for name, cls in (("acme.Phase", Schedule), ("acme.Other", Phase)):
        with pytest.raises(PluginError, match=r"Phase has the codec 'acme.Phase' already; pass override=True"):
            register_codec(name, cls, dict, dict)
    register_codec("acme.Other", Phase, lambda member: member.value, Phase, override=True)
    assert encode_object(Phase.WARM, WHAT)[1].rstrip() == b'{"$":"acme.Other","v":1}'
    with pytest.raises(CheckpointingException, match=r"acme\.Phase"):
        decode_object("json", b'{"$":"acme.Phase","v":"WARM"}', WHAT)


@table("name", ["Phase", "", ".a", "a.", "a..b", "a b.c", "$a.b", "é.b", "a." + "b" * 255, "a.b\n"])
def test_malformed_names_are_refused(name: str) -> None:
    """A codec's name has a dot and plain characters, so that it is never one of the format's."""
    with pytest.raises(PluginError, match=r"such as 'acme.Schedule'"):
        register_codec(name, Phase, repr, repr)


def test_the_formats_own_classes_are_refused() -> None:
    """A codec for a class that the format stores itself would never be asked: it is an error."""
    with pytest.raises(PluginError, match="the format stores dict itself"):
        register_codec("acme.dict", dict, list, dict)


def test_a_codec_that_fails_is_named() -> None:
    """An exception of a codec's functions becomes an error of the family, with the object and the codec."""
    register_codec("acme.Phase", Phase, lambda member: member.nothing, lambda name: Phase[name])
    with pytest.raises(ShardingError, match=r"object 'plan'\[0\] .*codec 'acme.Phase' fails to encode: AttributeError"):
        encode_object([Phase.WARM], WHAT)
    with pytest.raises(
        CorruptCheckpointError, match=r"object 'plan' .*codec 'acme.Phase' fails to decode it: KeyError"
    ):
        decode_object("json", b'{"$":"acme.Phase","v":"COLD"}', WHAT)


def test_a_codec_that_never_ends_is_refused() -> None:
    """A codec that returns new instances of its own class is too deep, not an endless loop."""
    register_codec("acme.Schedule", Schedule, lambda value: [Schedule()], list)
    with pytest.raises(ShardingError, match="below 500 others"):
        encode_object(Schedule(), WHAT)
