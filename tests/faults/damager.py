"""Program: damage a checkpoint of two ranks in many ways, and say what a load and ``verify`` find each time.

``python -m tests.faults.damager FOLDER SET COUNT`` prints a list of findings as JSON. Sets: ``headers`` (a bit
of every byte of the manifests, and every bit of the index and of what comes before the data in data files), ``payload``
(``COUNT`` bits of tensors), ``files`` (what happens to whole files, and edited manifests). The data files of torch_dist
have no one header: an archive for each tensor stands there; of its bits that are not the tensor's some are drawn.
"""

from __future__ import annotations

import datetime as dt
import json
import pickle
import random
import shutil
import struct
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance import verify_checkpoint
from tests import backends
from tests.faults import samples
from tests.faults.forks import fork, wait
from tests.names import MARKER, METADATA, RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RIGHT = ""
WORLD = 2
_TIMEOUT = 60.0
_SECTOR = 4096
#: Bits of a data file that has no one header.
_DRAWN = 1000


@dataclass
class Finding:
    """What was found of one damage.

    Attributes:
        damage: What was done.
        file: To which file.
        key: The tensor whose bytes were hit; ``""`` if it is not known, or none.
        load: ``""`` for right values, ``"WRONG"`` and where for wrong ones, or the error's text.
        is_error_named: Whether an error of the load names the file (after a manifest was damaged, a file that it is
            about), and the key if it is known.
        verify: The files that verify blames, with ``""`` for the checkpoint.
        is_blamed: Whether these are right.
    """

    damage: str
    file: str
    key: str
    load: str
    is_error_named: bool
    verify: dict[str, str]
    is_blamed: bool


class WrongValuesError(Exception):
    """A load has succeeded with other values than were saved."""


def load_fault(directory: Path, version: int = 1) -> str:
    """``RIGHT`` if a load gives the values of a version, or the text of its error.

    Raises:
        WrongValuesError: the values are others.
    """
    try:
        loaded = samples.load(directory)
    except CheckpointingException as exc:
        return str(exc)
    if wrong := samples.differences(loaded, version):
        raise WrongValuesError(f"wrong values in {wrong}")
    return RIGHT


def verify_faults(directory: Path) -> dict[str, str]:
    """What verify reports, by file; the checkpoint as a whole under ``""``."""
    try:
        return {result.name: result.fault for result in verify_checkpoint(directory) if result.fault}
    except CheckpointingException as exc:
        return {"": str(exc)}


def flipped(path: Path, bits: list[int]) -> Iterator[int]:
    """Flip one bit of the file after the other, each alone, and put the file back in the end."""
    whole = path.read_bytes()
    for bit in bits:
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        yield bit
    path.write_bytes(whole)


def save_by_ranks(directory: Path, version: int) -> None:
    """Save by two ranks, which are forks of this process."""
    pids = [fork(partial(_be_rank, directory, version, rank)) for rank in range(WORLD)]
    if set(wait(pids, _TIMEOUT).values()) != {0}:
        raise SystemExit("the ranks have not saved")


