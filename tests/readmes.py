"""The README.md files of the repository, and the blocks of code in them, found by their names.

A comment above a block names it: ``<!-- example: NAME -->``. An example that goes on where another ended, in the same
directory and with the same variables, says so: ``<!-- example: NAME, after OTHER -->``. A command is for a shell, not
for a test: ``<!-- command: NAME -->``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.tree import ROOT

_FOLDERS = ("shardckpt", "strategies", "tests", "benchmarks")
_FENCE = re.compile(r"^(?P<above>[^\n]*)\n```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"<!-- (?P<kind>example|command): (?P<name>[\w-]+)(?:, after (?P<after>[\w-]+))? -->")
#: Languages of blocks that need no name: what is shown is not run.
_SHOWN = {"text"}


class Block(NamedTuple):
    """A block of code in a README.

    Attributes:
        file: The README, relative to the repository.
        kind: ``example`` or ``command``; ``""`` for a block without a name.
        name: Its name.
        after: The name of the example that it continues, or ``""``.
        language: ``python``, ``bash`` or ``toml``.
        code: The lines between the fences.
    """

    file: str
    kind: str
    name: str
    after: str
    language: str
    code: str


def _blocks(file: str, text: str) -> list[Block]:
    blocks = []
    for fence in _FENCE.finditer(f"\n{text}"):
        if fence["language"] not in _SHOWN:
            found = _NAME.fullmatch(fence["above"])
            named = (found["kind"], found["name"], found["after"] or "") if found else ("", "", "")
            blocks.append(Block(file, *named, fence["language"], fence["code"]))
    return blocks


#: The text of every README.md, by its path in the repository.
READMES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([ROOT / "README.md", *(path for name in _FOLDERS for path in (ROOT / name).rglob("README.md"))])
}
BLOCKS = [block for file, text in READMES.items() for block in _blocks(file, text)]
EXAMPLES = {block.name: block for block in BLOCKS if block.kind == "example"}
