"""What came of tests, read from the files that ``pytest --junitxml`` writes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple


class Result(NamedTuple):
    """What came of a test: ``passed``, ``skipped``, ``failed``, or ``flaky`` if it has passed the second time."""

    outcome: str
    seconds: float
    reason: str = ""


def read_results(path: Path, root: Path = Path()) -> dict[str, Result]:
    """Read the tests' results by their names from a file that pytest has written in a folder, if it has."""
    results = {}
    for case in ET.parse(path).iter("testcase") if path.exists() else ():
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("error", "failure", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                reason = (child.get("message", "").strip().splitlines() or [""])[0]
        name = "::".join((*_find_file(case.get("classname", ""), root), case.get("name", "")))
        results[name] = Result(outcome, float(case.get("time", 0)), reason)
    return results


def _find_file(module: str, root: Path) -> list[str]:
    """Split what pytest calls the class of a test, with its module, into the file and the class.

    A file that could not be collected has no class: it is named instead of a test.
    """
    parts = module.split(".") if module else []
    for end in range(len(parts), 0, -1):
        file = Path(*parts[:end]).with_suffix(".py")
        if (root / file).exists():
            return [str(file), *parts[end:]]
    return [module] if module else []