def _be_rank(directory: Path, version: int, rank: int) -> None:
    store = dist.FileStore(f"{directory}.store", WORLD)
    timeout = dt.timedelta(seconds=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    dist_checkpointing.save(samples.state_dict(version, rank, WORLD), directory)
    dist.barrier()


class Damager:
    """Damages a checkpoint, again and again.

    Args:
        folder: Takes the checkpoint, and one of another step.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._other = folder / "1", folder / "2"
        folder.mkdir(parents=True, exist_ok=True)
        for path, version in ((self._path, 1), (self._other, 2)):
            save_by_ranks(path, version)
        self._format = backends.current()
        self._files = sorted(path.name for path in self._path.iterdir())
        self._owners = {name: self._find_owners(self._path / name) for name in self._data_files()}
        if load_fault(self._path) or verify_faults(self._path):
            raise SystemExit("what is to be damaged is not whole")

    def headers(self, count: int) -> Iterator[Finding]:
        """Flip a bit of every byte of the manifests, every bit of the index, and heads of data files."""
        for name in (MARKER, RECORD):
            yield from self._flips(name, [8 * n + n % 8 for n in range((self._path / name).stat().st_size)])
        yield from self._flips(self._format.index, list(range(8 * (self._path / self._format.index).stat().st_size)))
        for name, owners in self._owners.items():
            whole = (self._path / name).read_bytes()
            if name.endswith(".safetensors"):
                yield from self._flips(name, list(range(8 * (8 + struct.unpack("<Q", whole[:8])[0]))))
                continue
            payload = {byte for _, begin, end in owners for byte in range(begin, end)}
            others = [byte for byte in range(len(whole)) if byte not in payload]
            drawn = random.Random(name).sample([8 * byte + bit for byte in others for bit in range(8)], _DRAWN)
            yield from self._flips(name, drawn)

    def payload(self, count: int) -> Iterator[Finding]:
        """Flip bits of tensors, as many in small ones as in large ones."""
        for name, owners in self._owners.items():
            generator = random.Random(name)
            for key, begin, end in generator.choices(owners, k=count // len(self._owners)):
                yield from self._flips(name, [generator.randrange(8 * begin, 8 * end)], key)

    def files(self, count: int) -> Iterator[Finding]:
        """Cut, lengthen, lose, swap and replace whole files, and edit the manifests."""
        yield from self._change_files()
        for number, name in enumerate(self._files):
            for other in self._files[number + 1 :]:
                yield self._swapped(name, other)
        for name in (MARKER, RECORD):
            for place, edited in _edits(json.loads((self._path / name).read_bytes())):
                content = json.dumps(edited, indent=1 if name == RECORD else None).encode()
                yield from self._change(f"edited: {place}", name, lambda _, content=content: content)  # type: ignore[misc]

    def _change_files(self) -> Iterator[Finding]:
        for name in self._files:
            content = (self._other / name).read_bytes()
            changes = {**CHANGES, "of another step": lambda _, content=content: content}  # type: ignore[misc]
            for damage, change in changes.items():
                yield from self._change(damage, name, change)

    def _data_files(self) -> list[str]:
        return [name for rank in range(WORLD) if (name := self._format.data_file(rank)) in self._files]

    def _find_owners(self, path: Path) -> list[tuple[str, int, int]]:
        """The tensors of a data file, and their bytes there, by what other libraries read."""
        whole = path.read_bytes()
        if path.suffix == ".safetensors":
            start = 8 + struct.unpack("<Q", whole[:8])[0]
            heads = json.loads(whole[8:start])
            places = [(key.partition("[")[0], *head["data_offsets"]) for key, head in heads.items()]
            tensors = [place for place in places if not place[0].startswith(("__", "object"))]
            return [(key, start + begin, start + end) for key, begin, end in tensors]
        metadata = pickle.loads((path.parent / METADATA).read_bytes())
        found = []
        for index, info in metadata.storage_data.items():
            archive = whole[info.offset : info.offset + info.length]
            if info.relative_path == path.name and (name := archive.find(b"data/0")) >= 0 and index.offset is not None:
                # after the name and the padding that its length announces
                head = archive.rfind(b"PK\3\4", 0, name)
                size, lengths = (
                    struct.unpack_from("<I", archive, head + 22)[0],
                    struct.unpack_from("<HH", archive, head + 26),
                )
                begin = info.offset + head + 30 + sum(lengths)
                found.append((index.fqn, begin, begin + size))
        return found

    def _flips(self, name: str, bits: list[int], key: str = "") -> Iterator[Finding]:
        for bit in flipped(self._path / name, bits):
            yield self._find(f"bit {bit}", [name], key)

    def _change(self, damage: str, name: str, change: Callable[[bytes], bytes | None]) -> Iterator[Finding]:
        path = self._path / name
        whole = path.read_bytes()
        content = change(whole)
        if content == whole:
            return
        path.unlink() if content is None else path.write_bytes(content)
        yield self._find(damage, [name])
        path.write_bytes(whole)

    def _swapped(self, name: str, other: str) -> Finding:
        contents = [(self._path / file).read_bytes() for file in (name, other)]
        for file, content in zip((other, name), contents, strict=True):
            (self._path / file).write_bytes(content)
        found = self._find("swapped", [name, other])
        for file, content in zip((name, other), contents, strict=True):
            (self._path / file).write_bytes(content)
        return found

    def _find(self, damage: str, files: list[str], key: str = "") -> Finding:
        # a manifest is about all files: with a wrong one, any of them may be the one that does not agree
        blamed = self._files if {MARKER, RECORD} & set(files) else files
        try:
            load = load_fault(self._path)
        except WrongValuesError as exc:
            load = f"WRONG: {exc}"
        except Exception as exc:  # noqa: BLE001 - it is reported
            load = f"ALIEN: {type(exc).__name__}: {exc}"
        try:
            verify = verify_faults(self._path)
        except Exception as exc:  # noqa: BLE001 - it is reported
            verify = {"ALIEN": f"{type(exc).__name__}: {exc}"}
        is_error_named = any(name in load for name in blamed) and (not key or load.startswith(f"{key}: "))
        is_blamed = any(name in verify or name in verify.get("", "") for name in blamed)
        return Finding(damage, " ".join(files), key, load[:300], is_error_named, verify, is_blamed)


def _zero_sector(whole: bytes) -> bytes:
    begin = len(whole) // 2 // _SECTOR * _SECTOR
    end = min(len(whole), begin + _SECTOR)
    return whole[:begin] + bytes(end - begin) + whole[end:]


#: What happens to a file; None: it is gone.
CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda _: None,
    "empty": lambda _: b"",
    "one byte left": lambda whole: whole[:1],
    "half": lambda whole: whole[: len(whole) // 2],
    "all but one byte": lambda whole: whole[:-1],
    "a byte more": lambda whole: whole + b"\0",
    "a sector more": lambda whole: whole + bytes(_SECTOR),
    "a byte lost in the midst": lambda whole: whole[: len(whole) // 2] + whole[len(whole) // 2 + 1 :],
    "a byte too many in the midst": lambda whole: whole[: len(whole) // 2] + b"\0" + whole[len(whole) // 2 :],
    "a sector of zeros": _zero_sector,
    "zeros": lambda whole: bytes(len(whole)),
    "twice": lambda whole: whole * 2,
}


def _edits(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a JSON file changed, and every member taken away, each alone."""
    if isinstance(value, dict):
        for name in value:
            yield f"{place}.{name} gone", {key: each for key, each in value.items() if key != name}
            for where, edited in _edits(value[name], f"{place}.{name}"):
                yield where, {**value, name: edited}
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield f"{place}[{number}] gone", value[:number] + value[number + 1 :]
            for where, edited in _edits(each, f"{place}[{number}]"):
                yield where, [*value[:number], edited, *value[number + 1 :]]
    elif isinstance(value, bool) or value is None:
        yield place, not value
    elif isinstance(value, int | float):
        yield place, value + 1
    else:
        yield place, value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x"


def main() -> None:
    """Print the findings."""
    torch.set_num_threads(1)
    folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    damager = Damager(folder)
    findings = {"headers": damager.headers, "payload": damager.payload, "files": damager.files}[name](count)
    json.dump([asdict(finding) for finding in findings], sys.stdout)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
