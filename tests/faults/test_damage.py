"""Damaged checkpoints: a load gives the right values or names the file, and verify reports what is wrong."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.errors import CorruptCheckpointError
from shardckpt.maintenance.verify import verify_checkpoint
from tests import backends
from tests.faults import samples
from tests.faults.damager import RIGHT, flipped, load_fault, verify_faults
from tests.names import MARKER, METADATA, RECORD
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends import Backend
    from tests.ranks import Ranks

#: What a load reads, beside the JSON files.
DATA = ("data of rank 0", "data of rank 1", "index", "common state")
JSON = (MARKER, RECORD)
FLIPS = 50  # a file


def save_version(directory: str, version: int, turned: bool) -> None:
    """A checkpoint of this group; ``turned`` has the tensors in another order."""
    state = samples.state_dict(version, dist.get_rank(), dist.get_world_size())
    dist_checkpointing.save(dict(reversed(state.items())) if turned else state, directory)


def name_of(file: str) -> str:
    """The name of a file in the format of the test, of which the parameters say what it is."""
    chosen = backends.current()
    names = {DATA[0]: chosen.data_file(0), DATA[1]: chosen.data_file(1), DATA[2]: chosen.index, DATA[3]: chosen.common}
    return names.get(file, file)


def read_names() -> set[str]:
    """The names of all files that a load reads."""
    return {name_of(file) for file in (*DATA, *JSON)}


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Path:
    """Checkpoints 1 and 2 of two ranks: two data files each; and the first again, with all in other places."""
    root = tmp_path_factory.mktemp("saved")
    for name, version in (("1", 1), ("2", 2), ("turned", 1)):
        ranks.run(2, save_version, str(root / name), version, name == "turned")
    return root


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of checkpoint 1, to damage; without file threads, which cost more than such small loads."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "1")
    return Path(shutil.copytree(saved / "1", tmp_path / "ckpt"))


def some_bits(path: Path, count: int) -> list[int]:
    """Bits of the file, drawn by its name."""
    return random.Random(path.name).sample(range(8 * path.stat().st_size), count)


@pytest.mark.parametrize(
    ("step", "backend"),
    [
        (8, "torch_dist"),
        pytest.param(8, "safetensors", marks=pytest.mark.ci),
        *in_proof((1, "torch_dist"), (1, "safetensors")),
    ],
    indirect=["backend"],
    scope="module",
)
@pytest.mark.parametrize("name", JSON)
def test_bit_flip_in_bytes_of_json(checkpoint: Path, name: str, step: int) -> None:
    """Whatever byte of the JSON files is hit, values are right or the load names a file, and verify finds it."""
    path = checkpoint / name
    files = read_names()
    refused = 0
    for bit in flipped(path, [8 * n + n // step % 8 for n in range(0, path.stat().st_size, step)]):
        fault = load_fault(checkpoint)
        refused += fault != RIGHT
        assert fault == RIGHT or any(str(checkpoint / file) in fault or file in fault for file in files), fault
        assert any(file in " ".join(verify_faults(checkpoint).values()) for file in files), bit
    assert refused > path.stat().st_size // step // 4
    assert load_fault(checkpoint) == RIGHT


@pytest.mark.parametrize(
    ("flips", "backend"),
    [
        (FLIPS, "torch_dist"),
        *in_proof((4 * FLIPS, "torch_dist"), (4 * FLIPS, "safetensors"), (20 * FLIPS, "torch_dist")),
        pytest.param(FLIPS, "safetensors", marks=pytest.mark.ci),
    ],
    indirect=["backend"],
    scope="module",
)
@pytest.mark.parametrize("file", DATA)
def test_random_bit_flips(checkpoint: Path, file: str, flips: int) -> None:
    """A flipped bit in a data file never gives wrong values; the error and verify name the file."""
    name = name_of(file)
    path = checkpoint / name
    refused = 0
    for bit in flipped(path, some_bits(path, flips)):
        fault = load_fault(checkpoint)
        refused += fault != RIGHT
        assert fault == RIGHT or str(path) in fault
        assert str(path) in verify_faults(checkpoint)[name], bit
    assert refused > flips * 0.9  # the rest hit bytes that nobody reads
    assert load_fault(checkpoint) == RIGHT
    assert verify_faults(checkpoint) == {}


#: Damages of a file's length, by name.
LENGTHS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "one byte": lambda whole: whole[:1],
    "half": lambda whole: whole[: len(whole) // 2],
    "all but one byte": lambda whole: whole[:-1],
    "a byte more": lambda whole: whole + b"\0",
}


@backends.both
@pytest.mark.parametrize("file", [*DATA, *JSON])
@pytest.mark.parametrize("keep", LENGTHS)
def test_a_file_of_another_length(checkpoint: Path, file: str, keep: str) -> None:
    """A file that is cut short, or has a byte too many, is refused by name, by load and by verify."""
    name = name_of(file)
    path = checkpoint / name
    path.write_bytes(LENGTHS[keep](path.read_bytes()))
    assert str(path) in load_fault(checkpoint)
    faults = verify_faults(checkpoint)
    assert list(faults) == ([""] if name in JSON else [name])
    assert str(path) in next(iter(faults.values()))


@backends.both
@pytest.mark.parametrize("file", [*DATA, *JSON])
def test_missing_file(checkpoint: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is gone is named by load and verify.

    Values still load unchecked without shardckpt.json, and checked without the index where DCP's .metadata is left.
    """
    name = name_of(file)
    (checkpoint / name).unlink()
    fault = load_fault(checkpoint)
    if name == RECORD or (file == "index" and (checkpoint / METADATA).exists()):
        assert fault == RIGHT
        assert name in caplog.text
    else:
        assert name in fault
    assert name in " ".join(verify_faults(checkpoint).values())


