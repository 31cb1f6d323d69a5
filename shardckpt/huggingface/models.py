"""Built-in key mappings, by the ``model_type`` of a model of transformers.

The names are those of Megatron-Core 0.9 to 0.20, of transformers 5 (its conversion_mapping.py: trainers hold all
experts in one tensor, folders do not) and of torchtitan 0.1 to 0.3 (its Qwen3 adapter).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException, PluginError, name_known, show_given
from shardckpt.huggingface.adapters import find_adapter_mapping
from shardckpt.huggingface.mapping_file import find_file_mapping, read_config_file
from shardckpt.huggingface.megatron import (
    list_attention_rules,
    list_dense_rules,
    list_expert_rules,
    list_latent_attention_rules,
    list_prediction_rules,
    list_shared_expert_rules,
)
from shardckpt.huggingface.rules import Rule, RuleMapping
from shardckpt.huggingface.scaled import SCALE_ENDING
from shardckpt.plugins.key_mapping import Identity, KeyMapping, UsesConfig
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.origin import bracket_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from shardckpt.planning.boxes import Ints
    from shardckpt.plugins.key_mapping import KeyMapEntry, Padding

_LAYER = "model.layers.{layer}"
_EXPERTS = f"{_LAYER}.mlp.experts"
_HUB_EXPERT = f"{_EXPERTS}.{{expert}}"
_MIXTRAL = f"{_LAYER}.block_sparse_moe"


def _experts(
    hub: str = _HUB_EXPERT, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Iterable[Rule]:
    """Yield the rules of experts by the names of transformers, and of the block scales that 8-bit ones have."""
    for ending in ("", SCALE_ENDING):
        halves = (f"{hub}.{gate}.weight{ending}", f"{hub}.{up}.weight{ending}")
        yield Rule(f"{_EXPERTS}.gate_up_proj{ending}", halves)
        yield Rule(f"{_EXPERTS}.down_proj{ending}", (f"{hub}.{down}.weight{ending}",))


def _torchtitan_qwen3() -> Iterable[Rule]:
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    axes = {"w1": "EFD", "w2": "EDF", "w3": "EFD"}
    for ours, theirs in names.items():
        experts = (f"{_HUB_EXPERT}.{theirs}.weight",)
        yield Rule(f"layers.{{layer}}.moe.experts.{ours}", experts)
        yield Rule(f"layers.{{layer}}.moe.routed_experts.inner_experts.{ours}_{axes[ours]}", experts)
        yield Rule(f"layers.{{layer}}.feed_forward.{ours}.weight", (f"{_LAYER}.mlp.{theirs}.weight",))
    for letter in "qkv":
        for inner in ("attention", "attention.qkv_linear"):
            hub = (f"{_LAYER}.self_attn.{letter}_proj.weight",)
            yield Rule(f"layers.{{layer}}.{inner}.w{letter}.weight", hub)
    others = {
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "moe.router.gate": "mlp.gate",
    }
    for stored, hub_name in others.items():
        yield Rule(f"layers.{{layer}}.{stored}.weight", (f"{_LAYER}.{hub_name}.weight",))
    for counter in ("expert_bias", "tokens_per_expert"):
        yield Rule(f"layers.{{layer}}.moe.{counter}", ())  # used only in training
    yield Rule("tok_embeddings.weight", ("model.embed_tokens.weight",))
    yield Rule("norm.weight", ("model.norm.weight",))
    yield Rule("output.weight", ("lm_head.weight",))


class _ModelMapping(RuleMapping):
    """A table of several trainers' names; a checkpoint lacks most of them."""

    def with_config(self, config: Mapping[str, Any], padding: Padding) -> RuleMapping:
        """Return the table with the rules of layers that predict further tokens, whose numbers the config says."""
        return RuleMapping.with_config(
            _ModelMapping((*list_prediction_rules(self._rules, config), *self._rules)), config, padding
        )

    def knows(self, key: str) -> bool:
        """Return whether a name is one of a model's; so is the name of a weight's block scales."""
        return super().knows(key) or super().knows(key.removesuffix(SCALE_ENDING))

    def find_unused(self, keys: Collection[str]) -> Sequence[str]:  # noqa: ARG002 - that is as it should be
        """Return nothing."""
        return ()


_DENSE = (*list_dense_rules(), *list_attention_rules())
_QWEN_EXPERTS = tuple(
    list_expert_rules("mlp.gate.weight", *(f"mlp.experts.{{expert}}.{n}_proj.weight" for n in ("gate", "up", "down")))
)
_MIXTRAL_EXPERTS = tuple(
    list_expert_rules(
        "block_sparse_moe.gate.weight", *(f"block_sparse_moe.experts.{{expert}}.{n}.weight" for n in ("w1", "w3", "w2"))
    )
)
_QWEN2_SHARED = tuple(list_shared_expert_rules("mlp.shared_expert", "mlp.shared_expert_gate.weight"))
_DEEPSEEK = (*list_dense_rules(), *list_latent_attention_rules(), *list_shared_expert_rules("mlp.shared_experts"))
#: Megatron's names, by model type.
_MEGATRON: dict[str, tuple[Rule, ...]] = {
    "deepseek_v3": (*_DEEPSEEK, *_QWEN_EXPERTS),
    "llama": _DENSE,
    "mistral": _DENSE,
    "mixtral": (*_DENSE, *_MIXTRAL_EXPERTS),
    "qwen2": _DENSE,
    "qwen2_moe": (*_DENSE, *_QWEN_EXPERTS, *_QWEN2_SHARED),
    "qwen3": _DENSE,
    "qwen3_moe": (*_DENSE, *_QWEN_EXPERTS),
}
#: The rules for checkpoints of other trainers.
_OTHERS: dict[str, tuple[Rule, ...]] = {
    "deepseek_v3": tuple(_experts()),
    "mixtral": (
        *_experts(f"{_MIXTRAL}.experts.{{expert}}", "w1", "w3", "w2"),
        Rule(f"{_LAYER}.mlp.gate.weight", (f"{_MIXTRAL}.gate.weight",)),
    ),
    "qwen2_moe": tuple(_experts()),
    "qwen3_moe": (*_experts(), *_torchtitan_qwen3()),
}


