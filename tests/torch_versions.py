"""Run the demo and a selection of the tests under releases of torch and Python: ``python -m tests.torch_versions``.

Each run has a new virtual environment outside of the repository, which is removed afterwards. A release of torch with
its CUDA packages is a download of 3 GB, and takes 6 GB of ``$TMPDIR`` while its run lasts. For a release below the
floor, lower the floor first, in ``pyproject.toml`` and in ``shardckpt/tensors/torch_private.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.junit import read_results
from tests.tree import ROOT

README = ROOT / "tests" / "README.md"
#: What depends most on torch: its private names, DTensor and FSDP, DCP's planners and state dicts, gloo.
SELECTION = (
    "tests/test_dist_checkpointing.py",
    "tests/adapters",
    "tests/distributed",
    "tests/interop/test_stock_dcp.py",
    "tests/ci/optimizer/test_resume.py",
    "tests/planning/test_placements.py",
    "tests/tensors",
    "tests/testing/test_rank_threads.py",
    "tests/torch_dist/dcp",
)
#: Distributions that the selection needs.
TOOLS = ("numpy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "torchao", "xxhash")
COLUMNS = ("torch", "Python", "demo", "passed", "failed", "skipped")
INSTALL_LIMIT, DEMO_LIMIT, TESTS_LIMIT = 1800, 400, 1800  # seconds


class Row(NamedTuple):
    """What one run found, as the table in ``tests/README.md`` has it."""

    torch: str
    python: str
    demo: str
    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        return f"| {' | '.join(map(str, self))} |"


def read_table(text: str) -> list[Row]:
    """Return the rows of the table of versions in a README's text."""
    number = r" (\d+) \|"
    found = re.findall(rf"^\| ([\d.]+) \| ([\d.]+) \| (passed|failed) \|{number}{number}{number}$", text, re.MULTILINE)
    return [Row(*row[:3], *map(int, row[3:])) for row in found]


def write_table(text: str, new: Row) -> str:
    """Return a README's text with a row in its table of versions, in place of one for the same releases."""
    rows = {row[:2]: row for row in (*read_table(text), new)}
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    before, after = text.split(head)
    after = after[len("".join(f"{row}\n" for row in read_table(text))) :]
    return before + head + "".join(f"{rows[key]}\n" for key in sorted(rows, key=_release)) + after


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says; return 0 if everything passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_versions", description=__doc__)
    parser.add_argument("python", help="an interpreter: a path, or a name on PATH, such as python3.11")
    parser.add_argument("torch", nargs="+", help="releases of torch, such as 2.13.0; one environment at a time")
    parser.add_argument("--record", action="store_true", help="write each row into the table in tests/README.md")
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(COLUMNS)} |")
    good = True
    for release in options.torch:
        row = _run(options.python, release)
        print(row, flush=True)
        good &= row.demo == "passed" and not row.failed
        if options.record:
            README.write_text(write_table(README.read_text(), row))
    return 0 if good else 1


def _run(interpreter: str, release: str) -> Row:
    with tempfile.TemporaryDirectory(prefix=f"shardckpt-torch-{release}-") as folder:
        call([interpreter, "-m", "venv", f"{folder}/venv"], INSTALL_LIMIT, check=True)
        programs = Path(folder, "venv", "bin")
        python = str(programs / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        call([*install, f"torch=={release}", "--editable", str(ROOT), *_list_tools()], INSTALL_LIMIT, check=True)
        ask = "import platform, torch; print(torch.__version__.split('+')[0], platform.python_version())"
        versions = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, timeout=300).stdout
        demo = call([str(programs / "shardckpt"), "demo"], DEMO_LIMIT)
        results = Path(folder, "results.xml")
        options = ["-q", "-n0", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", f"--junitxml={results}"]
        # what stock dcp.save of torch 2.10 calls
        options += ["-W", "ignore:TypedStorage is deprecated:UserWarning"]
        call([python, "-m", "pytest", *options, *SELECTION], TESTS_LIMIT)
        passed, failed, skipped = count_tests(results)
        return Row(*versions.split(), "failed" if demo else "passed", passed, failed, skipped)


def _list_tools() -> list[str]:
    """Return the requirements of the selection, as ``pyproject.toml`` has them."""
    project = (ROOT / "pyproject.toml").read_text()
    return [re.findall(rf'"({name}>=[\d.]+)"', project)[0] for name in TOOLS]


def count_tests(results: Path) -> tuple[int, int, int]:
    """Return the numbers of tests that passed, failed and were skipped; the failed ones are named on stderr."""
    if not results.exists():
        raise SystemExit("pytest has written no results: it was ended by force, or broke")
    found = read_results(results)
    for name, result in found.items():
        if result.outcome == "failed":
            print(f"failed: {name}", file=sys.stderr)
    counts = Counter(result.outcome for result in found.values())
    return counts["passed"], counts["failed"], counts["skipped"]


def call(command: list[str], limit: float, *, check: bool = False) -> int:
    """Run a command, its output on stderr; end it and all that it has started at the limit. Return its exit status."""
    executable = shutil.which(command[0])
    if executable is None:
        raise SystemExit(f"there is no program {command[0]!r}")
    process = subprocess.Popen([executable, *command[1:]], cwd=ROOT, stdout=sys.stderr, start_new_session=True)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"ended by force after {limit} s: {' '.join(command)}", file=sys.stderr)
        status = -signal.SIGKILL
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if check and status:
        raise SystemExit(f"failed with status {status}: {' '.join(command)}")
    return status


def _release(releases: tuple[str, str]) -> list[list[int]]:
    return [[int(part) for part in release.split(".")] for release in releases]


__all__ = ["README", "ROOT", "SELECTION", "Row", "call", "count_tests", "main", "read_table", "write_table"]

if __name__ == "__main__":
    sys.exit(main())