@backends.both
@pytest.mark.parametrize(("first", "second"), [DATA[:2], DATA[2:], (DATA[0], DATA[3]), JSON])
def test_swapped_files(checkpoint: Path, first: str, second: str) -> None:
    """Two files in each other's place are refused by name."""
    one, other = checkpoint / name_of(first), checkpoint / name_of(second)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    fault = load_fault(checkpoint)
    assert str(one) in fault or str(other) in fault
    assert verify_faults(checkpoint) != {}


def test_swapped_metadata_for_other_libraries(checkpoint: Path) -> None:
    """DCP's .metadata and the index in each other's place are refused by name."""
    index, metadata = checkpoint / name_of("index"), checkpoint / METADATA
    index.rename(checkpoint / "other")
    metadata.rename(index)
    (checkpoint / "other").rename(metadata)
    assert str(index) in load_fault(checkpoint)
    assert verify_faults(checkpoint).keys() == {index.name, METADATA}


@backends.both
@pytest.mark.parametrize("file", DATA)
def test_file_of_another_step(saved: Path, checkpoint: Path, file: str) -> None:
    """A file of another save, of the same name, is refused by name."""
    name = name_of(file)
    shutil.copyfile(saved / ("turned" if file == "index" else "2") / name, checkpoint / name)
    assert str(checkpoint / name) in load_fault(checkpoint)
    assert list(verify_faults(checkpoint)) == [name]


def test_metadata_for_other_libraries(saved: Path, checkpoint: Path) -> None:
    """DCP's .metadata, which is there for others, does no harm to a load when it is damaged; verify finds it."""
    path = checkpoint / METADATA
    whole = path.read_bytes()
    for damaged in (LENGTHS["half"](whole), LENGTHS["a byte more"](whole), (saved / "2" / METADATA).read_bytes(), None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert load_fault(checkpoint) == RIGHT
        faults = verify_faults(checkpoint)
        assert list(faults) == [METADATA]
        assert str(path) in faults[METADATA]


def test_bit_flips_in_metadata_for_other_libraries(checkpoint: Path) -> None:
    """Whatever bit of .metadata is hit, a load gives the right values, and verify names the file."""
    path = checkpoint / METADATA
    for bit in flipped(path, some_bits(path, FLIPS)):
        assert load_fault(checkpoint) == RIGHT
        assert list(verify_faults(checkpoint)) == [METADATA], bit


@backends.both
def test_markers_of_another_step(saved: Path, checkpoint: Path) -> None:
    """With the shardckpt.json of another save no file is what it says, and the load is refused."""
    shutil.copyfile(saved / "2" / RECORD, checkpoint / RECORD)
    assert str(checkpoint) in load_fault(checkpoint)
    assert verify_faults(checkpoint).keys() >= {name_of(file) for file in DATA if file != "index"}


@backends.both
@pytest.mark.parametrize("field", ["sharded_backend_version", "common_backend", "common_backend_version"])
@pytest.mark.parametrize("edit", ["gone", "another value"])
def test_marker_fields_that_no_load_needs(checkpoint: Path, field: str, edit: str) -> None:
    """A field of metadata.json that is lost or changed is found by verify, also where a load does without it."""
    path = checkpoint / MARKER
    fields = json.loads(path.read_bytes())
    if edit == "gone":
        del fields[field]
    elif field == "common_backend":
        fields[field] = "torci"
    else:
        fields[field] += 1
    path.write_text(json.dumps(fields))
    faults = " ".join(verify_faults(checkpoint).values())
    assert MARKER in faults
    assert field in faults or "another save wrote into it" in faults


@backends.both
def test_extra_files(checkpoint: Path) -> None:
    """Files and directories that are not the checkpoint's change nothing, and verify lists them."""
    (checkpoint / "__2_0.distcp").write_bytes(b"stale")
    (checkpoint / "logs").mkdir()
    assert load_fault(checkpoint) == RIGHT
    assert verify_faults(checkpoint) == {}
    assert {result.name for result in verify_checkpoint(checkpoint) if result.foreign} == {"__2_0.distcp", "logs"}


@backends.both
def test_damage_elsewhere(checkpoint: Path) -> None:
    """What is not damaged loads; what is names its key, the bytes and the file."""
    path = checkpoint / name_of(DATA[0])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    wanted = samples.template()
    big = {"big": wanted.pop("big")}
    loaded = dist_checkpointing.load(wanted, checkpoint)
    assert samples.differences(loaded, 1) == ["big"]
    with pytest.raises(CorruptCheckpointError, match=rf"big: bytes \d+ to \d+ of {path} are not those .* written"):
        dist_checkpointing.load(big, checkpoint)


def test_overlap_that_hides_a_hole(checkpoint: Path) -> None:
    """Chunks that overlap are refused, even where their sizes add up to the tensor's: something is missing."""
    (checkpoint / RECORD).unlink()
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    low = torch.Size((samples.ROWS // 4, 0))
    second = metadata.state_dict_metadata["split"].chunks[1]
    (index,) = [found for found in metadata.storage_data if found.fqn == "split" and found.offset == second.offsets]
    metadata.storage_data[type(index)("split", low)] = metadata.storage_data.pop(index)
    second.offsets = low
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    wanted = samples.template()
    with pytest.raises(CorruptCheckpointError, match=r"'split': .* overlap"):
        dist_checkpointing.load({"split": wanted["split"]}, checkpoint)
    assert wanted["split"].data.eq(-7).all()
