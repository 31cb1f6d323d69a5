"""The corpus, and two readers that know the page alone."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING

import jsonschema
import pytest

from shardckpt.errors import CheckpointingException
from tests.safetensors.conformance import ours
from tests.safetensors.conformance.corpus import CASES, HERE, HOSTILE, Case, find_fault, folder, hostile
from tests.safetensors.conformance.draft import INDEX, Link
from tests.safetensors.conformance.fuzz import draw_hostile
from tests.safetensors.conformance.independent_reader import read_checkpoint
from tests.safetensors.conformance.make_corpus import describe_entry, list_entries
from tests.safetensors.conformance.make_schemas import FOLDER as SCHEMAS
from tests.safetensors.conformance.make_schemas import make_schemas
from tests.safetensors.conformance.protocol import describe
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder", "hostile"]  # fixtures


def test_the_corpus_is_what_its_maker_makes() -> None:
    """The stored files and verdicts are those of the source, entry by entry."""
    entries = list_entries()
    assert json.loads((HERE / "corpus.json").read_text()) == [describe_entry(entry) for entry in entries]
    with zipfile.ZipFile(HERE / "corpus.zip") as archive:
        stored = {info.filename: archive.read(info) for info in archive.infolist()}
    made = {f"{entry.name}/{name}": data for entry in entries for name, data in entry.files.items()}
    assert stored == {name: data.target.encode() if isinstance(data, Link) else data for name, data in made.items()}


def test_the_corpus_is_small_and_complete() -> None:
    """34 directories are valid, 69 are not, all have a sentence of their own, and it is less than 1 MB."""
    verdicts = [case.verdict for case in CASES]
    assert (verdicts.count("valid"), verdicts.count("invalid")) == (34, 69)
    assert len({case.name for case in CASES}) == len({case.why for case in CASES}) == 103
    assert sum((HERE / name).stat().st_size for name in ("corpus.zip", "corpus.json")) < 1_000_000


def test_the_readers_are_short() -> None:
    """80 lines of Python and 300 of JavaScript, none long, read the format; 65 and 60 more its feature."""
    for name, most in (("independent_reader.py", 80), ("reader.mjs", 300), ("part_reader.py", 65), ("parts.mjs", 60)):
        lines = (HERE / name).read_text().splitlines()
        assert len(lines) <= most
        assert max(map(len, lines)) <= 120


@table("case", CASES, ids=lambda case: case.name)
def test_the_independent_reader_is_right(case: Case, folder: Path) -> None:
    """The reader in Python gives the verdict of each entry, and finds the tensors and objects of the valid ones."""
    assert find_fault(case, describe(read_checkpoint, str(folder / case.name))) == ""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@table("case", CASES, ids=lambda case: case.name)
def test_our_reader_is_right(case: Case, folder: Path) -> None:
    """Our own reader, by verify and open_checkpoint, gives the verdict of each entry, and finds the same tensors."""
    assert find_fault(case, describe(ours.read_checkpoint, str(folder / case.name), CheckpointingException)) == ""


def test_a_wrong_answer_is_found() -> None:
    """The runner's comparison refuses another verdict, another tensor and another object."""
    case = next(case for case in CASES if case.name == "objects")
    right = {"verdict": "valid", "tensors": case.tensors, "objects": case.objects}
    assert find_fault(case, right) == ""
    assert find_fault(case, {"verdict": "valid", "tensors": case.tensors}) == ""
    assert find_fault(case, {"verdict": "invalid", "why": "xxh3_64"}).startswith("says invalid")
    assert find_fault(case, right | {"tensors": {}}).startswith("other tensors")
    assert find_fault(case, right | {"objects": {}}).startswith("other objects")
    assert find_fault(next(case for case in CASES if case.verdict == "invalid"), right).startswith("says valid")


@table("name", HOSTILE)
def test_our_reader_refuses_hostile_headers(name: str, hostile: Path) -> None:
    """Our own reader refuses each hostile header, by one of its own errors."""
    assert describe(ours.read_checkpoint, str(hostile / name), CheckpointingException)["verdict"] == "invalid"


def test_there_are_30_hostile_headers() -> None:
    """The names of hostile headers differ, and some have 100 MB."""
    names = [name for name, _ in draw_hostile(5)]
    assert len(set(names)) == 30
    assert sum("100_mb" in name for name in names) == 5


def test_the_schemas_are_what_the_models_say() -> None:
    """The files beside the page are those that the pydantic models and the page's table give."""
    assert {path.name: json.loads(path.read_text()) for path in SCHEMAS.iterdir()} == make_schemas()


def test_valid_entries_satisfy_the_schemas(folder: Path) -> None:
    """Every valid entry satisfies all schemas; a later major and a record without files do not."""
    checks = {name: jsonschema.Draft202012Validator(schema) for name, schema in make_schemas().items()}
    for validator in checks.values():
        validator.check_schema(validator.schema)
    for case in CASES:
        if case.verdict == "valid":
            place = folder / case.name
            checks["metadata.schema.json"].validate(json.loads((place / "metadata.json").read_text()))
            checks["shardckpt.schema.json"].validate(json.loads((place / "shardckpt.json").read_text()))
            checks["index.schema.json"].validate(_index_json(place))
            for part in place.glob("index_*.safetensors"):
                checks["part.schema.json"].validate(_index_json(place, part.name))
    assert not checks["index.schema.json"].is_valid(_index_json(folder / "later_major"))
    assert not checks["index.schema.json"].is_valid(_index_json(folder / "dtype_unknown"))
    assert not checks["shardckpt.schema.json"].is_valid({"format": 1})
    assert not checks["metadata.schema.json"].is_valid({})


def _index_json(place: Path, name: str = INDEX) -> object:
    data = (place / name).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["shardckpt"])
