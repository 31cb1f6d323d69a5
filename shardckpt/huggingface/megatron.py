"""Tables of names: Megatron-Core's GPTModel, as its checkpoints have it, and the models of transformers.

Keys have the number of a layer, or all layers along the first axis of one tensor; likewise experts. Layer norms are
those of Transformer Engine's fused linear layers (``linear_qkv.layer_norm_weight``), or of modules of their own. Local
shards of a fused gate and up projection (``linear_fc1``) are stored so that the whole has first the gate, then up; with
``singleton_local_shards`` they are two tensors, ``weight_w`` and ``weight_v``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from shardckpt.errors import CheckpointingException, ShapeMismatchError
from shardckpt.huggingface.rules import HubConfig, Rows, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: A layer by its number, and all along the first axis.
_STORED = ("decoder.layers.{layer}", "decoder.layers")
_HUB = "model.layers.{layer}"
#: A tensor that every GPTModel has, and no class of the Hub.
MEGATRON_NAME = "embedding.word_embeddings.weight"
_WEIGHTS = ("weight", "bias")
#: Models whose head_dim is hidden_size / num_attention_heads where config.json has none.
_DERIVE_HEAD_DIM = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe")


def list_attention_rules() -> Iterator[Rule]:
    """Yield the rules of attention with a fused linear layer of queries, keys and values, and its norms."""
    for kind in _WEIGHTS:
        hub = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        yield from _layer(f"self_attention.linear_qkv.{kind}", *hub, split=split_qkv)
    for letter in "qk":
        yield from _layer(f"self_attention.{letter}_layernorm.weight", f"self_attn.{letter}_norm.weight")


def list_dense_rules() -> Iterator[Rule]:
    """Yield the rules that all models share: the ends, the norms of layers, attention's output, and dense MLPs."""
    yield Rule(MEGATRON_NAME, ("model.embed_tokens.weight",), split=split_vocabulary)
    yield Rule("output_layer.weight", ("lm_head.weight",), split=split_vocabulary)
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
    for kind in _WEIGHTS:
        yield from _layer(f"self_attention.linear_proj.{kind}", f"self_attn.o_proj.{kind}")
    for fused, beside, apart, hub in (
        ("self_attention.linear_qkv", "self_attn.k_proj", "input_layernorm", "input_layernorm"),
        ("mlp.linear_fc1", "mlp.gate_proj", "pre_mlp_layernorm", "post_attention_layernorm"),
    ):
        yield from _layer(f"{fused}.layer_norm_weight", f"{hub}.weight", beside=f"{_HUB}.{beside}.weight")
        yield from _layer(f"{apart}.weight", f"{hub}.weight")
    yield from _mlp("mlp", "mlp")


def list_latent_attention_rules() -> Iterator[Rule]:
    """Yield the rules of multi-latent attention; its norms are in Transformer Engine's up projections, or apart."""
    yield from _layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight")
    for letter, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
        yield from _layer(f"self_attention.linear_{letter}_down_proj.weight", f"self_attn.{down}.weight")
        yield from _layer(f"self_attention.linear_{letter}_up_proj.weight", f"self_attn.{letter}_b_proj.weight")
        for norm in (f"linear_{letter}_up_proj.layer_norm_weight", f"{letter}_layernorm.weight"):
            yield from _layer(f"self_attention.{norm}", f"self_attn.{letter}_a_layernorm.weight")


