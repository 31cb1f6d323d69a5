"""Program: record a save by strace, cut the power after each of its calls, and say what a load then finds.

``python -m tests.faults.power_cutter SCENARIO FOLDER CASE COUNT SEEDS`` prints a report as JSON: ``COUNT`` states of
the disk, spread evenly over all calls and over what may be left of what was not fsynced (see ``disk_model``).
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.faults.behind import fork_workers
from tests.faults.disk_model import Directory, Disk, File, Link, policies
from tests.faults.killer import Killer
from tests.faults.scenario import Scenario
from tests.faults.scenarios import make_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.disk_model import Node

_SEED = 22
_CALLS = (
    "mkdir,mkdirat,openat,open,creat,write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,rename,renameat,renameat2,"
    "link,linkat,unlink,unlinkat,rmdir,ftruncate,truncate,fallocate,symlink,symlinkat,copy_file_range,sendfile"
)
_LINE = re.compile(r"^(?P<thread>\d+) +(?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_HEX = re.compile(r"(?:\\x[0-9a-f]{2})+")


class Call(NamedTuple):
    """A traced call that succeeded.

    Attributes:
        name: Of the call.
        arguments: As strace shows them.
        result: What it returned.
    """

    name: str
    arguments: str
    result: int


class PowerCutter(Killer):
    """Records one save of a case, and loads what power cuts leave."""

    def states(self, count: int, seeds: int) -> list[dict[str, str]]:
        """What was found after ``count`` cuts."""
        # a string that is cut would lose data: the largest write of the samples is 3 MiB
        status = self._save(f"trace={_CALLS}", "-s", str(1 << 24), "-xx")
        if status != 0:
            raise SystemExit(f"the undisturbed save ended with {status}")
        calls = list(read_calls(self._trace.read_text()))
        self._trace.unlink()
        disk = Disk()
        disk.read(self._pristine)
        replay = Replay(disk, str(self._run))
        generator = random.Random(_SEED)
        cuts = [-1, *(number for number, call in enumerate(calls) if replay.touches(call))]
        every = len(cuts) * len(policies(seeds, generator))
        chosen = {index * (every - 1) // max(1, count - 1) for index in range(count)} if count < every else None
        found, index = [], 0
        for position, cut in enumerate(cuts):
            if cut >= 0:
                replay.make(calls[cut])
            for name, (names, data) in policies(seeds, generator).items():
                is_last = position == len(cuts) - 1
                if chosen is None or index in chosen or is_last:
                    shutil.rmtree(self._run)
                    disk.materialize(self._run, names, data)
                    shown = "the start" if cut < 0 else replay.show(calls[cut])
                    found.append({"after": shown, "kept": name, "is_last": str(is_last), "state": self._state()})
                index += 1
        if disk_differs := self._final_difference(disk):
            raise SystemExit(f"the replay is not what the save left: {disk_differs}")
        return found

    def _final_difference(self, disk: Disk) -> str:
        """A name that the save and its replay do not have in common."""
        self._save("trace=none")
        real = self._names()
        shutil.rmtree(self._run)
        disk.materialize(self._run, lambda _: True, lambda _: True)
        replayed = self._names()
        return ", ".join(sorted(real ^ replayed))

    def _names(self) -> set[str]:
        """What is there, without the ids of saves, processes and times."""
        return {re.sub(r"[0-9a-f]{16,}(-[0-9a-f]+)?", "*", str(p.relative_to(self._run))) for p in self._run.rglob("*")}

    def _start(self) -> tuple[int, list[int]]:
        """Trace all processes of the job: it forks those of queues."""
        return Scenario.start(self._scenario, self._record)

    def _record(self) -> None:
        fork_workers()
        self._change()


class Replay:
    """Makes a program's calls below one directory on a model of the disk."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._root = root

    def touches(self, call: Call) -> bool:
        """Whether a call may change what is below the directory, or make it sure."""
        if call.name in ("open", "openat") and not re.search(r"O_CREAT|O_TRUNC", call.arguments):
            return False
        shown = call.arguments[:4096]
        if call.name.startswith(("write", "pwrite", "sendfile", "copy_file_range")):
            shown = shown.partition('"')[0]  # what is written may name the directory, too, on its way to a process
        return self._root in _decode(shown)

    def show(self, call: Call) -> str:
        """The call and its paths, shortly."""
        return f"{call.name} {' '.join(self._paths(call))}"

    def make(self, call: Call) -> None:
        """Make the call."""
        disk, paths = self._disk, self._paths(call)
        if call.name in ("mkdir", "mkdirat"):
            disk.create(paths[0], Directory())
        elif call.name in ("open", "openat", "creat"):
            self._open(call, paths[0])
        elif call.name.startswith(("write", "pwrite")):
            self._write(call)
        elif call.name in ("fsync", "fdatasync"):
            disk.sync(self._of_descriptor(call))
        elif call.name.startswith("rename"):
            disk.rename(paths[0], paths[1], exchange="RENAME_EXCHANGE" in call.arguments)
        elif call.name.startswith(("link", "symlink")):
            self._link(call, paths)
        elif call.name in ("unlink", "unlinkat", "rmdir"):
            disk.remove(paths[0])
        elif call.name in ("ftruncate", "fallocate"):
            self._resize(call)
        else:
            raise NotImplementedError(f"the model has no {call.name}")

    def _open(self, call: Call, path: str) -> None:
        node = self._disk.find(path)
        if node is None:
            self._disk.create(path, File())
        elif isinstance(node, File) and "O_TRUNC" in call.arguments:
            node.pending.append(0)

    def _link(self, call: Call, paths: list[str]) -> None:
        node: Node | None = self._disk.find(paths[0])
        if call.name.startswith("symlink"):
            found = _STRING.search(call.arguments)
            node = Link(_decode(found[1])) if found else None
        if node is None:
            raise KeyError(f"{paths[0]!r} is linked, and is not there: the trace is not understood")
        self._disk.create(paths[1], node)

    def _write(self, call: Call) -> None:
        file = self._file(call)
        data = b"".join(bytes.fromhex(found.replace("\\x", "")) for found in _STRING.findall(call.arguments))
        rest = _STRING.sub("", call.arguments)
        if call.name.startswith("pwrite"):
            numbers = re.findall(r", (\d+)", rest)
            offset = int(numbers[-1] if call.name != "pwritev2" else rest.rsplit(", ", 2)[-2])
        else:
            offset = len(file.content(lambda _: True))
        if len(data) < call.result:
            raise ValueError(f"{call.name}: {call.result} bytes were written, and the trace has {len(data)}")
        file.pending.append((offset, data[: call.result]))

    def _resize(self, call: Call) -> None:
        file = self._file(call)
        numbers = [int(number) for number in re.findall(r", (\d+)", call.arguments)]
        size = len(file.content(lambda _: True))
        if call.name == "ftruncate":
            file.pending.append(numbers[0])
        elif "KEEP_SIZE" not in call.arguments:
            file.pending.append(max(size, sum(numbers[-2:])))

    def _file(self, call: Call) -> File:
        path = self._of_descriptor(call)
        node = self._disk.find(path)
        if not isinstance(node, File):
            raise KeyError(f"{call.name} of {path!r}, which is no file: the trace is not understood")
        return node

    def _of_descriptor(self, call: Call) -> str:
        found = re.match(r"\d+<([^>]*)>", call.arguments)
        return self._relative(_decode(found[1])) if found else ""

    def _paths(self, call: Call) -> list[str]:
        """The paths that a call names, relative to the directory: strings, after the directory that they are in."""
        if not _STRING.search(call.arguments) or call.name.startswith(("write", "pwrite")):
            return [self._of_descriptor(call)]
        found = []
        for match in re.finditer(r"(?:(?:AT_FDCWD|\d+)<(?P<at>[^>]*)>, )?" + _STRING.pattern, call.arguments):
            path = Path(_decode(match["at"] or "")) / _decode(match[2])
            found.append(self._relative(str(path)))
        return found

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._root).strip("/")


def read_calls(trace: str) -> Iterator[Call]:
    """The calls that succeeded, in the order in which they ended."""
    unfinished: dict[str, str] = {}
    for line in trace.splitlines():
        thread = line.partition(" ")[0]
        if line.endswith(" <unfinished ...>"):
            unfinished[thread] = line.removesuffix(" <unfinished ...>")
            continue
        resumed = re.match(r"\d+ +<\.\.\. \w+ resumed>", line)
        match = _LINE.match(unfinished.pop(thread) + line[resumed.end() :] if resumed else line)
        if match and not match["result"].startswith("-"):
            yield Call(match["call"], match["arguments"], int(match["result"]))


def _decode(text: str) -> str:
    return _HEX.sub(lambda found: bytes.fromhex(found[0].replace("\\x", "")).decode(errors="replace"), text)


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    name, folder, case, count, seeds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    json.dump(PowerCutter(make_scenario(name, folder), folder, case).states(count, seeds), sys.stdout)


if __name__ == "__main__":
    main()
