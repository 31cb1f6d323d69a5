"""Run the proof tier to its end, and write what came of it: ``python -m tests.proof --report FILE``.

Each file runs in a pytest process of its own, without workers: ``loadfile`` would give all its tests to one worker
anyway, tests of memory and time want a quiet machine, and a file that hangs or dies takes no other with it. What came
of a file is kept in a folder of the commit and the changes to it: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.junit import Result, read_results
from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Seconds of a file, however many tests it has; the longest timeout of one test is 3 hours.
LIMIT = 4 * 3600.0
#: Seconds that pytest has after Ctrl-C to remove its folders.
_END_TIMEOUT = 120.0
_PYTEST = (sys.executable, "-m", "pytest", "--tier", "proof", "-n", "0")
_COLUMNS = ("passed", "failed", "skipped", "not run", "seconds")


def main(arguments: list[str] | None = None) -> int:
    """Run what has no result yet, and write the report; return 0 if every proof test has passed or was skipped."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="the file of the report, in Markdown")
    parser.add_argument("--only", default="", metavar="WORD", help="run only files whose names contain it")
    parser.add_argument("--again", action="store_true", help="run files with failed tests again")
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="FOLDER", help="the tree; results go to .proof in it"
    )
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    root = options.root.absolute()
    commit = _name_commit(root, options.report.absolute())
    folder = root / ".proof" / commit
    folder.mkdir(parents=True, exist_ok=True)
    collected: dict[str, list[str]] = {}
    status = 0
    try:
        collected = collect(root)
        for number, (file, tests) in enumerate(collected.items(), 1):
            path = name_result(folder, file, tests)
            counts = _count_outcomes(read_results(path, root))
            if options.only in file and (not counts or (options.again and counts["failed"])):
                run(file, path, root)
                counts = _count_outcomes(read_results(path, root))
                print(
                    f"[{number}/{len(collected)}] {file}: {', '.join(f'{n} {o}' for o, n in counts.items())}",
                    flush=True,
                )
    except KeyboardInterrupt:
        print("stopped; the same command goes on", flush=True)
        status = 128 + signal.SIGINT
        if not collected:
            return status
    results = read_all(collected, folder, root)
    heading = f"{dt.datetime.now(dt.timezone.utc).date()}, commit {commit}, {describe_machine()}"
    options.report.write_text(write_report(heading, results, (root / "tests" / "README.md").read_text()))
    return status or int(any(result.outcome in ("failed", "not run") for result in results.values()))


def collect(root: Path) -> dict[str, list[str]]:
    """Return the names of the proof tests of each file."""
    found = subprocess.run([*_PYTEST, "--collect-only", "-q"], cwd=root, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"pytest could not collect the tests\n{found.stdout}{found.stderr}")
    files = defaultdict(list)
    for test in found.stdout.partition("\n\n")[0].splitlines():
        files[test.partition("::")[0]].append(test)
    return dict(files)


def run(file: str, path: Path, root: Path) -> None:
    """Run a file's proof tests, and keep what came of them as a file in JUnit's form."""
    part, log = path.with_suffix(".part"), path.with_suffix(".log")
    part.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_PYTEST, "-v", f"--junitxml={part}", file],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = f"its process ended with status {process.wait(LIMIT)}"
        except subprocess.TimeoutExpired:
            end = f"it was ended after {LIMIT:g} s"
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the tests have left, too
            process.wait()
    if process.returncode not in (0, 1) or not part.exists():
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        case = ET.Element(
            "testcase",
            classname=file.removesuffix(".py").replace("/", "."),
            name="(the file)",
            time=f"{time.monotonic() - began:.3f}",
        )
        ET.SubElement(case, "failure", message=f"{end}; last line: {last}")
        suite = ET.Element("testsuite")
        suite.append(case)
        ET.ElementTree(suite).write(part)
    part.rename(path)


