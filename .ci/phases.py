"""The phases of .ci/run after the installation, and its last lines: times, skips, what was flaky and what failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.junit import read_results

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.junit import Result

#: A command's first failure ends it.
BASH = ["bash", "-euo", "pipefail", "-c"]
#: If no more tests than that fail, they run once more, alone.
RETRIED = 5
#: A run ends after so many failures.
MOST_FAILURES = 20


class Check:
    """The phases of a check, and what came of them.

    Args:
        folder: Where the tests' results go.
        began: When the check began, in seconds since the epoch: the first phase is the installation.
    """

    def __init__(self, folder: Path, began: float) -> None:
        self._folder = folder
        self._began = began
        self._seconds: dict[str, float] = {"install": time.time() - began}
        self.results: dict[str, Result] = {}
        self._failed: list[str] = []

    def run(self, phase: str, *commands: str) -> None:
        """Run commands; the first that fails ends the phase."""
        self._begin(phase)
        for command in commands:
            if self._call(command):
                self._failed.append(f"{phase}: {command}")
                break
        self._end(phase)

    @contextmanager
    def run_meanwhile(self, phase: str, command: str) -> Iterator[None]:
        """Run a command that keeps one core busy while the block runs phases that wait; its output comes at the end."""
        began = time.time()
        output = self._folder / f"{phase}.log"
        with output.open("w") as file:
            running = subprocess.Popen([*BASH, command], stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            try:
                yield
            finally:
                status = running.wait()
        print(f"\n== {phase}\n$ {command}\n{output.read_text()}", flush=True)
        if status:
            self._failed.append(f"{phase}: {command}")
        self._seconds[phase] = time.time() - began

    def run_tests(self, phase: str, command: str) -> None:
        """Run a command that ends with ``pytest``; where a few tests fail, these once more, alone."""
        self._begin(phase)
        cache = f"-o cache_dir={self._folder / phase}"
        status = self._call(command, f"--maxfail={MOST_FAILURES} --junitxml={self._folder / phase}.xml {cache}")
        results = read_results(self._folder / f"{phase}.xml")
        failed = [name for name, result in results.items() if result.outcome == "failed"]
        if status == 1 and 1 <= len(failed) <= RETRIED:
            print(f"\nonce more, alone: {', '.join(failed)}", flush=True)
            again = f"{re.sub('.*&& ', '', command, flags=re.DOTALL)} -n 0 --last-failed --last-failed-no-failures none"
            status = self._call(again, f"--junitxml={self._folder / phase}.again.xml {cache}")
            second = read_results(self._folder / f"{phase}.again.xml")
            for name in failed:
                if second.get(name, results[name]).outcome == "passed":
                    results[name] = results[name]._replace(outcome="flaky")
        if status:
            self._failed.append(f"{phase}: {command}")
        self.results |= results
        self._end(phase)

    @property
    def is_red(self) -> bool:
        """Whether a phase has failed."""
        return bool(self._failed)

    def print_summary(self) -> None:
        """Print the last lines."""
        print("\nslowest")
        for name, result in sorted(self.results.items(), key=lambda item: -item[1].seconds)[:20]:
            print(f"{result.seconds:7.1f} s  {name}")
        print("\nskipped")
        skipped = Counter(result.reason for result in self.results.values() if result.outcome == "skipped")
        for reason, count in skipped.most_common():
            print(f"{count:7d}  {reason}")
        print("\nseconds by phase")
        print(*(f"{phase} {seconds:.0f}," for phase, seconds in self._seconds.items()), end=" ")
        print(f"in all {time.time() - self._began:.0f}\n")
        for outcome in ("flaky", "failed"):
            for name, result in self.results.items():
                if result.outcome == outcome:
                    print(f"{outcome.upper()}: {name} - {result.reason[:300]}")
        for phase in self._failed:
            print(f"RED: {phase}")
        counts = Counter(result.outcome for result in self.results.values())
        passed = counts["passed"] + counts["flaky"]
        print(f"{passed} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)

    def _begin(self, phase: str) -> None:
        print(f"\n== {phase}", flush=True)
        self._seconds[phase] = -time.time()

    def _end(self, phase: str) -> None:
        self._seconds[phase] += time.time()

    def _call(self, command: str, pytest_options: str = "") -> int:
        print(f"$ {command}", flush=True)
        environment = {**os.environ, "PYTEST_ADDOPTS": pytest_options}
        return subprocess.run([*BASH, command], env=environment, stdin=subprocess.DEVNULL, check=False).returncode


def read_command(readme: Path, name: str) -> str:
    """Return the command that stands in a README below the comment ``<!-- command: NAME -->``."""
    found = re.search(rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```$", readme.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"{readme} has no command {name!r}")
    return found[1]


def main() -> int:
    """Run all phases, stop before the tests if one is red, and return the exit status."""
    check = Check(Path(os.environ["TMPDIR"]), float(sys.argv[1]))
    readme = Path("README.md")
    with check.run_meanwhile("types", "mypy"):
        check.run("lint", "ruff check .", "ruff format --check .")
        if not check.is_red:
            check.run("demo", read_command(readme, "demo"))
    if not check.is_red:
        check.run_tests("default", read_command(readme, "test"))
        # four at a time on two cores: many of these tests wait, for a timeout, a disk or a store
        check.run_tests("ci", "pytest --tier ci -n 4")
    check.print_summary()
    return int(check.is_red)


if __name__ == "__main__":
    sys.exit(main())
