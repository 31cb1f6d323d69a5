"""Program: change files of a checkpoint at random, and say what everything that opens one makes of it.

``python -m tests.faults.fuzzer FOLDER COUNT`` prints a list of verdicts as JSON, ``COUNT`` for each file. Parsers see
what was changed: every other time the digests are taken away, else they are made right. Each hundred is a fork with
little memory; what a load has no business to do is noted as ``hostile`` does it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing
from shardckpt.manifest import Record
from shardckpt.storage.digest import Segments, digest_function
from tests.faults import samples
from tests.faults.forks import fork, wait
from tests.faults.hostile import Watch, limit_memory, report_on
from tests.names import MARKER, RECORD
from tests.safetensors.parts import InParts

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.strategy import SaveStrategy
    from tests.faults.hostile import Report

#: A mutant that takes more memory, in a load, four queries and a verify of 100 KB, is a finding.
MEMORY = 200 << 20
_BATCH = 100
#: Seconds of CPU, and by the clock, that end a batch: one of its mutants takes much longer than the others together.
_CPU, _DEADLINE = 60, 220.0
_NUMBERS = (
    b"\xff" * 8,
    b"\0" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\0\0\0\x80",
    b"\xff\xff\xff\x7f",
    b"99999999999999999999",
    b"-1",
)
_TEXTS = (b"null", b"[" * 3000, b"{", b'"', b"1e999", b"NaN", b"../../x", b"\0", b"\xed\xa0\x80", b"true")


def mutate(whole: bytes, other: bytes, chance: random.Random) -> bytes:
    """Change some of the bytes in some ways; ``other`` is a file to take bytes from."""
    content = bytearray(whole)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not content:
            break
        at = chance.randrange(len(content)) if chance.random() < 0.5 else chance.randrange(min(len(content), 2048))
        content = _MUTATIONS[chance.randrange(len(_MUTATIONS))](content, at, other, chance)
    return bytes(content)


def _flip(content: bytearray, at: int, _: bytes, chance: random.Random) -> bytearray:
    content[at] ^= 1 << chance.randrange(8)
    return content


def _overwrite(content: bytearray, at: int, _: bytes, chance: random.Random) -> bytearray:
    put = chance.choice((*_NUMBERS, *_TEXTS))
    return content[:at] + put + content[at + len(put) :]


def _insert(content: bytearray, at: int, _: bytes, chance: random.Random) -> bytearray:
    return content[:at] + chance.choice((*_NUMBERS, *_TEXTS)) + content[at:]


def _cut(content: bytearray, at: int, _: bytes, chance: random.Random) -> bytearray:
    return content[:at] if chance.random() < 0.3 else content[:at] + content[at + chance.randrange(1, 64) :]


def _repeat(content: bytearray, at: int, _: bytes, chance: random.Random) -> bytearray:
    piece = content[at : at + chance.randrange(1, 64)]
    return content[:at] + piece * chance.choice((2, 3, 200)) + content[at:]


def _splice(content: bytearray, at: int, other: bytes, chance: random.Random) -> bytearray:
    begin = chance.randrange(len(other))
    piece = other[begin : begin + chance.randrange(1, 256)]
    return content[:at] + piece + content[at + len(piece) :]


_MUTATIONS: tuple[Callable[[bytearray, int, bytes, random.Random], bytearray], ...] = (
    _flip,
    _overwrite,
    _insert,
    _cut,
    _repeat,
    _splice,
)


def sign(checkpoint: Path, name: str, content: bytes) -> None:
    """Let a file say something else, and shardckpt.json that this was written."""
    record = Record.parse((checkpoint / RECORD).read_bytes())
    digest = digest_function(record.digest_algorithm)(content)
    table = Segments([len(content)], [digest], record.digest_algorithm)
    named = {"size": len(content), "digest": table.root(), "segments": table.pack()}
    files = tuple(file.model_copy(update=named) if file.name == name else file for file in record.files)
    (checkpoint / name).write_bytes(content)
    (checkpoint / RECORD).write_bytes(record.model_copy(update={"files": files}).dump())


class Fuzzer:
    """Changes the files of a checkpoint, again and again; ``strategy`` saves it, by default that of the environment."""

    def __init__(self, folder: Path, strategy: SaveStrategy | None = None) -> None:
        self._folder = folder
        self._strategy = strategy
        self._base = folder / "base"
        self._path = folder / "fuzzed"
        self._make()

    def verdicts(self, count: int) -> list[str]:
        """What came of the mutants of every file."""
        found = []
        for name in self._list_names():
            for begin in range(0, count, _BATCH):
                found += self._fork(name, range(begin, min(count, begin + _BATCH)))
        return found

    def _make(self) -> None:
        """Write the checkpoint, and import what reading it takes."""
        dist_checkpointing.save(samples.state_dict(1), self._base, self._strategy)
        samples.load(self._base)

    def _put(self, name: str, content: bytes, number: int) -> None:
        """Put a mutant in the place of a file, with the right digests or without any."""
        shutil.copyfile(self._base / RECORD, self._path / RECORD)
        if number % 2 and content and name not in (MARKER, RECORD):  # the record has no empty files
            sign(self._path, name, content)
        else:
            (self._path / RECORD).unlink()
            (self._path / name).write_bytes(content)

    def _report(self, watch: Watch) -> Report:
        """Open the mutant in every way."""
        return report_on(self._path, watch)

    def _list_names(self) -> list[str]:
        return sorted(str(path.relative_to(self._base)) for path in self._base.rglob("*") if path.is_file())

    def _fork(self, name: str, numbers: range) -> list[str]:
        """The verdicts of a batch; one whose process dies or does not end has that instead of its last one."""
        told = self._folder / "told"
        told.unlink(missing_ok=True)
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(self._base, self._path)
        pid = fork(partial(self._be, name, numbers, told))
        status = wait([pid], _DEADLINE)[pid]
        found = told.read_text().splitlines()
        if status == 0:
            return found
        is_slow = status is None or os.WTERMSIG(status) == signal.SIGXCPU
        return [*found, f"{'slow' if is_slow else 'crash'}: {name}, number {numbers[len(found)]}, {status}"]

    def _be(self, name: str, numbers: range, told: Path) -> None:
        others = [content for each in self._list_names() if (content := (self._base / each).read_bytes())]
        whole = (self._base / name).read_bytes()
        watch = Watch()
        limit_memory()
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU, _CPU + 1))  # SIGXCPU, which ends the process
        with told.open("w", buffering=1) as lines:
            for number in numbers:
                chance = random.Random(f"{name} {number}")
                content = mutate(whole, chance.choice(others), chance)
                self._put(name, content, number)
                lines.write(self._judge(watch, f"{name}, number {number}") + "\n")

    def _judge(self, watch: Watch, what: str) -> str:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = self._report(watch)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if grown > MEMORY:
            return f"memory: {what}: {grown >> 20} MiB"
        if not report.family or report.events or report.polluted:
            alien = f"{report.kind}: {report.message:.200} {report.alien} {report.events[:2]} {report.polluted}"
            return f"other: {what}: {alien}".replace("\n", " ")
        return "refused" if report.kind else "loaded"


def main() -> None:
    """Print the verdicts; with a third argument, of (safetensors, 1) with an index in parts."""
    torch.set_num_threads(1)
    strategy = InParts() if sys.argv[3:] else None
    json.dump(Fuzzer(Path(sys.argv[1]), strategy).verdicts(int(sys.argv[2])), sys.stdout)


if __name__ == "__main__":
    main()
