"""The README.md files keep their word: what they show runs, and what they name exists."""

from __future__ import annotations

import builtins
import re
import runpy

from shardckpt import __version__, errors, settings
from shardckpt.compat import mindspeed
from tests.readmes import BLOCKS, READMES
from tests.tables import table
from tests.tree import ROOT

PROMISES = READMES["tests/README.md"]


def test_every_block_has_a_name_of_its_own() -> None:
    """No block of code escapes the tests: each is an example or a command, and no two have the same name."""
    assert [f"{block.file}: {block.code[:60]!r}" for block in BLOCKS if not block.kind] == []
    names = [(block.kind, block.name) for block in BLOCKS]
    assert sorted(names) == sorted(set(names))


def test_ci_finds_the_two_commands_by_name() -> None:
    """The demo and the tests are one command each, in the README, and .ci/run reads them from there."""
    commands = {block.name: block for block in BLOCKS if block.kind == "command" and block.file == "README.md"}
    assert set(commands) == {"demo", "test"}
    # run by tests/compat/test_port.py
    assert {block.name for block in BLOCKS if block.kind == "command"} == {*commands, "port-megatron"}
    phases = runpy.run_path(str(ROOT / ".ci" / "phases.py"))
    for name, block in commands.items():
        assert phases["read_command"](ROOT / "README.md", name) + "\n" == block.code
        assert len(block.code.splitlines()) == 1
        assert "pip install" in block.code
        assert " -q" not in block.code  # it takes minutes: whoever waits sees what it does
    assert commands["demo"].code.endswith("shardckpt demo\n")
    assert commands["test"].code.endswith("pytest\n")


def test_every_error_of_the_gate_table_exists() -> None:
    """The table of the version gate has a row for every case of it."""
    named = set(re.findall(r"^\| [^|]+ \| `(\w+Error)` \|", READMES["shardckpt/plugins/README.md"], re.MULTILINE))
    # other tests of the same process define subclasses, too
    cases = [kind for kind in errors.CannotLoadError.__subclasses__() if kind.__module__ == errors.__name__]
    assert named == {kind.__name__ for kind in cases}


def test_every_error_that_is_named_exists() -> None:
    """Errors that a README names are of the one family."""
    named = {name for text in READMES.values() for name in re.findall(r"`(\w+Error)`", text)} - vars(builtins).keys()
    assert "UnsafePickleError" in named
    assert all(issubclass(getattr(errors, name), errors.CheckpointingException) for name in named)


def test_every_name_of_mindspeed_has_its_successor() -> None:
    """The table of MindSpeed's names has all of them."""
    assert [
        name
        for name in mindspeed.__all__
        if f"`{mindspeed.__name__}.{name}`" not in READMES["shardckpt/compat/README.md"]
    ] == []


def test_every_environment_variable_is_explained() -> None:
    """The table of environment variables has all that are read, with the default of each."""
    rows = dict(re.findall(r"^\| `(SHARDCKPT_\w+)` \| ([^|]+) \|", READMES["shardckpt/README.md"], re.MULTILINE))
    known = {value for value in vars(settings).values() if isinstance(value, str) and value.startswith("SHARDCKPT_")}
    assert rows.keys() == known
    for name, default in (("LEFTOVER_HOURS", 24), ("REMOTE_ATTEMPTS", 5), ("REMOTE_THREADS", 16), ("STAGED_SAVES", 2)):
        assert getattr(settings, name.lower())() == default
        assert rows[getattr(settings, name)] == str(default)


@table("file", READMES)
def test_what_a_readme_points_to_is_there(file: str) -> None:
    """Every file, test and link that a README names exists."""
    text = READMES[file]
    paths = re.findall(r"`((?:tests|shardckpt|strategies|benchmarks)/[\w/.]+)(?:::\w+)?`", text)
    generated = {"benchmarks/RESULTS.md"}
    assert [path for path in paths if not (ROOT / path).exists() and path not in generated] == []
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)}
    assert [link for link in sorted(links) if link and not (ROOT / file).parent.joinpath(link).exists()] == []


@table("file", READMES)
def test_sections_that_links_name_are_there(file: str) -> None:
    """A link to a section of a README finds its heading."""
    lost = []
    for path, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", READMES[file]):
        text = (ROOT / file).parent.joinpath(path).read_text() if path else READMES[file]
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        if section not in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]:
            lost.append(f"{path}#{section}")
    assert lost == []


@table("file", READMES)
def test_cells_of_tables_are_short(file: str) -> None:
    """No cell of a table has more than 40 words: what needs more is a list or a section."""
    rows = re.findall(r"^\|(.*)\|$", READMES[file], re.MULTILINE)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > 40] == []


def test_the_changelog_has_this_version() -> None:
    """Who looks at what is new finds a section of the version that is installed, and of what kind each change is."""
    text = (ROOT / "shardckpt" / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(__version__)}\b", text, re.MULTILINE)
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {
        *("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"),
        "For authors of strategies and stores",
    }


def test_every_promise_names_what_shows_it() -> None:
    """Each row of the table of promises, here and in the README, names a test or a benchmark."""
    table = PROMISES.partition("## What is promised\n")[2]
    rows = [row for row in re.findall(r"^\| (.+?) \| (.*) \| (.*) \|$", table, re.MULTILINE) if row[0][:2] != "**"][1:]
    assert len(rows) > 100
    tiers = {"default", "CI", "proof"}
    assert [promise for promise, tests, own in rows if "`tests/" in tests and not set(own.split(", ")) <= tiers] == []
    promises = [(promise, tests) for promise, tests, _ in rows]
    short = READMES["README.md"].partition("## What it promises\n")[2].partition("\n## ")[0]
    few = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", short, re.MULTILINE)[1:]
    assert len(few) == 5
    assert [promise for promise, tests in [*promises, *few] if not re.search(r"`(tests|benchmarks)/", tests)] == []


def test_the_readme_is_short_and_its_figures_are_measured() -> None:
    """An engineer reads it to the end; its table of speed is a part of that beside the results."""
    text = READMES["README.md"]
    assert len(text.splitlines()) <= 120
    rows = re.findall(r"^\|.*\d.*\|$", text.partition("## Speed\n")[2], re.MULTILINE)
    assert len(rows) == 6
    assert [row for row in rows if row not in READMES["benchmarks/README.md"]] == []
