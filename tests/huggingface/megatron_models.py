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
}
#: What the names of experts begin with in a folder, and those of gate, up and down.
_QWEN = ("mlp.experts", "mlp.gate.weight", ("gate_proj", "up_proj", "down_proj"))
EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", "block_sparse_moe.gate.weight", ("w1", "w3", "w2")),
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
}
#: Likewise of shared experts.
SHARED = {"qwen2_moe": "mlp.shared_expert"}


def count_experts(config: dict[str, Any]) -> int:
    """Return the number of experts of a model."""
    return next((config[name] for name in ("num_experts", "num_local_experts") if name in config), 0)


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
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        size = config.get("head_dim", hidden // config["num_attention_heads"])
        heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        for letter, rows in (("q", heads), ("k", groups), ("v", groups)):
            yield f"{prefix}.self_attn.{letter}_proj.weight", (rows, hidden)
            if kind.startswith("qwen2") or config.get("attention_bias"):
                yield f"{prefix}.self_attn.{letter}_proj.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads)
        if config.get("attention_bias"):
            yield f"{prefix}.self_attn.o_proj.bias", (hidden,)
        if kind.startswith("qwen3"):
            yield f"{prefix}.self_attn.q_norm.weight", (size,)
            yield f"{prefix}.self_attn.k_norm.weight", (size,)
        if kind in EXPERTS:
            yield from _list_experts(prefix, config)
        else:
            yield from _list_mlp(f"{prefix}.mlp", config, config["intermediate_size"])


def _list_experts(prefix: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts, router, names = EXPERTS[config["model_type"]]
    hidden, width = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    yield f"{prefix}.{router}", (count_experts(config), hidden)
    for expert in range(count_experts(config)):
        for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            yield f"{prefix}.{experts}.{expert}.{name}.weight", shape
    if config["model_type"] in SHARED:
        yield from _list_mlp(
            f"{prefix}.{SHARED[config['model_type']]}", config, config["shared_expert_intermediate_size"]
        )
        yield f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)


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

    def _add_layer(self, layer: int) -> None:
        names = {key.removeprefix(f"model.layers.{layer}."): key for key in self.hub}
        self.part = {short: self.hub[key] for short, key in names.items() if short != key}
        is_stacked = self.style == "stacked"
        self.prefix = "decoder.layers" if is_stacked else f"decoder.layers.{layer}"
        self.prepended: tuple[tuple[int, int], ...] = ((layer, self.config["num_hidden_layers"]),) if is_stacked else ()
        norm = "input_layernorm" if is_stacked else "self_attention.linear_qkv.layer_norm"
        joint = "." if is_stacked else "_"
        self._add_of_layer(f"{norm}{joint}weight", self.part["input_layernorm.weight"])
        has_experts = "mlp.gate_proj.weight" not in self.part
        norm = "pre_mlp_layernorm." if is_stacked or has_experts else "mlp.linear_fc1.layer_norm_"
        self._add_of_layer(f"{norm}weight", self.part["post_attention_layernorm.weight"])
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
        total = count_experts(self.config)
        for expert in range(total)[self.dp * total // EP : (self.dp + 1) * total // EP]:
            is_single = self.style == "single"
            key = f"{self.prefix}.mlp.experts{f'.{expert}' if is_single else ''}"
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
