"""Keys: exactly a parameter's, or its optimizer state's."""

from __future__ import annotations

from shardckpt_ep.names import ExpertName, ExpertNames, clean
from tests.tables import table

NAMES = ExpertNames(
    ["layers.0.experts.gate_up", "layers.0.experts.gate_up.scale", "model.layers.1._orig_mod.experts.w1"]
)


@table(
    ("key", "fqn", "slot"),
    [
        ("layers.0.experts.gate_up", "layers.0.experts.gate_up", ""),
        ("model.layers.0.experts.gate_up", "layers.0.experts.gate_up", ""),
        ("layers.0._checkpoint_wrapped_module.experts.gate_up", "layers.0.experts.gate_up", ""),
        ("state.layers.0.experts.gate_up.exp_avg", "layers.0.experts.gate_up", "exp_avg"),
        ("optimizer.state.layers.0.experts.gate_up.exp_avg", "layers.0.experts.gate_up", "exp_avg"),
        ("optimizer.state.layers.0.experts.gate_up.scale.step", "layers.0.experts.gate_up.scale", "step"),
        ("optimizer.state.layers.0.experts.gate_up.inner.step", "layers.0.experts.gate_up", "inner.step"),
        ("model.layers.1.experts.w1", "model.layers.1.experts.w1", ""),
        ("model.model.layers.1.experts.w1", "model.layers.1.experts.w1", ""),
    ],
)
def test_a_parameter_and_its_state_are_found_by_the_longest_name(key: str, fqn: str, slot: str) -> None:
    """Sections and wrappers do not count; of two names that fit, the longer one does."""
    assert NAMES.find(key) == ExpertName(fqn, slot)


@table(
    "key",
    [
        "0.experts.gate_up",
        "my.layers.0.experts.gate_up",
        "mylayers.0.experts.gate_up",
        "layers.0.experts.gate_up_bias",
        "state.layers.0.experts.gate_up",
        "ema.state.layers.0.experts.gate_up.exp_avg",
        "layers.1.experts.w1",
        "state",
    ],
)
def test_names_that_only_end_or_begin_alike_are_others(key: str) -> None:
    """Neither a common ending nor a common beginning makes a key an expert's."""
    assert NAMES.find(key) is None


def test_other_layers_experts_resemble_a_known_one() -> None:
    """A key whose name differs in numbers alone is an expert's that was forgotten; others are not."""
    assert NAMES.resembles("model.layers.17.experts.gate_up")
    assert NAMES.resembles("optimizer.state.layers.17.experts.gate_up.exp_avg")
    assert not NAMES.resembles("model.layers.0.experts.router")


def test_a_module_of_ones_own_keeps_its_name() -> None:
    """Only the names of wrappers are taken out."""
    assert clean("module._fsdp_wrapped_module.module.w") == "module.module.w"