def list_prediction_rules(rules: Sequence[Rule], config: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the rules of layers that predict further tokens, which folders number after the others.

    ``rules`` are the rules of other layers, which serve for the layers in these. ``config.json`` has the numbers of
    both.
    """
    first, count = (config.get(name) for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    if not (_is_count(first) and _is_count(count)):
        return
    parts = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    for number in range(count):
        for stored, hub in parts.items():
            name = f"model.layers.{first + number}.{hub}.weight"
            yield Rule(f"mtp.layers.{number}.{stored}.weight", (name,))
        for rule in rules:
            if rule.stored.startswith(_STORED[0]):
                hubs = tuple(name.replace("{layer}", str(first + number)) for name in rule.hub)
                rest = rule.stored.removeprefix(_STORED[0])
                for inner in ("transformer_layer", "mtp_model_layer"):  # until Megatron-Core 0.16, and since
                    beside = rule.beside.replace("{layer}", str(first + number))
                    yield replace(rule, stored=f"mtp.layers.{number}.{inner}{rest}", hub=hubs, beside=beside)


def list_expert_rules(router: str, gate: str, up: str, down: str) -> Iterator[Rule]:
    """Yield the rules of a router and its experts, from the folder's names of these, without the layer's name.

    Experts are along an axis, numbered in the stored name, or have the names of a module's parameters: of a grouped
    linear layer (``linear_fc1.weight3``) or a list (``local_experts.3``), which is of use where one rank has them all.
    """
    yield from _layer("mlp.router.weight", router)
    bias = router.replace(".weight", ".e_score_correction_bias")
    yield from _layer("mlp.router.expert_bias", bias, keep_dtype=True)  # of 32 bits, whatever the others are
    for experts, number in (
        ("mlp.experts.experts", ""),
        ("mlp.experts.experts.{expert}", ""),
        ("mlp.experts", "{expert}"),
        ("mlp.experts.local_experts.{expert}", ""),
    ):
        yield from _layer(f"{experts}.linear_fc1.weight{number}", gate, up)
        yield from _layer(f"{experts}.linear_fc2.weight{number}", down)
    yield from _layer("mlp.experts.experts.{expert}.linear_fc1.weight_w", gate)
    yield from _layer("mlp.experts.experts.{expert}.linear_fc1.weight_v", up)


def list_shared_expert_rules(hub: str, gate: str | None = None) -> Iterator[Rule]:
    """Yield the rules of shared experts, from the folder's names of these and of their gate."""
    yield from _mlp("mlp.shared_experts", hub)
    if gate is not None:
        yield from _layer("mlp.shared_experts.gate_weight", gate)


def _mlp(stored: str, hub: str) -> Iterator[Rule]:
    for kind in _WEIGHTS:
        yield from _layer(f"{stored}.linear_fc1.{kind}", f"{hub}.gate_proj.{kind}", f"{hub}.up_proj.{kind}")
        yield from _layer(f"{stored}.linear_fc1.{kind}_w", f"{hub}.gate_proj.{kind}")
        yield from _layer(f"{stored}.linear_fc1.{kind}_v", f"{hub}.up_proj.{kind}")
        yield from _layer(f"{stored}.linear_fc2.{kind}", f"{hub}.down_proj.{kind}")


def _layer(stored: str, *hub: str, **options: Any) -> Iterator[Rule]:
    for prefix in _STORED:
        yield Rule(f"{prefix}.{stored}", tuple(f"{_HUB}.{name}" for name in hub), **options)


def split_qkv(rows: int, config: HubConfig | None) -> Sequence[Rows]:
    """Return the rows of queries, keys and values: each group has the rows of its queries, of a key and of a value.

    It is an error if there is no config, or the number of rows contradicts its heads and groups.
    """
    if config is None:
        raise CheckpointingException(
            "to part queries, keys and values takes the numbers of heads: give a folder with the model's config.json "
            "(assets=..., --assets), or name that file as the mapping"
        )
    heads = config.values.get("num_attention_heads")
    groups = config.values.get("num_key_value_heads") or heads
    if not (_is_count(heads) and _is_count(groups)):
        raise CheckpointingException(
            f"config.json has {heads!r} as num_attention_heads and {groups!r} as num_key_value_heads: expected numbers"
        )
    queries = heads // groups
    size, rest = divmod(rows, groups * (queries + 2))
    head_dim = config.values.get("head_dim") or _derive_head_dim(config, heads) or size
    if heads % groups or rest or size != head_dim:
        raise ShapeMismatchError(
            f"{rows} rows are not those of {heads} heads in {groups} groups of config.json (head_dim {head_dim}): "
            "is it the config of another model?"
        )
    each = queries * size
    found = []
    for group in range(groups):
        start = group * (each + 2 * size)
        found += [
            Rows(0, start, group * each, each),
            Rows(1, start + each, group * size, size),
            Rows(2, start + each + size, group * size, size),
        ]
    return found


def _derive_head_dim(config: HubConfig, heads: int) -> int | None:
    """Return the size of a head where the config does not have it; None of models that do not derive it."""
    hidden = config.values.get("hidden_size")
    if config.values.get("model_type") not in _DERIVE_HEAD_DIM or not _is_count(hidden):
        return None
    return hidden // heads


def split_vocabulary(rows: int, config: HubConfig | None) -> Sequence[Rows]:
    """Return the rows of the vocabulary, without its padding if that is to be cut.

    Other rows than the config's ``vocab_size``, unless they are cut or kept, are a ShapeMismatchError.
    """
    size = config.values.get("vocab_size") if config is not None else None
    if config is None or not _is_count(size) or rows == size or config.padding == "keep":
        return [Rows(0, 0, 0, rows)]
    if rows < size or config.padding != "cut":
        raise ShapeMismatchError(
            f"config.json has a vocab_size of {size}, the checkpoint {rows} rows"
            + ("" if rows < size else ": cut those that pad the vocabulary (cut_vocabulary=True, --cut-vocabulary)")
            + f", or write {rows} as vocab_size into config.json"
        )
    return [Rows(0, 0, 0, size)]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
