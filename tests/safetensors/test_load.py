from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CorruptCheckpointError
from shardckpt.mapping import ShardedTensor
from shardckpt.storage import reader as reader_module
from shardckpt.testing.contract.rewriting import reseal
from tests.safetensors.checkpoints import BIAS, ROWS, save, wanted_state

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "strategies" / "shardckpt_safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint."""
    return save(tmp_path / "c")


def test_everything_comes_back(path: Path) -> None:
    """Tensors in pieces and entire, an object with a tensor, and common state are what was saved."""
    loaded = dc.load(wanted_state(), path)
    assert torch.equal(loaded["weight"], ROWS)
    assert torch.equal(loaded["bias"], BIAS)
    assert loaded["rng"]["seed"] == 3
    assert loaded["rng"]["state"].tolist() == [1.0, 1.0]
    assert loaded["step"] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_neighbours_are_one_read(path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Pieces that follow each other in a file are read by one call, with a cast, too."""
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", "0")
    names: list[str] = []
    original = reader_module.read_into

    def counting(fd: int, path: Any, buffer: memoryview, offset: int) -> None:
        names.append(path.name)
        original(fd, path, buffer, offset)

    monkeypatch.setattr(reader_module, "read_into", counting)
    wanted = ShardedTensor("layers.0.weight", None, dtype, (10, 2), (12, 4), (1, 1), None)
    loaded = dc.load({"w": wanted}, path, validate_access_integrity=False)["w"]
    assert torch.equal(loaded, ROWS[1:11, 1:3].to(dtype))
    assert names.count("rank_0_0.safetensors") == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04.", b"\xff" * 8 + b"{}", (100 << 20).to_bytes(8, "little")])
@pytest.mark.parametrize("name", ["index.safetensors", "common.safetensors"])
def test_a_file_that_is_no_safetensors_is_refused(path: Path, name: str, content: bytes) -> None:
    """Other bytes in the place of a file, under right digests, are an error that names it."""
    (path / name).write_bytes(content)
    reseal(path)
    with pytest.raises(CorruptCheckpointError, match=name):
        dc.load(wanted_state(), path)


def test_no_pickle_can_be_reached() -> None:
    """No module that the package needs to load, but the core's doors, imports pickle, torch.load or the archives.

    What the doors of the core bring along is not followed: the test of the architecture keeps pickle out of all but
    one guarded place there.
    """
    for file in PACKAGE.rglob("*.py"):
        for name in _imports(file):
            top = name.split(".")[0]
            assert top not in ("pickle", "marshal", "shelve", "dill", "cloudpickle", "shardckpt_torch_dist"), (
                f"{file}: {name}"
            )
            assert not name.startswith("shardckpt.archive"), f"{file}: {name}"
            assert name not in ("shardckpt.decode_object", "shardckpt.encode_object"), f"{file}: {name}"
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)}
        assert not calls & {"torch.load", "torch.save", "eval", "exec", "__import__"}, file


def test_the_rooms_that_it_needs_read_no_pickle() -> None:
    """Followed through planning and storage, the imports reach no archive, and nothing that reads a pickle.

    Two modules there import pickle for other things: the names of opcodes, and an error for what cannot be pickled.
    """
    rooms = ("chunks", "planning", "storage", "tensors")
    allowed = ("shardckpt_safetensors", *(f"shardckpt.{room}" for room in rooms))
    seen: set[str] = set()
    waiting = [name for file in PACKAGE.rglob("*.py") for name in _imports(file)]
    while waiting:
        name = waiting.pop()
        if name in seen or not name.startswith(allowed):
            continue
        seen.add(name)
        file = _find(name)
        if file is None:
            continue
        found = list(_imports(file))
        assert not [each for each in found if each.startswith("shardckpt.archive")], name
        assert "pickle" not in found or name in ("shardckpt.storage.opcodes", "shardckpt.storage.remote"), name
        used = {ast.unparse(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert not used & {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"}, name
        waiting += found
    assert "shardckpt.chunks.requested" in seen


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _find(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
