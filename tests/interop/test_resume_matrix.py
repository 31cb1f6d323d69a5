"""Everyone who writes whole checkpoints by every way to load them: model, optimizer, schedule and step come back.

The README beside this file shows the table, which is made of ``CELLS``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardckpt_torch_dist import CheckpointStorageReader
from tests.golden_checkpoints import VERSIONS, check_model
from tests.interop import goldens, stock
from tests.torch_checkpointing import golden as torch_checkpointing
from tests.tree import GOLDEN
from tests.zarr import load as zarr

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks import Ranks

    Written = Callable[[str], "Checkpoint"]

MANAGER, ADAPTERS, LOAD, READER = LOADERS = (
    "CheckpointManager",
    "adapters",
    "dist_checkpointing.load",
    "dcp.load with our reader",
)
FORMS = {"plain DCP, nested": "nested", "plain DCP, flattened": "flattened", "torchtitan's layout": "torchtitan"}
TORCH_CHECKPOINTING = {
    "torch_checkpointing 0.1.1, nested": "torch-2",
    "torch_checkpointing 0.1.1, flattened": "safetensors-2",
}
MEGATRON = {f"Megatron-Core {version}": version for version in VERSIONS}
ZARR = {f"Megatron-Core {name.removeprefix('zarr-mcore-')}, zarr": name for name in zarr.WRITERS}
WRITERS = (*FORMS, *TORCH_CHECKPOINTING, *MEGATRON, *ZARR)

ALL = "all"
PROGRESS = (
    "the schedule is a dict in Megatron's common state, loaded as the state of that name; the step is the folder's name"
)
NAMES = (
    "tensors by their names, in a dict of DTensors, and the common state: `to_sharded_state_dict(model, optimizer)` is "
    "refused, since Megatron stores no options by parameters"
)
NO_COMMON = (
    "tensors and objects: `dcp.load` asks for keys, and the common state has none; `load_common_state_dict` reads it"
)
OTHER_FORMAT = "refused: `dcp.load` reads torch_dist only, and the error names `dist_checkpointing.load`"


class Cell(NamedTuple):
    """What one way to load makes of one writer's checkpoint.

    Attributes:
        load: Loads on every rank and compares, or sees the refusal; a manager gets the folder of the checkpoint.
        loads: What comes back.
        note: How, or what does not and why.
    """

    load: Callable[[Path], None]
    loads: str = ALL
    note: str = ""


class Checkpoint(NamedTuple):
    """A checkpoint, and a folder in which it is a step."""

    path: Path
    folder: Path


def see_refusal(checkpoint: Path) -> None:
    """See that ``dcp.load`` with our reader refuses the format, and names the way; torch 2.10 hides its error."""
    is_hidden = torch.__version__ < (2, 11)
    text = "metadata is None" if is_hidden else r"reads that format only: load it with dist_checkpointing\.load"
    with pytest.raises(CheckpointException, match=text):
        dcp.load({"grid": 0}, storage_reader=CheckpointStorageReader(checkpoint))


def check_zarr(checkpoint: Path) -> None:
    """Load everything by descriptions."""
    zarr.load(str(checkpoint), zarr.WRITERS[checkpoint.name])


def check_megatron(checkpoint: Path) -> None:
    """Load everything by descriptions."""
    check_model(str(checkpoint), checkpoint.name.removeprefix("mcore-"))


def _cells() -> dict[tuple[str, str], Cell]:
    cells: dict[tuple[str, str], Cell] = {}
    for writer, form in FORMS.items():
        cells[writer, MANAGER] = Cell(partial(stock.resume_by_manager, written_by=2))
        cells[writer, ADAPTERS] = Cell(stock.resume_by_adapters)
        cells[writer, LOAD] = Cell(partial(stock.resume_by_descriptions, form=form))
        cells[writer, READER] = Cell(partial(stock.resume_by_stock_load, form=form, our_reader=True))
    for writer in TORCH_CHECKPOINTING:
        cells[writer, MANAGER] = Cell(partial(torch_checkpointing.resume_by_manager, written_by=2))
        cells[writer, ADAPTERS] = Cell(torch_checkpointing.resume_by_adapters)
        cells[writer, LOAD] = Cell(torch_checkpointing.resume_by_descriptions)
        cells[writer, READER] = Cell(see_refusal, "nothing", OTHER_FORMAT)
    for writer in (*MEGATRON, *ZARR):
        name = ZARR.get(writer) or f"mcore-{MEGATRON[writer]}"
        cells[writer, MANAGER] = Cell(partial(goldens.load_by_manager, checkpoint=GOLDEN / name), ALL, PROGRESS)
        cells[writer, ADAPTERS] = Cell(goldens.load_by_adapters, ALL, NAMES)
        cells[writer, LOAD] = Cell(check_zarr if writer in ZARR else check_megatron)
        cells[writer, READER] = Cell(goldens.load_by_reader, "model, optimizer", NO_COMMON)
        if writer in ZARR:
            cells[writer, READER] = Cell(see_refusal, "nothing", OTHER_FORMAT)
    return cells


CELLS = _cells()
WORLDS = (1, 2, 4)
#: One cell of each kind of writer, and each way to load, runs by default. Of the others each is slow at one number of
#: ranks, with all of these for each writer and each way to load, and long at the others.
DEFAULT = {
    ("plain DCP, nested", ADAPTERS, 2),
    ("plain DCP, flattened", MANAGER, 1),
    ("torchtitan's layout", MANAGER, 2),
    ("torchtitan's layout", ADAPTERS, 1),
    ("torchtitan's layout", READER, 2),
    ("torch_checkpointing 0.1.1, flattened", LOAD, 2),
    ("torch_checkpointing 0.1.1, nested", READER, 1),
    ("Megatron-Core 0.20.0", MANAGER, 2),
    ("Megatron-Core 0.9.0", ADAPTERS, 2),
    ("Megatron-Core 0.16.1", READER, 2),
    ("Megatron-Core 0.7.0, zarr", MANAGER, 2),
    ("Megatron-Core 0.15.3, zarr", ADAPTERS, 1),
}


@pytest.fixture(scope="module")
def written(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A writer's checkpoint, made or copied once: ``written("plain DCP, nested")``."""
    found: dict[str, Checkpoint] = {}

    def write(writer: str) -> Checkpoint:
        if writer not in found:
            folder = tmp_path_factory.mktemp("written")
            if writer in FORMS:
                ranks.run(2, stock.write_stock, FORMS[writer], folder)
                found[writer] = Checkpoint(folder / f"step-{stock.STEP}", folder)
            elif writer in TORCH_CHECKPOINTING:
                name = TORCH_CHECKPOINTING[writer]
                step = torch_checkpointing.copy_golden(name, folder / f"step-{torch_checkpointing.STEP}")
                found[writer] = Checkpoint(step, folder)
            else:
                path = GOLDEN / (ZARR.get(writer) or f"mcore-{MEGATRON[writer]}")
                goldens.copy_as_step(path, folder)
                found[writer] = Checkpoint(path, folder)
        return found[writer]

    return write


