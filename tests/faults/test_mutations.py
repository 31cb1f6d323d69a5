"""The source, broken in one way at a time: a test finds each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults.mutations import MUTATIONS, ROOT, mutate

if TYPE_CHECKING:
    from pathlib import Path


def test_each_mutation_changes_what_is_there(tmp_path: Path) -> None:
    """Each mutation's text stands once in its file, the changed file is Python, and the test that it names is there."""
    for each in MUTATIONS:
        text = (ROOT / each.file).read_text()
        assert text.count(each.old) == 1, each
        copy = tmp_path / each.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
        mutate(each, tmp_path)
        changed = copy.read_text()
        assert changed != text
        compile(changed, each.file, "exec")
        file, _, test = each.test.partition("::")
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), each
    assert len({each.what for each in MUTATIONS}) == len(MUTATIONS)
