"""Small models by the Hub's names, and the shards that Megatron-Core's GPTModel saves of them under TP, PP and EP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tensor, pipeline and expert parallel; the ranks of data parallel are those of expert parallel.
TP = PP = EP = 2
SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}
#: By model type: what its config.json has besides.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 6},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 10,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
}
#: What the names of experts begin with in a folder, and those of gate, up and down.
_QWEN = ("mlp.experts", "mlp.gate.weight", ("gate_proj", "up_proj", "down_proj"))
EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", "block_sparse_moe.gate.weight", ("w1", "w3", "w2")),
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "deepseek_v3": _QWEN,
}
#: Likewise of shared experts.
SHARED = {"qwen2_moe": "mlp.shared_expert", "deepseek_v3": "mlp.shared_experts"}


def count_experts(config: dict[str, Any]) -> int:
    """Return the number of experts of a model."""
    return next(
        (config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config), 0
    )


def make_config(model_type: str) -> dict[str, Any]:
    """Return the content of a small model's config.json."""
    return {"model_type": model_type, **SIZES, **CONFIGS[model_type]}


def make_hub_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a model's tensors by the Hub's names, of distinct values."""
    found = {}
    start = 0
    for name, shape in _list_shapes(config):
        count = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return found


def _list_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, kind = config["hidden_size"], config["model_type"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], hidden)
    layers = config["num_hidden_layers"]
    predicting = config.get("num_nextn_predict_layers", 0)
    for layer in range(layers, layers + predicting):
        for name, shape in (("enorm", (hidden,)), ("hnorm", (hidden,)), ("eh_proj", (hidden, 2 * hidden))):
            yield f"model.layers.{layer}.{name}.weight", shape
        yield f"model.layers.{layer}.shared_head.norm.weight", (hidden,)
    for layer in range(layers + predicting):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if kind in EXPERTS and layer >= config.get("first_k_dense_replace", 0):
            yield from _list_experts(prefix, config)
        else:
            yield from _list_mlp(f"{prefix}.mlp", config, config["intermediate_size"])
        latent = "kv_lora_rank" in config
        yield from (_list_latent if latent else _list_attention)(f"{prefix}.self_attn", config)


def _list_attention(prefix: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, kind = config["hidden_size"], config["model_type"]
    size = config.get("head_dim", hidden // config["num_attention_heads"])
    heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    for letter, rows in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{prefix}.{letter}_proj.weight", (rows, hidden)
        if kind.startswith("qwen2") or config.get("attention_bias"):
            yield f"{prefix}.{letter}_proj.bias", (rows,)
    yield f"{prefix}.o_proj.weight", (hidden, heads)
    if config.get("attention_bias"):
        yield f"{prefix}.o_proj.bias", (hidden,)
    if kind.startswith("qwen3"):
        yield f"{prefix}.q_norm.weight", (size,)
        yield f"{prefix}.k_norm.weight", (size,)


def _list_latent(prefix: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, latent, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    yield f"{prefix}.q_a_proj.weight", (queries, hidden)
    yield f"{prefix}.q_a_layernorm.weight", (queries,)
    yield f"{prefix}.q_b_proj.weight", (heads * (config["qk_nope_head_dim"] + rope), queries)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (latent,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), latent)
    yield f"{prefix}.o_proj.weight", (hidden, heads * config["v_head_dim"])


def _list_experts(prefix: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts, router, names = EXPERTS[config["model_type"]]
    hidden, width = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    yield f"{prefix}.{router}", (count_experts(config), hidden)
    for expert in range(count_experts(config)):
        for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            yield f"{prefix}.{experts}.{expert}.{name}.weight", shape
    shared = SHARED.get(config["model_type"])
    if shared is not None:
        yield from _list_mlp(f"{prefix}.{shared}", config, config.get("shared_expert_intermediate_size", width))
    if config["model_type"] == "qwen2_moe":
        yield f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)
    if config["model_type"] == "deepseek_v3":
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (count_experts(config),)


def _list_mlp(prefix: str, config: dict[str, Any], width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        yield f"{prefix}.{name}_proj.weight", (rows, columns)
        if config.get("mlp_bias"):
            yield f"{prefix}.{name}_proj.bias", (rows,)


class MegatronRank:
    """The shards of one rank, as GPTModel describes them.

    ``style`` is ``"numbered"``: layers by numbers, norms in Transformer Engine's fused linear layers; ``"stacked"``:
    all layers along one axis, norms apart; or ``"single"``: as numbered, but gate and up, and experts, apart.
    """

    def __init__(
        self, hub: dict[str, torch.Tensor], config: dict[str, Any], rank: int, style: str, pad_to: int = 0
    ) -> None:
        self.hub, self.config, self.style, self.pad_to = hub, config, style, pad_to
        self.tp, self.dp, self.pp = rank % TP, rank // TP % EP, rank // TP // EP
        self.shards: list[ShardedTensor] = []
        layers = config["num_hidden_layers"]
        if self.pp == 0:
            self._add_vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")
        for layer in range(layers)[self.pp * layers // PP : (self.pp + 1) * layers // PP]:
            self._add_layer(layer)
        if f"model.layers.{layers}.enorm.weight" in hub and self.pp == PP - 1:
            self._add_prediction(layers)
        if self.pp == PP - 1:
            self._add("decoder.final_layernorm.weight", hub["model.norm.weight"])
            if "lm_head.weight" in hub:
                self._add_vocabulary("output_layer.weight", "lm_head.weight")
            else:  # the last stage's copy of the tied embedding
                self._add_vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", copy=1)

    def _add(self, key: str, whole: torch.Tensor, axis: int | None = None, *, copy: int = 0, **options: Any) -> None:
        """Add this rank's part along an axis; without one, a replica."""
        part = whole if axis is None else whole.chunk(TP, axis)[self.tp]
        cuts = [] if axis is None else [(axis, self.tp, TP)]
        self._describe(key, part, cuts, (copy, 0 if axis is not None else self.tp, self.dp), **options)

    def _describe(
        self,
        key: str,
        part: torch.Tensor,
        cuts: list[tuple[int, int, int]],
        replica_id: tuple[int, ...],
        prepended: tuple[tuple[int, int], ...] = (),
        **options: Any,
    ) -> None:
        lead = len(prepended)
        offsets = [(axis, at, of) for axis, (at, of) in enumerate(prepended)]
        offsets += [(lead + axis, at, of) for axis, at, of in cuts]
        self.shards.append(
            ShardedTensor.from_rank_offsets(
                key, part.clone(), *offsets, replica_id=replica_id, prepend_axis_num=lead, **options
            )
        )

    def _add_vocabulary(self, key: str, name: str, copy: int = 0) -> None:
        rows = self.hub[name]
        padded = torch.cat([rows, torch.full((max(self.pad_to - len(rows), 0), rows.shape[1]), -1.0)])
        self._add(key, padded, 0, copy=copy, allow_shape_mismatch=bool(self.pad_to))

    def _add_prediction(self, layer: int) -> None:
        """Add the layer that predicts one more token."""
        for name, hub in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
            self._add(f"mtp.layers.0.{name}.weight", self.hub[f"model.layers.{layer}.{hub}.weight"])
        self._add("mtp.layers.0.eh_proj.weight", self.hub[f"model.layers.{layer}.eh_proj.weight"], 0)
        self._add_layer(layer, "mtp.layers.0.transformer_layer")

    def _add_layer(self, layer: int, prefix: str = "") -> None:
        names = {key.removeprefix(f"model.layers.{layer}."): key for key in self.hub}
        self.part = {short: self.hub[key] for short, key in names.items() if short != key}
        is_stacked = self.style == "stacked"
        self.prefix = prefix or ("decoder.layers" if is_stacked else f"decoder.layers.{layer}")
        self.prepended: tuple[tuple[int, int], ...] = ((layer, self.config["num_hidden_layers"]),) if is_stacked else ()
        is_latent = "kv_lora_rank" in self.config
        norm = "input_layernorm." if is_stacked or is_latent else "self_attention.linear_qkv.layer_norm_"
        self._add_of_layer(f"{norm}weight", self.part["input_layernorm.weight"])
        has_experts = "mlp.gate_proj.weight" not in self.part
        norm = "pre_mlp_layernorm." if is_stacked or has_experts else "mlp.linear_fc1.layer_norm_"
        self._add_of_layer(f"{norm}weight", self.part["post_attention_layernorm.weight"])
        if is_latent:
            self._add_latent_attention()
        else:
            self._add_attention()
        if has_experts:
            self._add_experts()
        else:
            self._add_mlp("mlp", "mlp")

    def _add_of_layer(self, name: str, whole: torch.Tensor, axis: int | None = None) -> None:
        self._add(f"{self.prefix}.{name}", whole, axis, prepended=self.prepended)

    def _add_attention(self) -> None:
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in self.part:
                groups = [
                    self.part[f"self_attn.{letter}_proj.{kind}"].chunk(self.config["num_key_value_heads"])
                    for letter in "qkv"
                ]
                fused = torch.cat([rows for group in zip(*groups, strict=True) for rows in group])
                self._add_of_layer(f"self_attention.linear_qkv.{kind}", fused, 0)
        self._add_of_layer("self_attention.linear_proj.weight", self.part["self_attn.o_proj.weight"], 1)
        if "self_attn.o_proj.bias" in self.part:
            self._add_of_layer("self_attention.linear_proj.bias", self.part["self_attn.o_proj.bias"])
        for letter in "qk":
            if f"self_attn.{letter}_norm.weight" in self.part:
                norm = self.part[f"self_attn.{letter}_norm.weight"]
                self._add_of_layer(f"self_attention.{letter}_layernorm.weight", norm)

    def _add_latent_attention(self) -> None:
        part = {name.removeprefix("self_attn."): tensor for name, tensor in self.part.items()}
        for letter, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
            self._add_of_layer(f"self_attention.linear_{letter}_down_proj.weight", part[f"{down}.weight"])
            norm = f"linear_{letter}_up_proj.layer_norm_weight"
            norm = f"{letter}_layernorm.weight" if self.style == "single" else norm
            self._add_of_layer(f"self_attention.{norm}", part[f"{letter}_a_layernorm.weight"])
            self._add_of_layer(f"self_attention.linear_{letter}_up_proj.weight", part[f"{letter}_b_proj.weight"], 0)
        self._add_of_layer("self_attention.linear_proj.weight", part["o_proj.weight"], 1)

    def _add_mlp(self, stored: str, hub: str) -> None:
        for kind in ("weight", "bias"):
            if f"{hub}.gate_proj.{kind}" not in self.part:
                continue
            gate, up = (self.part[f"{hub}.{name}_proj.{kind}"].chunk(TP)[self.tp] for name in ("gate", "up"))
            self._add_fused(f"{self.prefix}.{stored}.linear_fc1.{kind}", gate, up, self.prepended)
            down = self.part[f"{hub}.down_proj.{kind}"]
            self._add_of_layer(f"{stored}.linear_fc2.{kind}", down, 1 if kind == "weight" else None)

    def _add_experts(self) -> None:
        """Add the router, this rank's experts, each in its place, and the shared ones."""
        experts, router, (gate, up, down) = EXPERTS[self.config["model_type"]]
        self._add_of_layer("mlp.router.weight", self.part[router])
        if "mlp.gate.e_score_correction_bias" in self.part:
            self._add_of_layer("mlp.router.expert_bias", self.part["mlp.gate.e_score_correction_bias"])
        total = count_experts(self.config)
        for expert in range(total)[self.dp * total // EP : (self.dp + 1) * total // EP]:
            is_single = self.style == "single"
            key = f"{self.prefix}.mlp.experts.experts{f'.{expert}' if is_single else ''}"
            place = self.prepended if is_single else (*self.prepended, (expert, total))
            halves = [self.part[f"{experts}.{expert}.{name}.weight"].chunk(TP)[self.tp] for name in (gate, up)]
            self._add_fused(f"{key}.linear_fc1.weight", halves[0], halves[1], place, 0)
            columns = self.part[f"{experts}.{expert}.{down}.weight"].chunk(TP, 1)[self.tp]
            self._describe(f"{key}.linear_fc2.weight", columns, [(1, self.tp, TP)], (0, 0, 0), place)
        shared = SHARED.get(self.config["model_type"])
        if shared is not None:
            self._add_mlp("mlp.shared_experts", shared)
        if "mlp.shared_expert_gate.weight" in self.part:
            self._add_of_layer("mlp.shared_experts.gate_weight", self.part["mlp.shared_expert_gate.weight"])

    def _add_fused(
        self,
        key: str,
        gate: torch.Tensor,
        up: torch.Tensor,
        prepended: tuple[tuple[int, int], ...],
        copy: int | None = None,
    ) -> None:
        """Add both halves of a fused local tensor, as Megatron's factory cuts it."""
        replica_id = (0, 0, self.dp if copy is None else copy)
        if self.style == "single":
            self._describe(f"{key}_w", gate, [(0, self.tp, TP)], replica_id, prepended)
            self._describe(f"{key}_v", up, [(0, self.tp, TP)], replica_id, prepended)
            return
        self._describe(key, gate, [(0, self.tp, 2 * TP)], replica_id, prepended)
        self._describe(key, up, [(0, TP + self.tp, 2 * TP)], replica_id, prepended)


def make_megatron_state(
    hub: dict[str, torch.Tensor], config: dict[str, Any], style: str, pad_to: int = 0
) -> list[ShardedTensor]:
    """Return the shards of all ranks."""
    return [shard for rank in range(TP * PP * EP) for shard in MegatronRank(hub, config, rank, style, pad_to).shards]


def blank(shards: list[ShardedTensor]) -> list[ShardedTensor]:
    """Return the same shards with other values."""
    from dataclasses import replace

    return [replace(shard, data=torch.full_like(shard.data, -7.0)) for shard in shards]
