"""Objects of values that the common state has."""

from __future__ import annotations

from typing import Any

from shardckpt.engine.common_objects import CommonObjects
from shardckpt.mapping import ShardedObject
from tests.tables import table

COMMON: dict[str, Any] = {
    "sched": {"last_epoch": 3, "milestones": {5: 1, 9: 2}, "lrs": [0.1, 0.2]},
    "optimizer": {"param_groups": [{"lr": 0.1, "params": ["0.weight"]}, {"lr": 0.2, "params": ["0.bias"]}]},
    "flat": {"param_groups.a.b.lr": 0.3, "param_groups.a.b.betas": (0.9, 0.99), "state.a.b.count": 4},
}


@table(
    ("key", "value"),
    [
        ("sched", COMMON["sched"]),
        ("sched.last_epoch", 3),
        ("sched.milestones.9", 2),
        ("sched.lrs.1", None),
        ("sched.milestones.09", None),
        ("optimizer.param_groups.0.weight", {"lr": 0.1}),
        ("optimizer.param_groups.0.bias", {"lr": 0.2}),
        ("optimizer.param_groups.0", None),
        ("optimizer.param_groups", COMMON["optimizer"]["param_groups"]),
        ("flat.param_groups.a.b", {"lr": 0.3, "betas": (0.9, 0.99)}),
        ("flat.state.a.b.count", 4),
        ("flat.state.a", {"b.count": 4}),
        ("sche", None),
        ("optimizer.param_groups.1.weight", None),
    ],
)
def test_what_is_at_a_key(key: str, value: Any) -> None:
    """Nested values, options of a parameter's group by its name, and values under flat names; nothing else."""
    wanted = ShardedObject(key, None, (1,), (0,))
    found = CommonObjects(COMMON).build([wanted])
    assert found == ({} if value is None else {wanted.unique_key: value})


def test_parts_and_copies() -> None:
    """A part of an object is not built, and what is built may be changed without the common state."""
    assert CommonObjects(COMMON).build([ShardedObject("sched", None, (2,), (0,))]) == {}
    (built,) = CommonObjects(COMMON).build([ShardedObject("sched", None, (1,), (0,))]).values()
    built["lrs"].append(0.3)
    assert COMMON["sched"]["lrs"] == [0.1, 0.2]
