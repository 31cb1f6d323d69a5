"""The corpus, and two readers that know the page alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from shardckpt.errors import CheckpointingException
from tests.safetensors.conformance import ours
from tests.safetensors.conformance.corpus import HERE, Case, find_fault, read_cases, unpack_corpus
from tests.safetensors.conformance.draft import INDEX, Link
from tests.safetensors.conformance.fuzz import draw_hostile, write_hostile
from tests.safetensors.conformance.independent_reader import read_checkpoint
from tests.safetensors.conformance.make_corpus import describe_entry, list_entries
from tests.safetensors.conformance.make_schemas import FOLDER as SCHEMAS
from tests.safetensors.conformance.make_schemas import make_schemas
from tests.safetensors.conformance.protocol import describe
from tests.safetensors.conformance.runner import CPU_LIMIT, MEMORY_LIMIT
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

CASES = read_cases()
NODE = shutil.which("node")
PYTHON_READER = [sys.executable, "-m", "tests.safetensors.conformance.independent_reader"]
#: Without threads beside the reader's, whose CPU time would count as its own.
NODE_READER = [NODE or "node", "--single-threaded", str(HERE / "reader.mjs")]
OUR_READER = [sys.executable, "-W", "ignore", "-m", "tests.safetensors.conformance.ours"]
needs_node = pytest.mark.skipif(NODE is None, reason="the reader in JavaScript needs node, which is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as directories."""
    path = tmp_path_factory.mktemp("corpus")
    unpack_corpus(path)
    return path


#: Hostile headers, but for the largest, which a test of CI has.
_HOSTILE = [name for name, _ in draw_hostile(5) if "100_mb" not in name]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories with hostile headers."""
    path = tmp_path_factory.mktemp("hostile")
    write_hostile(path, 5, {*_HOSTILE})
    return path


def _ask_node(directories: list[Path], **environment: str) -> list[dict[str, object]]:
    ended = subprocess.run(
        [*NODE_READER, *map(str, directories)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert not ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_the_corpus_is_what_its_maker_makes() -> None:
    """The stored files and verdicts are those of the source, entry by entry."""
    entries = list_entries()
    assert json.loads((HERE / "corpus.json").read_text()) == [describe_entry(entry) for entry in entries]
    with zipfile.ZipFile(HERE / "corpus.zip") as archive:
        stored = {info.filename: archive.read(info) for info in archive.infolist()}
    made = {f"{entry.name}/{name}": data for entry in entries for name, data in entry.files.items()}
    assert stored == {name: data.target.encode() if isinstance(data, Link) else data for name, data in made.items()}


def test_the_corpus_is_small_and_complete() -> None:
    """33 directories are valid, 69 are not, all have a sentence of their own, and it is less than 1 MB."""
    verdicts = [case.verdict for case in CASES]
    assert (verdicts.count("valid"), verdicts.count("invalid")) == (33, 69)
    assert len({case.name for case in CASES}) == len({case.why for case in CASES}) == 102
    assert sum((HERE / name).stat().st_size for name in ("corpus.zip", "corpus.json")) < 1_000_000


def test_the_readers_are_short() -> None:
    """80 lines of Python and 300 of JavaScript, none long, read the format; 65 and 60 more its feature."""
    for name, most in (("independent_reader.py", 80), ("reader.mjs", 300), ("part_reader.py", 65), ("parts.mjs", 60)):
        lines = (HERE / name).read_text().splitlines()
        assert len(lines) <= most
        assert max(map(len, lines)) <= 120


@pytest.mark.ci
def test_the_independent_reader_needs_numpy_and_json_alone() -> None:
    """Neither it nor what it imports uses shardckpt, torch or safetensors."""
    code = "import sys, tests.safetensors.conformance.independent_reader; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.parents[2], capture_output=True, text=True, check=True
    )
    packages = {name.split(".")[0] for name in printed.stdout.split()}
    assert "numpy" in packages
    assert not packages & {"shardckpt", "torch", "safetensors", "pydantic", "shardckpt_safetensors"}


@table("case", CASES, ids=lambda case: case.name)
def test_the_independent_reader_is_right(case: Case, folder: Path) -> None:
    """The reader in Python gives the verdict of each entry, and finds the tensors and objects of the valid ones."""
    assert find_fault(case, describe(read_checkpoint, str(folder / case.name))) == ""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@table("case", CASES, ids=lambda case: case.name)
def test_our_reader_is_right(case: Case, folder: Path) -> None:
    """Our own reader, by verify and open_checkpoint, gives the verdict of each entry, and finds the same tensors."""
    assert find_fault(case, describe(ours.read_checkpoint, str(folder / case.name), CheckpointingException)) == ""


@needs_node
@pytest.mark.parametrize(
    "environment",
    [pytest.param({}, id="zlib"), pytest.param({"SLOW_CRC32": "1"}, id="table", marks=pytest.mark.proof)],
)
@pytest.mark.ci
def test_the_node_reader_is_right(environment: dict[str, str], folder: Path) -> None:
    """The reader in JavaScript gives all verdicts, with the crc32 of node's zlib and with its own."""
    lines = _ask_node([folder / case.name for case in CASES], **environment)
    faults = {case.name: find_fault(case, line) for case, line in zip(CASES, lines, strict=True)}
    assert {name: fault for name, fault in faults.items() if fault} == {}


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


