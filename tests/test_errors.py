"""Which name an error about a wrong one asks about."""

from __future__ import annotations

from shardckpt.errors import ask_nearest, join_lines, name_known
from tests.tables import table


@table(
    ("wanted", "known", "nearest"),
    [
        ("weigth", ["bias", "weight"], "weight"),
        ("layers.0.weigth", ["layers.1.bias", "layers.0.weight"], "layers.0.weight"),
        ("step-10", ["step-900", "step-100"], "step-100"),
        ("step-899", ["step-900", "step-89"], "step-900"),
        ("step-10", ["stap-10"], "stap-10"),
        ("step_60", ["step-600", "step-70"], "step-70"),
        ("step60-unsharded", ["step600-unsharded", "step70-unsharded"], "step70-unsharded"),
        ("step-" + "9" * 5000, ["step-1"], ""),
        ("loss", ["accuracy"], ""),
    ],
)
def test_the_nearest_name_is_asked_about(wanted: str, known: list[str], nearest: str) -> None:
    """It is the most alike, of numbered names that of the nearest number; none where none is near."""
    assert ask_nearest(wanted, known) == (f"did you mean {nearest}? " if nearest else "")


def test_names_are_listed_in_natural_order() -> None:
    """Step 9 stands before step 10."""
    assert name_known("x", ["step-10", "step-9"], "steps") == "(steps: step-9, step-10)"


def test_an_error_of_several_lines_is_one_line_of_the_log() -> None:
    """A list that a colon announces follows it, and its items are apart."""
    assert join_lines("2 faults:\n  a\n\n  b: c") == "2 faults: a; b: c"
    assert join_lines("one") == "one"
