"""Hostile checkpoints, and the program that loads them and reports everything that it caught itself doing.

``python -m tests.faults.hostile`` reads directories as JSON from standard input. An audit hook notes whatever a load
has no business to do; address space is limited, so that a memory bomb that goes off ends in an error, not in swap.
"""

from __future__ import annotations

import codecs
import copy
import io
import json
import os
import pickle
import resource
import shutil
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing
from shardckpt.archive import globals as allow_lists
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.stubs import Stub
from tests.faults import samples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: The attribute that hostile pickles try to set, and the file that they try to make.
MARK = "pwned"
DATA_FILE = "__0_0.distcp"
OBJECT_KEY = "object/shard_0_1"
_HEADROOM = 2 << 30

_FORBIDDEN = (
    "builtins.breakpoint",
    "builtins.input",
    "code.",
    "compile",
    "ctypes.call_function",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "exec",
    "ftplib.",
    "function.",
    "import",
    "marshal.",
    "mmap.",
    "os.chmod",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.link",
    "os.mkdir",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.spawn",
    "os.startfile",
    "os.symlink",
    "os.system",
    "pickle.find_class",
    "pty.",
    "shutil.",
    "socket.",
    "subprocess.",
    "urllib.",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


# ---- making them


def call(module: str, name: str, *args: Any) -> bytes:
    """The pickle that calls a global with plain arguments."""
    return b"\x80\x02" + named(module, name) + pickle.dumps(args, 2)[2:-1] + b"R."


def named(module: str, name: str) -> bytes:
    """The opcode that looks up a global."""
    return f"c{module}\n{name}\n".encode()


def build_on(module: str, name: str, *, slots: bool) -> bytes:
    """The pickle that sets an attribute on a global itself."""
    state = (None, {MARK: 1}) if slots else {MARK: 1}
    return b"\x80\x02" + named(module, name) + pickle.dumps(state, 2)[2:-1] + b"b."


def archive(pickled: bytes, records: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A ``torch.save`` archive around any pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as members:
        members.writestr("archive/data.pkl", pickled)
        members.writestr("archive/byteorder", sys.byteorder)
        for name, content in (records or {}).items():
            members.writestr(f"archive/data/{name}", content)
        members.writestr("archive/version", "3\n")
    return file.getvalue()


class Foreign:
    """A checkpoint as Megatron writes it, without digests, to be changed in place."""

    def __init__(self, base: Path, directory: Path) -> None:
        shutil.copytree(base, directory)
        (directory / "shardckpt.json").unlink(missing_ok=True)
        self.directory = directory

    def put(self, name: str, content: bytes) -> None:
        """Replace a file."""
        (self.directory / name).write_bytes(content)

    def put_object(self, content: bytes) -> None:
        """Replace the archive of the stored object."""
        data = (self.directory / DATA_FILE).read_bytes()
        self.put(DATA_FILE, data + content)

        def moved(metadata: Any) -> None:
            for index, info in list(metadata.storage_data.items()):
                if index.fqn == OBJECT_KEY:
                    metadata.storage_data[index] = type(info)(DATA_FILE, len(data), len(content))

        self.edit_metadata(moved)

    def edit_metadata(self, change: Callable[[Any], Any]) -> None:
        """Change ``.metadata`` as DCP's classes show it."""
        metadata = copy.deepcopy(pickle.loads((self.directory / ".metadata").read_bytes()))
        change(metadata)
        self.put(".metadata", pickle.dumps(metadata))


# ---- loading them, in a process of its own


@dataclass
class Report:
    """What the loads of one directory came to.

    Attributes:
        kind: Class of the error; ``""`` if it loaded.
        family: Whether it is a CheckpointingException.
        message: Its text.
        values: Keys whose values are not those of the checkpoint that it was made from, if it loaded.
        events: Audit events that a load has no business to cause.
        polluted: Allowed globals that a pickle has changed.
        alien: Errors of other queries that are not of the family, by name.
        plain: Class and text of what ``load_plain_tensors`` raised, which takes every size from the checkpoint.
    """

    kind: str = ""
    family: bool = True
    message: str = ""
    values: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    polluted: list[str] = field(default_factory=list)
    alien: dict[str, str] = field(default_factory=dict)
    plain: str = ""


class Watch:
    """Notes forbidden audit events while it is on; audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[str] = []
        # zipfile asks for one at its first archive, an error with odd characters for the other: imports, and no events
        for codec in ("cp437", "unicode_escape"):
            codecs.lookup(codec)
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "mmap.__new__" and args[0] == -1:  # anonymous memory: a buffer of a reader
            return
        writes = event == "open" and isinstance(args[2], int) and args[2] & _WRITES
        if writes or event.startswith(_FORBIDDEN):
            self.events.append(f"{event} {args!r:.200}")


#: Everything else that opens a checkpoint.
_QUERIES: dict[str, Callable[[Path], Any]] = {
    "common": dist_checkpointing.load_common_state_dict,
    "index": dist_checkpointing.load_sharded_metadata,
    "plain": dist_checkpointing.load_plain_tensors,
    "is one": dist_checkpointing.check_is_distributed_checkpoint,
    "verify": verify_checkpoint,
}


def _load(directory: Path) -> list[str]:
    return samples.differences(samples.load(directory), 1)


def report_on(
    directory: Path,
    watch: Watch,
    load: Callable[[Path], list[str]] = _load,
    queries: Mapping[str, Callable[[Path], Any]] = _QUERIES,
) -> Report:
    """Load a directory, which returns the keys whose values are others, and ask all else of it."""
    report = Report()
    watch.events = []
    watch.on = True
    try:
        report.values = load(directory)
    except Exception as exc:  # noqa: BLE001 - it is reported
        report.kind, report.message = type(exc).__name__, str(exc)
        report.family = isinstance(exc, CheckpointingException)
    for name, query in queries.items():
        try:
            query(directory)
        except Exception as exc:  # noqa: BLE001, PERF203 - it is reported
            if not isinstance(exc, CheckpointingException):
                report.family = False
                report.alien[name] = f"{type(exc).__name__}: {exc}"
            if name == "plain":
                report.plain = f"{type(exc).__name__}: {exc}"
    watch.on = False
    report.events = watch.events
    report.polluted = find_polluted()
    return report


def find_polluted() -> list[str]:
    """Return the allowed globals that a pickle has changed."""
    tables = (allow_lists.OBJECT_TABLE, allow_lists.METADATA_TABLE)
    reachable = [
        *(v for table in tables for v in table.values()),
        torch.Tensor,
        torch.nn.Parameter,
        Stub,
    ]
    return sorted({repr(value) for value in reachable if hasattr(value, MARK)})


def limit_memory() -> None:
    """Let a memory bomb that goes off end in an error, not in swap."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Print a report for every directory, and how much the peak of memory grew, in MiB."""
    torch.set_num_threads(1)
    directories = json.load(sys.stdin)
    watch = Watch()
    base = Path(directories[0])
    samples.load(base)
    report_on(base, watch)
    limit_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reports = {}
    for directory in directories:
        sys.stderr.write(f"loading {directory}\n")
        reports[directory] = vars(report_on(Path(directory), watch))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    json.dump({"reports": reports, "grown": grown}, sys.stdout)


if __name__ == "__main__":
    main()
