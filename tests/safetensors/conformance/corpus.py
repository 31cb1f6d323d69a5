"""The corpus: directories that readers of (safetensors, 1) must accept or refuse, and what they find in them."""

from __future__ import annotations

import json
import shutil
import stat
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.safetensors.conformance.fuzz import draw_hostile, write_hostile

HERE = Path(__file__).parent


class Case(NamedTuple):
    """An entry of the corpus.

    Attributes:
        name: Of its folder.
        verdict: ``valid`` or ``invalid``.
        why: One sentence: what is to be seen in it.
        tensors: Of a valid one: [dtype, shape, SHA-256 of the bytes] by name, aliases too.
        objects: Of a valid one: [codec, SHA-256 of the payload] by name.
        needs: A digest algorithm that a reader may lack, or ``""``.
    """

    name: str
    verdict: str
    why: str
    tensors: dict[str, list[Any]] | None = None
    objects: dict[str, list[str]] | None = None
    needs: str = ""


def read_cases() -> list[Case]:
    """Return the entries in the order of ``corpus.json``."""
    return [Case(**entry) for entry in json.loads((HERE / "corpus.json").read_text())]


def unpack_corpus(folder: Path, only: str | None = None) -> None:
    """Write each entry of ``corpus.zip``, or only one, as a directory below a folder, links as links."""
    with zipfile.ZipFile(HERE / "corpus.zip") as archive:
        for info in archive.infolist():
            path = folder / info.filename
            if only not in (None, info.filename.split("/")[0]):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISLNK(info.external_attr >> 16):
                path.symlink_to(archive.read(info).decode())
            else:
                path.write_bytes(archive.read(info))


def find_fault(case: Case, line: dict[str, Any]) -> str:
    """Return what is wrong with the line that a reader printed for an entry, or ``""``."""
    if line.get("verdict") == "invalid" and case.needs and case.needs in line.get("why", ""):
        return ""  # as the page says: a reader that cannot compute the digests fails, and names them
    if line.get("verdict") != case.verdict:
        return f"says {line.get('verdict')}: {line.get('why', '')}"
    for kind, expected in (("tensors", case.tensors), ("objects", case.objects)):
        found = line.get(kind)
        if expected is not None and found != expected and (kind == "tensors" or found is not None):
            names = sorted(set(expected) ^ set(found or {})) or [n for n in expected if expected[n] != found[n]]
            return f"other {kind}: {names}"
    return ""


CASES = read_cases()
NODE = shutil.which("node")


#: Without threads beside the reader's, whose CPU time would count as its own.
NODE_READER = [NODE or "node", "--single-threaded", str(HERE / "reader.mjs")]
needs_node = pytest.mark.skipif(NODE is None, reason="the reader in JavaScript needs node, which is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as directories."""
    path = tmp_path_factory.mktemp("corpus")
    unpack_corpus(path)
    return path


#: Hostile headers, but for the largest, which a test of CI has.
HOSTILE = [name for name, _ in draw_hostile(5) if "100_mb" not in name]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories with hostile headers."""
    path = tmp_path_factory.mktemp("hostile")
    write_hostile(path, 5, {*HOSTILE})
    return path
