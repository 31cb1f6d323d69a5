from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import CheckpointingException, PluginError, ShardingError
from shardckpt.huggingface import Rule, RuleMapping, rules
from shardckpt.huggingface.models import find_mapping
from shardckpt.huggingface.rules import _match
from shardckpt.planning.boxes import Box, intersect
from shardckpt.planning.coverage import find_hole, find_overlap
from shardckpt.plugins.key_mapping import Identity, KeyMapEntry, get_key_map_entries
from tests.tables import table


def _cut(mapping: RuleMapping, key: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a folder that a mapping makes of a stored one."""
    found: dict[str, torch.Tensor] = {}
    for link in get_key_map_entries(mapping, key, tuple(whole.shape)):
        part = whole[link.box.within(Box.from_shape(whole.shape))][(0,) * link.dropped]
        found[link.name] = part.transpose(-1, -2) if link.transposed else part
        assert found[link.name].shape == link.shape
    return found


@table("name", ["layers.3.moe.experts.w2", "layers.3.moe.routed_experts.inner_experts.w2_EDF"], ids=str)
def test_torchtitans_experts_have_the_same_names_on_the_hub(name: str) -> None:
    """Torchtitan holds w1, w2 and w3 apart, under other names in its releases."""
    whole = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    found = _cut(find_mapping("qwen3_moe"), name, whole)  # type: ignore[arg-type]
    assert {n: t.tolist() for n, t in found.items()} == {
        f"model.layers.3.mlp.experts.{expert}.down_proj.weight": whole[expert].tolist() for expert in range(2)
    }


def test_experts_that_are_stored_one_by_one_keep_their_numbers() -> None:
    """Where the stored name has the expert, a rule renames it, and splits no axis."""
    rule = Rule("e.{expert}.{w}", ("m.experts.{expert}.{w}.weight",))
    assert rule.links("e.3.w1", (4, 2)) == [*Identity().links("m.experts.3.w1.weight", (4, 2))]
    assert rule.links("deep.e.3.w1", (4, 2)) is None
    assert find_mapping("mixtral").links("lm_head.weight", (4, 3)) == Identity().links("lm_head.weight", (4, 3))


@table(
    ("stored", "hub", "text"),
    [
        ("a.{x}", ("b.{y}",), "'b.{y}' has the field 'y', which the stored name lacks"),
        ("a.{x}.{x}", ("b.{x}",), "'x' is there twice"),
        ("a.{x}", "b", r"give \('b',\)"),
    ],
)
def test_a_rule_that_cannot_be_applied_is_refused_when_it_is_made(stored: str, hub: Any, text: str) -> None:
    """A field that only one side has, or twice, and names that are no tuple, are errors that say so."""
    with pytest.raises(ShardingError, match=text):
        Rule(stored, hub)


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)), st.integers(1, 3), st.booleans(), st.randoms()
)
def test_links_tile_the_stored_tensor_and_boxes_go_both_ways(
    shape: tuple[int, int, int], parts: int, transposed: bool, random: object
) -> None:
    """Every element of a stored tensor is in one link; a part of a link has one place on each side."""
    shape = (shape[0], shape[1] * parts, shape[2])
    rule = Rule("w", tuple(f"{{expert}}.{n}" for n in range(parts)), transposed=transposed)
    links = get_key_map_entries(RuleMapping([rule]), "w", shape)
    boxes = [link.box for link in links]
    assert find_overlap(boxes) is None
    assert find_hole(shape, boxes) is None
    part = Box((0, shape[1] // 2, shape[2] // 2), (shape[0], shape[1] - shape[1] // 2, shape[2] - shape[2] // 2))
    for link in links:
        common = intersect(link.box, part)
        if common is not None:
            assert link.to_stored(link.to_folder(common)) == common
            assert intersect(link.folder_box, link.to_folder(common)) == link.to_folder(common)


def test_a_tensor_of_another_form_is_refused() -> None:
    """Rows that cannot be halved, or no axis of experts, are an error that names the tensor and the mapping's names."""
    for shape in ((2, 5, 3), (4,)):
        with pytest.raises(ShardingError, match=r"gate_up_proj.*the mapping of another model"):
            find_mapping("qwen3_moe").links("model.layers.0.mlp.experts.gate_up_proj", shape)


def test_unknown_models_and_wrong_mappings_are_refused() -> None:
    """Who knows no model, and what is no mapping, is said with what there is instead."""
    with pytest.raises(CheckpointingException, match=r"'gpt9' \(built in: .*mixtral, qwen2.*rules is FILE.json"):
        find_mapping("gpt9")
    with pytest.raises(PluginError, match="the mapping is a dict"):
        find_mapping({})  # type: ignore[arg-type]


class _Wrong:
    def __init__(self, link: KeyMapEntry) -> None:
        self.link = link

    def links(self, key: str, shape: tuple[int, ...]) -> list[KeyMapEntry]:
        return [self.link]


@table(
    "link",
    [
        KeyMapEntry("x", (2, 3), (0, 0), Box((0, 0), (3, 3))),
        KeyMapEntry("x", (9, 9), (0, 0), Box((2, 0), (2, 3))),
        KeyMapEntry("x", (3,), (0,), Box((0, 0), (2, 3))),
        KeyMapEntry("x", (3,), (0,), Box((0, 0), (1, 3)), transposed=True),
        KeyMapEntry("x", (3,), (1,), Box((0, 0), (1, 3))),
        KeyMapEntry("x", (3, 3, 3), (0, 0, 0), Box((0, 0), (1, 3))),
    ],
)
def test_links_must_lie_in_both_tensors(link: KeyMapEntry) -> None:
    """A plugin's mapping that leaves a tensor, or drops an axis that is not 1, is named and does no harm."""
    with pytest.raises(PluginError, match="_Wrong maps 'w'"):
        get_key_map_entries(_Wrong(link), "w", (3, 3))


def test_a_table_of_names_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand names is compared with its own rule and with patterns; the first rule that matches counts."""
    table_of_names = [Rule(f"layers.{number}.w", (f"model.{number}.w",)) for number in range(1000)]
    mapping = RuleMapping([Rule("layers.7.{part}", ("model.seven.{part}",)), *table_of_names])
    compared = []

    def match(template: str, key: str) -> Any:
        compared.append(template)
        return _match(template, key)

    monkeypatch.setattr(rules, "_match", match)
    keys = [rule.stored for rule in table_of_names]
    names = [mapping.links(key, (4,))[0].name for key in keys]
    assert names == ["model.seven.w" if number == 7 else f"model.{number}.w" for number in range(1000)]
    assert mapping.find_stored_shapes(dict.fromkeys(names, (4,))) == (dict.fromkeys(keys, (4,)), [])
    assert all(map(mapping.knows, [*keys, *names]))
    assert mapping.find_unused(keys[:999]) == ["layers.999.w"]
    assert len(compared) < 20_000