class MegatronMapping:
    """Megatron's names alone, between which and the Hub's a conversion goes both ways; the config says the model."""

    def links(self, key: str, shape: Ints) -> Sequence[KeyMapEntry]:  # noqa: ARG002 - there is no table yet
        """Raise: without a config there is no table."""
        raise CheckpointingException(
            f"mapping {MEGATRON!r} takes the model's config.json, which says the model: give a folder that has it "
            "(assets=..., --assets), or name that file as the mapping"
        )

    def with_config(self, config: Mapping[str, Any], padding: Padding) -> RuleMapping:
        """Return the table of the config's model."""
        kind = config.get("model_type")
        if kind not in _MEGATRON:
            raise CheckpointingException(
                f"mapping {MEGATRON!r}: config.json has {kind!r} as model_type; there are tables for "
                f"{', '.join(_MEGATRON)}"
            )
        return _ModelMapping(_MEGATRON[str(kind)]).with_config(config, padding)


#: The mapping of Megatron's names to the names of the model that ``config.json`` says.
MEGATRON = "megatron"
_BUILT_IN: dict[str, KeyMapping] = {
    **{name: _ModelMapping((*rules, *_OTHERS.get(name, ()))) for name, rules in _MEGATRON.items()},
    MEGATRON: MegatronMapping(),
}


def find_mapping(
    mapping: str | os.PathLike[str] | KeyMapping | None,
    config: Callable[[], Mapping[str, Any] | None] | None = None,
    padding: Padding = "refuse",
) -> KeyMapping:
    """Find the key mapping for a caller's argument.

    ``mapping`` is a key mapping; the ``model_type`` of a model, which plugins resolve before the built-in mappings; a
    file, ``"rules.json"`` or ``"rules.py:MAPPING"``; the path of a model's ``config.json``, for the mapping of its
    ``model_type``; or None, which keeps names and shapes.

    ``config`` returns the content of the model's ``config.json``, which has the numbers of heads; None if there is
    none. It is called if the mapping may need them. ``padding`` is the treatment of rows of the embedding that the
    config's ``vocab_size`` does not count; to cut them, by a mapping that uses no config, or without a config, is an
    error. So is a model or file without a mapping, and a plugin that returns something else.
    """
    given = os.fspath(mapping) if isinstance(mapping, os.PathLike) else mapping
    if isinstance(given, str) and (found := read_config_file(given)) is not None:
        given, config = found["model_type"], lambda: found
    chosen = _find(given)
    if config is not None and isinstance(chosen, UsesConfig) and (values := config()):
        return chosen.with_config(values, padding)
    if padding == "cut":
        raise CheckpointingException(
            "cut_vocabulary (--cut-vocabulary) takes the key mapping of a model, and a folder with its config.json, "
            "which has the vocab_size (assets=..., --assets)"
        )
    return chosen


def _find(mapping: str | KeyMapping | None) -> KeyMapping:
    if mapping is None:
        return Identity()
    if not isinstance(mapping, str):
        return _validate(mapping, "the mapping")
    adapter = find_adapter_mapping(mapping)
    if adapter is not None:
        return adapter
    in_file = find_file_mapping(mapping)
    if in_file is not None:
        return in_file
    plugins = get_plugin_manager()
    try:
        found = plugins.hook.shardckpt_key_mapping(model_type=mapping)
    except Exception as exc:
        origin = bracket_origin(exc, plugins)
        raise PluginError(f"a plugin's shardckpt_key_mapping failed: {type(exc).__name__}: {exc}{origin}") from exc
    found = _BUILT_IN.get(mapping) if found is None else found
    if found is None:
        raise CheckpointingException(
            f"no mapping for models of type {mapping!r} {name_known(mapping, _BUILT_IN, 'built in', len(_BUILT_IN))}; "
            "plugins add others by shardckpt_key_mapping; a file of rules is FILE.json or FILE.py:MAPPING; None keeps "
            "the names"
            f"{plugins.faults_text()}"
        )
    return _validate(found, f"the mapping of {mapping!r}")


def _validate(mapping: object, what: str) -> KeyMapping:
    if isinstance(mapping, type):  # which has the method, and none of its rules
        raise PluginError(f"{what} is {show_given(mapping)}: give an object of it")
    if not isinstance(mapping, KeyMapping):
        raise PluginError(f"{what} is a {type(mapping).__name__}, which has no method links(key, shape)")
    return mapping