def _parameters() -> list[object]:
    found = []
    for writer, loader in CELLS:
        for world in WORLDS:
            key = (writer, loader, world)
            found.append(pytest.param(*key, marks=() if key in DEFAULT else pytest.mark.proof))
    return found


@pytest.mark.parametrize(("writer", "loader", "world"), _parameters())
def test_what_anyone_wrote_loads_by_every_way(
    ranks: Ranks, written: Written, writer: str, loader: str, world: int
) -> None:
    """Everything that was written comes back with any number of ranks, but for what the table says."""
    checkpoint = written(writer)
    ranks.run(world, CELLS[writer, loader].load, checkpoint.folder if loader == MANAGER else checkpoint.path)


def render() -> str:
    """Return the table."""
    notes: dict[str, int] = {}
    for cell in CELLS.values():
        if cell.note:
            notes.setdefault(cell.note, len(notes) + 1)
    rows = [["written by", *LOADERS], ["---"] * (len(LOADERS) + 1)]
    for writer in WRITERS:
        cells = [CELLS[writer, loader] for loader in LOADERS]
        rows.append([writer, *(f"{cell.loads} ({notes[cell.note]})" if cell.note else cell.loads for cell in cells)])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return table + "\n" + "".join(f"{number}. {note[0].upper()}{note[1:]}.\n" for note, number in notes.items())


def test_the_readme_has_the_table() -> None:
    """The table that readers see is the one whose cells the tests load."""
    assert set(CELLS) == {(writer, loader) for writer in WRITERS for loader in LOADERS}
    assert render() in Path(__file__).with_name("README.md").read_text()
