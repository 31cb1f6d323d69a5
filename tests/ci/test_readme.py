"""The README.md files keep their word: what they show runs, and what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.cli import main
from tests import programs
from tests.readmes import EXAMPLES
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path


#: What examples need on the module path: packages that a test machine does not have, and what the reader wrote.
STAND_INS = {
    **dict.fromkeys(("json-contract", "json-contract-2"), ROOT / "tests" / "testing" / "readme_plugin"),
}


def _run(name: str) -> dict[str, Any]:
    """Run an example, after those that it continues, in the current directory; its variables."""
    block = EXAMPLES[name]
    variables = _run(block.after) if block.after else {"__name__": "__main__"}
    if block.language == "python":
        exec(compile(block.code, f"{block.file}: {name}", "exec"), variables)
    else:
        for line in block.code.splitlines():
            command, *arguments = shlex.split(line, comments=True)
            assert command == "shardckpt", line
            assert main(arguments) == 0, line
    return variables


@pytest.mark.parametrize("name", [name for name, block in EXAMPLES.items() if block.language in ("python", "bash")])
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example of every README works as it stands, without a warning."""
    monkeypatch.chdir(tmp_path)
    if name in STAND_INS:
        monkeypatch.syspath_prepend(STAND_INS[name])
    _run(name)


def test_the_quickstart_runs_in_a_new_interpreter(tmp_path: Path) -> None:
    """What a newcomer pastes first needs nothing that other examples have imported."""
    command = [sys.executable, "-c", EXAMPLES["quickstart"].code]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "step-1" / "metadata.json").is_file()


def _plugin_python(folder: Path, modules: dict[str, str], code: str) -> str:
    """Run code where modules are installed as plugins, by the entry point that a README shows; what it prints."""
    assert EXAMPLES["json-pyproject"].code.endswith('[project.entry-points.shardckpt]\njson = "shardckpt_json"\n')
    info = folder / "example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    names = [f"{module.removeprefix('shardckpt_')} = {module}" for module in modules]
    (info / "entry_points.txt").write_text("\n".join(["[shardckpt]", *names, ""]))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    done = programs.run(code, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_plugins_are_plugins(tmp_path: Path) -> None:
    """The example strategy, store and verb, with the entry point that is shown, are found, work, and are listed."""
    modules = {
        "shardckpt_json": EXAMPLES["json-strategy"].code,
        "shardckpt_mine": EXAMPLES["store-plugin"].code,
        "shardckpt_verb": EXAMPLES["verb-plugin"].code,
        "shardckpt_megatrons": EXAMPLES["compat-plugin"].code,
    }
    code = """
import torch
from shardckpt import ShardedTensor, dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.manager import CheckpointConfig, CheckpointManager, KeepLatest
tensor = torch.arange(12.0).reshape(4, 3)
state = {"w": ShardedTensor.from_rank_offsets("w", tensor), "step": 3}
for place in ("c", "mine://c"):
    dc.save(state, place, "json")
    halves = [ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, i, 2)) for i in range(2)]
    loaded = dc.load({"halves": halves}, place)
    assert torch.equal(torch.cat(loaded["halves"]), tensor) and loaded["step"] == 3
    assert halves[0].data is loaded["halves"][0]
config = CheckpointConfig(folder="mine://runs", interval=1, retention=[KeepLatest(2)])
with CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager:
    for step in (1, 2, 3):
        manager.save(step)
    manager.wait()
    assert manager.load() and manager.steps() == [2, 3]
assert main(["count", "mine://c"]) == 0 and main(["count", "nowhere"]) == 2
assert main(["strategies"]) == 0
"""
    printed = _plugin_python(tmp_path, modules, code)
    assert printed.startswith("1\n")
    for backend in ("json", "mine"):
        assert re.search(rf"^{backend} +1 +load .*example 1.0 ", printed, re.MULTILINE)
    assert (tmp_path / "c" / "0.json").read_bytes() == (tmp_path / "bucket" / "c" / "0.json").read_bytes()
    steps = {path.name for path in (tmp_path / "bucket" / "runs").iterdir()}
    assert steps - {".shardckpt-holds"} == {"step-2", "step-3"}


def test_the_example_of_a_second_version_is_one(tmp_path: Path) -> None:
    """It is read beside the first, which names the release to upgrade to where it is alone; so does torch_dist's."""
    both = EXAMPLES["json-strategy"].code + EXAMPLES["json-version-2"].code
    derived = """
from shardckpt import hookimpl
from shardckpt_torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
class Save(TorchDistSaveShardedStrategy):
    version, reader = 2, "mine 2.0"
class Load(TorchDistLoadShardedStrategy):
    version = 2
@hookimpl
def shardckpt_register(registry):
    registry.add(Save)
    registry.add(Load)
"""
    code = """
import torch, torch.distributed.checkpoint as dcp
from shardckpt import ShardedTensor, dist_checkpointing as dc
def state(tensor):
    return {"w": ShardedTensor.from_rank_offsets("w", tensor)}
for path, strategy in {"a": ("json", 1), "b": "json", "c": None, "d": ("torch_dist", 2)}.items():
    dc.save(state(torch.ones(4)), path, strategy)
dcp.save({"w": torch.ones(4)}, checkpoint_id="e", no_dist=True)
for path in "abcde":
    assert dc.load(state(torch.zeros(4)), path)["w"].sum() == 4
    with dc.open_checkpoint(path) as checkpoint:
        print(checkpoint.backend, checkpoint.version)
"""
    new, old = tmp_path / "new", tmp_path / "old"
    new.mkdir()
    printed = _plugin_python(new, {"shardckpt_json": both, "shardckpt_derived": derived}, code).splitlines()
    assert printed == ["json 1", "json 2", "torch_dist 1", "torch_dist 2", "torch_dist 1"]
    code = """
from shardckpt import dist_checkpointing as dc, errors
for path in "abcde":
    try:
        dc.load({}, f"../new/{path}")
    except errors.VersionTooNewError as error:
        print(path, str(error).split("Upgrade: ")[1].splitlines()[0])
"""
    old.mkdir()
    printed = _plugin_python(old, {"shardckpt_json": EXAMPLES["json-strategy"].code}, code).splitlines()
    assert printed == ["b shardckpt-json 2.0 or newer reads it", "d mine 2.0 or newer reads it"]
