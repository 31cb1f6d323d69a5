"""What the contract catches: strategies that are wrong in one way each fail a test that is named."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.testing import wrong_strategies
from tests.testing.wrong_strategies import WRONG

FILE = Path(wrong_strategies.__file__)
ROOT = FILE.parents[2]


def test_each_wrong_strategy_is_caught(tmp_path: Path) -> None:
    """Every wrong strategy fails the test that the table names, and the right one passes all of these."""
    tests = {f"{FILE}::Test{part.__name__}::{test}" for part, test in WRONG.values()}
    right = {f"{FILE}::TestRight::{test}" for _, test in WRONG.values()}
    report = tmp_path / "report.xml"
    options = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-o",
        "addopts=",
        "--import-mode=importlib",
        "--tier=all",
        "-q",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *sorted(tests | right)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    outcomes = {
        (case.get("classname", "").rpartition(".")[2], case.get("name")): [child.tag for child in case]
        for case in ET.parse(report).iter("testcase")
    }
    assert len(outcomes) == len(tests | right), done.stdout[-3000:]
    wrong = {(f"Test{part.__name__}", test) for part, test in WRONG.values()}
    assert "\n".join(map(str, sorted(key for key in wrong if outcomes[key] != ["failure"]))) == ""
    assert sorted(test for (owner, test), found in outcomes.items() if owner == "TestRight" and found) == []