@pytest.mark.ci
def test_the_readers_refuse_hostile_headers(hostile: Path) -> None:
    """Headers of less than 1 MB are refused by both readers; a test of CI has the others."""
    directories = [path for path in sorted(hostile.iterdir()) if (path / INDEX).stat().st_size < 1_000_000]
    lines = [describe(read_checkpoint, str(path)) for path in directories]
    lines += _ask_node(directories) if NODE else []
    assert len(directories) >= 15
    assert {line["verdict"] for line in lines} == {"invalid"}


@table("name", _HOSTILE)
def test_our_reader_refuses_hostile_headers(name: str, hostile: Path) -> None:
    """Our own reader refuses each hostile header, by one of its own errors."""
    assert describe(ours.read_checkpoint, str(hostile / name), CheckpointingException)["verdict"] == "invalid"


def test_there_are_30_hostile_headers() -> None:
    """The names of hostile headers differ, and some have 100 MB."""
    names = [name for name, _ in draw_hostile(5)]
    assert len(set(names)) == 30
    assert sum("100_mb" in name for name in names) == 5


def _run_conformance(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "tests.safetensors.conformance", *arguments]
    ended = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=280, check=False)
    rows = ended.stdout.splitlines()
    assert ended.returncode == 0, "\n".join(row for row in rows if " | right | " not in row) + ended.stderr
    return rows


def _measure_ours(directories: list[Path]) -> list[dict[str, Any]]:
    command = [*OUR_READER, "--measure", *map(str, directories)]
    ended = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=280, check=True)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.proof
def test_our_reader_answers_in_time_and_memory(folder: Path, tmp_path: Path) -> None:
    """Each entry, and headers of 100 MB, cost us less than 1 s of CPU and 200 MB; every verdict is right."""
    write_hostile(tmp_path, 5, {name for name, _ in draw_hostile(5)})
    hostile = [Case(path.name, "invalid", "") for path in tmp_path.iterdir()]
    cases = [*CASES, *hostile]
    directories = [*(folder / case.name for case in CASES), *(tmp_path / case.name for case in hostile)]
    lines = _measure_ours(directories)
    faults = {case.name: find_fault(case, line) for case, line in zip(cases, lines, strict=True)}
    assert {name: fault for name, fault in faults.items() if fault} == {}
    # once more, what took too long: on a busy machine the same work takes more CPU time
    slow = [place for place, line in zip(directories, lines, strict=True) if line["cpu"] > CPU_LIMIT]
    assert not slow or [line for line in _measure_ours(slow) if line["cpu"] > CPU_LIMIT] == []
    assert [line for line in lines if line["peak"] > MEMORY_LIMIT] == []


@pytest.mark.proof
@pytest.mark.parametrize("reader", [PYTHON_READER, pytest.param(NODE_READER, marks=needs_node)], ids=["python", "node"])
@pytest.mark.parametrize(
    "kind",
    [  # one process for each of 102 small directories, whose verdicts the default run asks of one process: long
        pytest.param([], marks=pytest.mark.proof, id="corpus"),
        pytest.param(["--hostile"], id="hostile"),
    ],
)
def test_readers_answer_in_time_and_memory(kind: list[str], reader: list[str]) -> None:
    """Each entry, and headers of 100 MB, cost less than 1 s of CPU and 200 MB above the start."""
    rows = _run_conformance(*kind, *reader)
    count = len([*draw_hostile(5)]) if kind else len(CASES)
    assert re.fullmatch(rf"{count} of {count} right; .*", rows[-1])


@pytest.mark.ci
def test_the_runner_says_which_verdicts_are_wrong(tmp_path: Path) -> None:
    """A command that calls everything valid is right of no invalid entry, and ends with status 1."""
    script = tmp_path / "reader.py"
    script.write_text("""print('{"verdict": "valid", "tensors": {}, "objects": {}}')\n""")
    for name, expected in (("no_tensors", 0), ("hole", 1)):
        command = [sys.executable, "-m", "tests.safetensors.conformance", "--entry", name, sys.executable, str(script)]
        ended = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == expected, ended.stderr
        assert f"{1 - expected} of 1 right" in ended.stdout


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
