"""Errors that a plugin's code raises name the plugin, the class and the source file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests import programs

if TYPE_CHECKING:
    from pathlib import Path


PLUGIN = """
from shardckpt import LoadStrategy, SaveStrategy, hookimpl

class Save(SaveStrategy):
    backend, version = "bent", 1
    def save(self, shards, common, context):
        context.writer.write("a.bin", b"x")
        context.writer.record_shards(shards)

class Save2(Save):
    version = 2

class Load(LoadStrategy):
    backend, version = "bent", 1
    def load_index(self, context):
        raise KeyError("bent index")
    load = load_common = load_index
    def list_files(self, reader):
        return []
    def check_files(self, reader):
        raise KeyError("bent check")

class Refuses(Load):
    version = 2
    def cannot_load(self, manifest):
        raise KeyError("bent gate")

def run(options):
    raise KeyError("bent verb")

@hookimpl
def shardckpt_register(registry):
    registry.add(Save)
    registry.add(Load)
    registry.add(Refuses)
    registry.add(Save2)

@hookimpl
def shardckpt_commands(subparsers):
    subparsers.add_parser("bend").set_defaults(run=run)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an installed plugin, and a checkpoint that only it reads."""
    path = tmp_path_factory.mktemp("site")
    (path / "bent_plugin.py").write_text(PLUGIN)
    info = path / "shardckpt_bent-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-bent\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[shardckpt]\nbent = bent_plugin\n")
    return path


SESSION = """
import os, sys, torch
from shardckpt import ShardedTensor, dist_checkpointing as dc
from shardckpt.cli import main
def state():
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
def show(error):
    print(type(error).__name__, str(error).splitlines()[0], repr(error.__cause__), sep="#")
for version in (1, 2):
    dc.save(state(), str(version), ("bent", version))
    try:
        dc.load(state(), str(version))
    except Exception as error:
        show(error)
os.remove("1/shardckpt.json")
for arguments in (["inspect", "1"], ["verify", "1"], ["bend"], ["--traceback", "bend"]):
    print("$", *arguments, file=sys.stderr)
    print("=", main(arguments), file=sys.stderr)
"""


def test_api_and_command_name_the_plugin(site: Path, tmp_path: Path) -> None:
    """Errors of an installed plugin name entry point and distribution, in the API and the command line."""
    path = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    done = programs.run(path + SESSION, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    who = rf"of plugin bent \(shardckpt-bent 1\.5\), {re.escape(str(site))}/bent_plugin\.py:\d+"
    load, gate = (line.split("#") for line in done.stdout.splitlines())
    text = rf"in 'reading the index', in bent_plugin\.Load {who}: KeyError: 'bent index'"
    assert load[::2] == ["RankFailedError", "KeyError('bent index')"]
    assert re.fullmatch(text, load[1])
    assert gate[0] == "BrokenPluginError"
    assert re.search(rf"does not work: in bent_plugin\.Refuses {who}: KeyError: 'bent gate'", gate[1])
    assert "bent gate" in gate[2]
    shown = {command: output for part in done.stderr.split("$ ")[1:] for command, _, output in [part.partition("\n")]}
    assert re.fullmatch(rf"shardckpt inspect: {text}\n= 2\n", shown["inspect 1"])
    verify = rf"shardckpt verify: in bent_plugin\.Load {who}: KeyError: 'bent check'\n= 2\n"
    assert re.fullmatch(verify, shown["verify 1"])
    verb = (
        rf"shardckpt bend: KeyError: 'bent verb' \(in bent_plugin\.run {who}\); shardckpt --traceback shows the whole"
    )
    assert re.fullmatch(rf"{verb} traceback\n= 2\n", shown["bend"])
    long = shown["--traceback bend"]
    assert long.startswith("Traceback (most recent call last):")
    assert "bent_plugin.py" in long
    assert re.search(verb, long)
