from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.testing.contract.rewriting import open_reader
from shardckpt_safetensors import SafetensorsLoadShardedStrategy
from tests.safetensors.checkpoints import change_index, save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint."""
    return save(tmp_path / "c")


def _faults(path: Path) -> dict[str, str]:
    with open_reader(path, with_record=False) as reader:
        found = SafetensorsLoadShardedStrategy().check_files(reader)
    return {name: str(error) for name, error in found.items() if error is not None}


def test_files_without_fault(path: Path) -> None:
    """A checkpoint without digests is checked by its index and headers; each file is listed with its keys."""
    assert _faults(path) == {}
    with open_reader(path, with_record=False) as reader:
        listed = {file.name: file for file in SafetensorsLoadShardedStrategy().list_files(reader)}
    assert set(listed) == {"index.safetensors", "common.safetensors", "rank_0_0.safetensors"}
    assert set(listed["rank_0_0.safetensors"].keys) == {"layers.0.weight", "layers.0.bias", "rng/shard_0_1"}
    assert listed["rank_0_0.safetensors"].nbytes == (path / "rank_0_0.safetensors").stat().st_size


def test_a_data_file_must_open_as_safetensors(path: Path) -> None:
    """A data file whose header is damaged, or that is cut, gone, or longer than its header says, is named."""
    file = path / "rank_0_0.safetensors"
    content = file.read_bytes()
    for changed in (content + b"\0", content[:8] + b"[" + content[9:], content[:-1]):
        file.write_bytes(changed)
        assert set(_faults(path)) == {"rank_0_0.safetensors"}
    file.unlink()
    assert set(_faults(path)) == {"rank_0_0.safetensors"}  # not the index, which is as it was written


def test_a_fault_of_the_index_shows_beside_one_of_a_file(path: Path) -> None:
    """A data file that is cut or gone hides no fault of the index, which restoring the file would not mend."""
    change_index(path, columns=lambda table: table["box_start"].__setitem__(1, table["box_start"][0]))
    file = path / "rank_0_0.safetensors"
    for damage in (lambda: file.write_bytes(file.read_bytes()[:-1]), file.unlink):
        damage()
        faults = _faults(path)
        assert set(faults) == {"index.safetensors", "rank_0_0.safetensors"}
        assert "shares bytes with another" in faults["index.safetensors"]


def test_payloads_lie_behind_the_header(path: Path) -> None:
    """A file with a header that reaches over the payloads of the index is named, though it opens as safetensors."""
    file = path / "rank_0_0.safetensors"
    size = file.stat().st_size
    header = json.dumps({"all": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    header += b" " * (size - 64 - 8 - len(header))
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    assert "behind the header" in _faults(path)["rank_0_0.safetensors"]
    assert dc.load_tensors_metadata(path)  # the index is fine