def name_result(folder: Path, file: str, tests: list[str]) -> Path:
    """Return where the results of a file with these tests are kept."""
    digest = hashlib.sha256("\n".join(tests).encode()).hexdigest()[:8]
    return folder / f"{file.removesuffix('.py').replace('/', '.')}.{digest}.xml"


def read_all(collected: dict[str, list[str]], folder: Path, root: Path) -> dict[str, Result]:
    """Return the results of all tests by their names; those of a file without results are ``not run``."""
    results: dict[str, Result] = {}
    for file, tests in collected.items():
        found = read_results(name_result(folder, file, tests), root)
        results |= found or dict.fromkeys(tests, Result("not run", 0.0))
    return results


def write_report(heading: str, results: dict[str, Result], readme: str) -> str:
    """Write the results in Markdown, by the promises of a README."""
    files: dict[str, list[Result]] = defaultdict(list)
    for name, result in results.items():
        files[name.partition("::")[0]].append(result)
    titles = f"{' | '.join(_COLUMNS)} |\n|---|{'---|' * len(_COLUMNS)}"
    lines = [f"# The proof tier\n\n{heading}, {_count(results.values())[-1]} s of tests.\n\n| promise | {titles}"]
    named: set[str] = set()
    for promise, names in read_promises(readme):
        own = [file for file in files if file.replace("tests/proof/", "tests/").startswith(names)]
        named.update(own)
        cells = _count(result for file in own for result in files[file]) if own else [""] * len(_COLUMNS)
        if names and not own:
            cells[0] = "default or CI"
        lines.append(f"| {promise} | {' | '.join(cells)} |")
    lines.append(f"\n## No row names them\n\n| file | {titles}")
    lines += [f"| `{file}` | {' | '.join(_count(files[file]))} |" for file in files if file not in named]
    failed = [f"- `{name}`: {result.reason}" for name, result in results.items() if result.outcome == "failed"]
    reasons = Counter(result.reason for result in results.values() if result.outcome == "skipped")
    skipped = [f"- {count}: {reason}" for reason, count in reasons.most_common()]
    left = [f"- `{file}`" for file in files if any(result.outcome == "not run" for result in files[file])]
    for title, section in (("Failed", failed), ("Skipped", skipped), ("Not run", left)):
        lines += [f"\n## {title}\n", *(section or ["none"])]
    return "\n".join(lines) + "\n"


def read_promises(readme: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return each promise of a README with the test files and folders that its row names; none for a heading."""
    table = readme.partition("## What is promised\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.*)\|$", table, re.MULTILINE)[1:]
    return [(row, tuple(re.findall(r"`(tests/(?:\S+/)?(?:test_\w+\.py)?)`", shown))) for row, shown in rows]


def describe_machine() -> str:
    """Return what a reader must know of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    user = "root" if os.geteuid() == 0 else "not root"
    return f"{len(os.sched_getaffinity(0))} processors, {memory:.0f} GiB of memory, {versions}, {user}"


def _count_outcomes(results: dict[str, Result]) -> Counter[str]:
    return Counter(result.outcome for result in results.values())


def _count(results: Iterable[Result]) -> list[str]:
    """Count results by outcome, and their seconds, as the cells of a row."""
    found = [*results]
    counts = Counter(result.outcome for result in found)
    return [*(str(counts[column]) for column in _COLUMNS[:-1]), f"{sum(result.seconds for result in found):.0f}"]


def _name_commit(root: Path, report: Path) -> str:
    """Return the commit of a tree, with a digest of what differs from it, but for the report."""
    git = ["git", "-C", str(root)]
    paths = ["--", ".", *([f":(exclude){report.relative_to(root)}"] if report.is_relative_to(root) else [])]
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", *paths], ["diff", "HEAD", *paths])
    head, *changes = (subprocess.run([*git, *c], capture_output=True, text=True, check=False).stdout for c in commands)
    digest = hashlib.sha256("".join(changes).encode()).hexdigest()[:8]
    return (head[:12] or "none") + (f"-changed-{digest}" if any(changes) else "")


if __name__ == "__main__":
    sys.exit(main())
