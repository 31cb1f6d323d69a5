"""Names of stored state, read as what they mean."""

from __future__ import annotations

from shardckpt.optimizer.names import StateName, parse_name
from tests.tables import table

PARAMS = {"0.weight", "layers.1.w", "layers.1.w.a", "layers.10.w", "3"}


@table(
    ("name", "place"),
    [
        ("state.0.weight.exp_avg", StateName("state", "0.weight", ("exp_avg",))),
        ("state.layers.1.w.step", StateName("state", "layers.1.w", ("step",))),
        ("state.layers.1.w.a.step", StateName("state", "layers.1.w.a", ("step",))),
        ("state.layers.10.w.blocks.0.left", StateName("state", "layers.10.w", ("blocks", "0", "left"))),
        ("state.layers.1.wide.step", None),
        ("state.layers.2.w.step", None),
        ("state.0.weight", None),
        ("param_groups.0.weight.lr", StateName("param_groups", "0.weight", ("lr",))),
        ("param_groups.0.weight", StateName("param_groups", "0.weight", ())),
        ("param_groups.7.lr", None),
        ("scale.growth", StateName("", None, ("scale", "growth"))),
    ],
)
def test_the_longest_name_of_a_parameter_counts(name: str, place: StateName | None) -> None:
    """What follows a parameter's name is the state's; a name that only begins alike is another parameter's."""
    assert parse_name(name, PARAMS, None) == place


def test_groups_stored_by_number_are_no_parameters() -> None:
    """Where groups are a list, a number is a group's, even if a parameter has that name."""
    assert parse_name("param_groups.3.lr", PARAMS, 4) == StateName("param_groups", 3, ("lr",))
    assert parse_name("param_groups.3.lr", PARAMS, None) == StateName("param_groups", "3", ("lr",))
    assert parse_name("param_groups.4.lr", PARAMS, 4) is None
    assert parse_name("param_groups.0.weight.lr", PARAMS, 1) == StateName("param_groups", 0, ("weight.lr",))
