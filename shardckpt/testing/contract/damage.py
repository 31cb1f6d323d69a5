"""The contract's part about damage and attacks: an error or the right values, never wrong ones; no code runs."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.testing.checks import check
from shardckpt.testing.contract import jobs
from shardckpt.testing.contract.claims import Claims, each
from shardckpt.testing.contract.rewriting import read_record, reseal
from shardckpt.testing.contract.state import Hostile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Bits of each file that are flipped, one at a time.
FLIPS = 12
#: Changes of each file by :meth:`DamageTests.test_random_bytes`.
CHANGES = 60


class DamageTests(Claims):
    """Files that differ from the written ones."""

    @pytest.fixture
    def saved(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A checkpoint of version 1."""
        monkeypatch.setenv("SHARDCKPT_IO_THREADS", "1")  # starting threads takes longer than such small loads
        self.save_version(path, 1)
        return path

    def _load_error_of(self, path: Path, damage: str) -> str:
        """Return the text of a load's error; "" if it gave the right values. Wrong values fail the test."""
        try:
            loaded = self.load_version(path)
        except CheckpointingException as exc:
            return f"{type(exc).__name__}: {exc}"
        except Exception as exc:
            raise AssertionError(f"{damage}, and the load raised {type(exc).__name__}: {exc}") from exc
        try:
            jobs.check_version(loaded, 1)
        except AssertionError as exc:
            raise AssertionError(f"{damage}, and the load returned wrong values: {exc}") from exc
        return ""

    def test_a_file_is_gone(self, saved: Path) -> None:
        """Without any one of its files a checkpoint gives an error that names the file, or the right values."""
        refused = 0
        for file in _files(saved):
            name = file.relative_to(saved).as_posix()
            with _changed(file, None):
                text = self._load_error_of(saved, f"{name} is gone")
                refused += bool(text)
                check(not text or name in text, f"{name} is gone, and the error does not name it: {text}")
                check(_faults(saved) == [name], f"{name} is gone, and verify finds {_faults(saved)}")
        check(refused > 0, "a checkpoint loads without any of its files")

    @each("cut", ["to nothing", "in half", "by a byte", "longer by a byte"])
    def test_a_file_is_cut(self, saved: Path, cut: str) -> None:
        """A file that is cut short or longer gives an error that names it, or the right values."""
        cuts: dict[str, Callable[[bytes], bytes]] = {
            "to nothing": lambda _: b"",
            "in half": lambda content: content[: len(content) // 2],
            "by a byte": lambda content: content[:-1],
            "longer by a byte": lambda content: content + b"\0",
        }
        for file in _files(saved):
            name, content = file.relative_to(saved).as_posix(), file.read_bytes()
            if not content:
                continue
            with _changed(file, cuts[cut](content)):
                text = self._load_error_of(saved, f"{name} is cut ({cut})")
                check(not text or name in text, f"{name} is cut, and the error does not name it: {text}")

    def test_a_flipped_bit(self, saved: Path) -> None:
        """A flipped bit anywhere gives an error that names the file, or, in bytes that are not read, right values."""
        refused, tried = 0, 0
        for file in _files(saved):
            name, content = file.relative_to(saved).as_posix(), file.read_bytes()
            for bit in random.Random(name).sample(range(8 * len(content)), min(FLIPS, 8 * len(content))):
                flipped = bytearray(content)
                flipped[bit // 8] ^= 1 << bit % 8
                with _changed(file, bytes(flipped)):
                    text = self._load_error_of(saved, f"bit {bit} of {name} is flipped")
                tried += 1
                refused += bool(text)
                check(not text or name in text, f"bit {bit} of {name} is flipped: {text}")
        check(refused > tried // 2, f"{tried - refused} of {tried} flipped bits were not noticed: are digests checked?")

    def test_a_file_of_another_save(self, saved: Path) -> None:
        """A file of another save in the place of one gives an error, or the right values."""
        other = saved.with_name("other")
        self.save_version(other, 2)
        refused = 0
        for file in _files(saved):
            same = other / file.relative_to(saved)
            if same.exists():
                with _changed(file, same.read_bytes()):
                    refused += bool(self._load_error_of(saved, f"{file.name} is of another save"))
        check(refused > 0, "files of another save were not noticed")

    @each("kind", ["pickle", "torch.save", "old torch.save", "npy"])
    def test_hostile_files(self, saved: Path, tmp_path: Path, kind: str) -> None:
        """A file that is replaced by a pickle that calls a function, under right digests, runs nothing."""
        self.require("claims_safety")
        sentinel = tmp_path / "sentinel"
        hostile = _hostile(kind, str(sentinel))
        for file in _files(saved):
            with _changed(file, hostile, resealed=True):
                text = self._load_hostile(saved)
            check(
                not sentinel.exists(), f"{file.name} was replaced by a {kind} file, and a load ran the function in it"
            )
            _check_refusal(text, f"{file.name} was replaced by a {kind} file")

    def test_hostile_numbers(self, saved: Path) -> None:
        """Numbers in an index that are made huge or negative are refused, without memory of that size."""
        self.require("claims_safety")
        found = False
        for file in _files(saved):
            content = file.read_bytes()
            places = [*re.finditer(rb"(?<=[\[\s:,])\d+(?=[\],}])", content)] if _is_text(content) else []
            for place in places[:40]:
                found = True
                for number in (b"999999999999999", b"-1", b"0"):
                    changed = content[: place.start()] + number + content[place.end() :]
                    with _changed(file, changed, resealed=True):
                        _check_refusal(self._load_hostile(saved), f"a number of {file.name} is {number.decode()}")
        if not found:
            pytest.skip(
                "no file of the format is text with numbers: test them in your own encoding, with "
                "shardckpt.testing.reseal"
            )

    def test_hostile_names(self, saved: Path) -> None:
        """A file name in an index that leads out of the directory is refused, not opened."""
        self.require("claims_safety")
        found = False
        for file in _files(saved):
            content = file.read_bytes()
            for named in _files(saved):
                outside, copied = "../" + named.name[3:], saved.parent / named.name[3:]
                if named.name.encode() in content and len(named.name) > 3:
                    shutil.copy(named, copied)
                    changed = content.replace(named.name.encode(), outside.encode())
                    with _changed(file, changed, resealed=True), _watched() as opened:
                        text = self._load_hostile(saved)
                    # by its name, or by the path that a strategy has made of it
                    paths = {str(copied), str(copied.resolve())}
                    is_opened = any(".." in name or name in paths for name in opened)
                    check(not is_opened, f"{file.name} names {outside!r}, and it was opened")
                    _check_refusal(text, f"{file.name} names {outside!r}")
                    found |= bool(text)  # a binary index may have the name where no load looks for it
        if not found:
            pytest.skip(
                "no load has noticed a name that was changed in the bytes of a file: test it in your own encoding, "
                "with shardckpt.testing.reseal"
            )

    def test_random_bytes(self, saved: Path) -> None:
        """Files with random bytes changed, under right digests, are an error of the library, or load."""
        self.require("claims_safety")
        chance = random.Random(0)
        for file in _files(saved):
            content = file.read_bytes()
            for _ in range(CHANGES if content else 0):
                changed = bytearray(content)
                for _ in range(chance.choice((1, 1, 4))):
                    changed[chance.randrange(len(changed))] = chance.randrange(256)
                with _changed(file, bytes(changed), resealed=True):
                    _check_refusal(self._load_hostile(saved), f"bytes of {file.name} were changed")

    def _load_hostile(self, path: Path) -> str:
        """Return the error of a load of a checkpoint that someone has changed on purpose; its values may be any."""
        return ": ".join(filter(None, jobs.error_of(self.load_version, path)))


def _files(path: Path) -> list[Path]:
    return [path / file.name for file in read_record(path).files]


def _check_refusal(text: str, what: str) -> None:
    """Check that an error is one of the library, made for the case: not a KeyError of the strategy's own code."""
    check(
        not text.startswith(("RankFailedError", "PluginError")),
        f"{what}, and the strategy's own code failed: {text}; raise CorruptCheckpointError where a file is wrong",
    )


def _hostile(kind: str, sentinel: str) -> bytes:
    """Return a file whose pickle calls a function when it is loaded."""
    file = io.BytesIO()
    if kind == "pickle":
        file.write(pickle.dumps(Hostile(sentinel)))
    elif kind == "npy":
        pickled = pickle.dumps(Hostile(sentinel))
        header = b"{'descr': '|O', 'fortran_order': False, 'shape': (), }"
        header += b" " * (117 - len(header)) + b"\n"
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + pickled)
    else:
        torch.save(Hostile(sentinel), file, _use_new_zipfile_serialization=kind == "torch.save")
    return file.getvalue()


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Collect the names of the files that this process opens while the block runs."""
    if not _watchers:
        _watchers.append([])
        sys.addaudithook(_audit)  # it cannot be removed
    opened: list[str] = []
    _watchers.append(opened)
    try:
        yield opened
    finally:
        _watchers.remove(opened)


#: Where the names of opened files go; the first list stands for the hook.
_watchers: list[list[str]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        for watcher in _watchers[1:]:
            watcher.append(str(args[0]))


@contextlib.contextmanager
def _changed(file: Path, content: bytes | None, *, resealed: bool = False) -> Iterator[None]:
    """Give a file other bytes, or none, while the block runs."""
    checkpoint = next(folder for folder in file.parents if (folder / "shardckpt.json").exists())
    before = {path: path.read_bytes() for path in (file, checkpoint / "shardckpt.json")}
    try:
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        if resealed:
            reseal(checkpoint)
        yield
    finally:
        for path, written in before.items():
            path.write_bytes(written)


def _faults(path: Path) -> list[str]:
    return [result.name for result in verify_checkpoint(path) if result.fault]


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
