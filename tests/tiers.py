"""The three tiers of tests: each test is of its folder's, and a row of its parameters may name a slower one.

``pytest`` runs the default tier; ``pytest --tier ci`` the CI tier, with the rows that tests of the default tier have
there. Files and folders that are named run the tests of their own tier: ``pytest tests/ci/commit``. A default file with
rows of the CI tier says "ci" somewhere: ``pytest --tier ci`` imports no other one.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

#: From the fastest to the slowest.
TIERS = ("default", "ci", "proof")


def get_tier(item: pytest.Item) -> str:
    """Return the tier of a test: the slowest that its folder and its row of parameters name."""
    marked = (tier for tier in TIERS[1:] if item.get_closest_marker(tier))
    return max([_get_folder_tier(item.path, item.config), *marked], key=TIERS.index)


def _get_folder_tier(path: Path, config: pytest.Config) -> str:
    parts = path.relative_to(config.rootpath).parts if path.is_relative_to(config.rootpath) else ()
    return next((tier for tier in TIERS[1:] if parts[:2] == ("tests", tier)), "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose tiers."""
    parser.addoption("--tier", metavar="TIERS", help=f"run tests of these tiers: {', '.join(TIERS)}; or all")


def choose_tiers(config: pytest.Config) -> None:
    """Choose the tiers of ``--tier``, else of the files and folders that are named, else the default one."""
    option = config.option
    if option.tier is None:
        named = (Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args)
        option.tier = ",".join(dict.fromkeys(_get_folder_tier(path, config) for path in named))
    chosen = TIERS if option.tier == "all" else option.tier.split(",")
    if unknown := set(chosen).difference(TIERS):
        raise pytest.UsageError(f"--tier: {', '.join(sorted(unknown))}: there are {', '.join(TIERS)}, and all")
    option.tiers = [tier for tier in TIERS if tier in chosen]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of a tier slower than all that run; for the CI tier alone, no default file without rows of it."""
    tier = _get_folder_tier(collection_path, config)
    if TIERS.index(tier) > TIERS.index(config.option.tiers[-1]):
        return True
    is_test = tier == "default" and collection_path.match("test_*.py")
    return True if is_test and config.option.tiers == ["ci"] and not _says_ci(collection_path) else None


@cache
def _says_ci(path: Path) -> bool:
    return re.search(r"\bci\b", path.read_text(), re.IGNORECASE) is not None


def select_tiers(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the tiers that run.

    Raises:
        pytest.UsageError: A run of the CI tier alone would miss rows.
    """
    rows = {item.path for item in items if get_tier(item) == "ci" and _get_folder_tier(item.path, config) == "default"}
    if silent := sorted(str(path) for path in rows if not _says_ci(path)):
        raise pytest.UsageError(f"rows of the CI tier: their files must say so, in a comment: {', '.join(silent)}")
    left = [item for item in items if get_tier(item) not in config.option.tiers]
    items[:] = [item for item in items if get_tier(item) in config.option.tiers]
    config.hook.pytest_deselected(items=left)
