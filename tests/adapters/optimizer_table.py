"""What each way to save makes of each optimizer: ``python -m tests.adapters.optimizer_table`` prints the table.

A job trains, saves and goes on; another loads what it has saved, and takes the same steps. Its state, its options and
its next steps have the bits of a job that was never interrupted, or the verdict names the first thing that differs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import os
import sys
import tempfile
import types
import warnings
from collections import Counter, deque
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.testing import RankError, RankThreads
from tests.adapters.optimizers import SITE, Entry, Model, find_optimizers, seed
from tests.sites import find as find_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXACT, REFUSED, OTHER, ERROR = OUTCOMES = ("exact", "refused", "other", "error")
#: In a file of rows, in the place of a way: the optimizer itself cannot.
CANNOT = "cannot"


class Case(NamedTuple):
    """When a job is saved.

    Attributes:
        steps: How many steps it has made.
        groups: The number of its groups.
        frozen: Whether a layer was frozen before the last of them, until the job was resumed.
        into: How many other steps the job has made that loads.
    """

    steps: int
    groups: int
    frozen: bool = False
    into: int = 0

    def __str__(self) -> str:
        """Return its name in tables."""
        when = "frozen" if self.frozen else "stepped" if self.steps else "fresh"
        return f"{when}, {self.groups} group{'s' if self.groups > 1 else ''}{', into stepped' if self.into else ''}"


CASES = [Case(steps, groups, frozen) for steps, frozen in ((0, False), (3, False), (3, True)) for groups in (1, 3)]
CASES.append(Case(3, 1, into=2))


class Layout(NamedTuple):
    """Where a job runs.

    Attributes:
        saved_at: The number of ranks when it is saved.
        loaded_at: The number of ranks when it goes on.
        sharded: Whether FSDP2 shards the model; else each rank has all of it.
    """

    saved_at: int
    loaded_at: int
    sharded: bool = False


#: The layouts, and the cases that are judged in each.
LAYOUTS = {
    "1 rank": Layout(1, 1),
    "1 to 2 ranks": Layout(1, 2),
    "2 to 1 ranks": Layout(2, 1),
    "FSDP2": Layout(2, 2, sharded=True),
}
FEW = (Case(3, 3), Case(3, 1, frozen=True))
#: Steps after the resume.
AFTER = 3


class Verdict(NamedTuple):
    """What came of a resume.

    Attributes:
        outcome: One of ``OUTCOMES``.
        reason: Why it is not exact.
    """

    outcome: str
    reason: str = ""


class CannotRun(Exception):
    """The optimizer itself does not train, or not the same way each time."""


class Setup(NamedTuple):
    """What a job is made of: its optimizer, the dtype of the weights, when it is saved, whether FSDP2 shards it."""

    entry: Entry
    dtype: torch.dtype
    case: Case
    sharded: bool = False


class Job:
    """A model with its optimizer."""

    def __init__(self, setup: Setup, weights: int = 1) -> None:
        self.entry, dtype, case, sharded = self.setup = setup
        entry = self.entry
        torch.manual_seed(weights)
        self.model = Model(entry.needs.width, tied=entry.needs.tied).to(dtype)
        if sharded:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        seed(0)
        self.optimizer = entry.make(self.model, self._group(case.groups))

    def _group(self, count: int) -> list[dict[str, Any]]:
        params = [param for name, param in self.model.named_parameters() if self.entry.needs.only(name, param)]
        option = self.entry.needs.option
        if count == 1:
            return [{"params": params}]
        if option is None:
            raise CannotRun("takes one group")
        if len(params) < count:
            raise CannotRun(f"takes {len(params)} parameters only")
        base = self.entry.get_lr() if option == "lr" else 0.01
        return [{"params": params[number::count], option: base / (number + 1)} for number in range(count)]

    def train(self, *batches: int) -> None:
        """Take a step for each batch, in the optimizer's mode for training, which it leaves after them."""
        self._switch("train")
        for number in batches:
            seed(number)
            self.entry.needs.train(self.model, self.optimizer, number)
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        if hasattr(self.optimizer, "train") and hasattr(self.optimizer, "eval"):
            getattr(self.optimizer, mode)()

    def freeze(self, *, frozen: bool) -> None:
        """Let a layer learn or not."""
        self.model.down.weight.requires_grad_(not frozen)
        if frozen:
            self.model.down.weight.grad = None

    def values(self) -> dict[str, Any]:
        """Return the weights, and what the optimizer says is its state."""
        found = {"weights": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}
        found = _copy(found)
        states = found["optimizer"].get("state")
        if isinstance(states, dict):  # an empty state is none
            found["optimizer"]["state"] = {key: value for key, value in states.items() if value != {}}
        return found


def _copy(value: Any) -> Any:
    """Return a copy of any value, also of tensors that cannot be cloned, or are no leaves."""
    try:
        return copy.deepcopy(value)
    except (NotImplementedError, RuntimeError):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


class Way(NamedTuple):
    """A way to save and load.

    Attributes:
        save: Saves a job to a folder.
        load: Loads it.
        refusals: The errors by which it refuses.
    """

    save: Callable[[Job, Path], None]
    load: Callable[[Job, Path], None]
    refusals: tuple[type[Exception], ...] = ()


def _save_torch(job: Job, path: Path) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0 or job.setup.sharded:
        path.mkdir(exist_ok=True)
        state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        torch.save(state, _name_torch_file(job, path))


def _load_torch(job: Job, path: Path) -> None:
    found = torch.load(_name_torch_file(job, path), weights_only=False)
    job.model.load_state_dict(found["model"])
    job.optimizer.load_state_dict(found["optimizer"])


def _name_torch_file(job: Job, path: Path) -> Path:
    """Return a file for the job, or for each of its shards."""
    return path / f"{dist.get_rank() if job.setup.sharded else 'all'}.pt"


def _save_ours(job: Job, path: Path) -> None:
    state = to_sharded_state_dict(job.model, job.optimizer)
    dist_checkpointing.save(state, path, allow_globals=job.entry.list_classes())


def _load_ours(job: Job, path: Path) -> None:
    state = to_sharded_state_dict(job.model, job.optimizer)
    loaded = dist_checkpointing.load(state, path, allow_globals=job.entry.list_classes())
    load_into(loaded, job.model, job.optimizer)


def _read_stock(job: Job) -> dict[str, Any]:
    return {
        "model": stock.get_model_state_dict(job.model),
        "optimizer": stock.get_optimizer_state_dict(job.model, job.optimizer),
    }


def _save_stock(job: Job, path: Path) -> None:
    dcp.save(_read_stock(job), checkpoint_id=path)


def _load_stock(job: Job, path: Path) -> None:
    found = _read_stock(job)
    dcp.load(found, checkpoint_id=path)
    stock.set_model_state_dict(job.model, found["model"])
    stock.set_optimizer_state_dict(job.model, job.optimizer, found["optimizer"])


def _manage(job: Job, path: Path) -> CheckpointManager:
    config = CheckpointConfig(folder=str(path), interval=1, save_rng=False)
    states = {"model": job.model, "optimizer": job.optimizer}
    return CheckpointManager(config, states, allow_globals=job.entry.list_classes())


def _save_managed(job: Job, path: Path) -> None:
    with _manage(job, path) as manager:
        manager.save(1)


def _load_managed(job: Job, path: Path) -> None:
    with _manage(job, path) as manager:
        manager.load()


TORCH, OURS, MANAGER, STOCK = "torch.save", "shardckpt", "CheckpointManager", "stock DCP"
WAYS = {
    TORCH: Way(_save_torch, _load_torch),
    OURS: Way(_save_ours, _load_ours, (CheckpointingException,)),
    MANAGER: Way(_save_managed, _load_managed, (CheckpointingException,)),
    STOCK: Way(_save_stock, _load_stock),
}
#: The manager stands on the adapters: one case shows it.
MANAGED = Case(3, 3)


def judge(
    setup: Setup, folder: Path, ways: Sequence[str] = (*WAYS,), layout: Layout = LAYOUTS["1 rank"]
) -> dict[str, Verdict]:
    """Return what each way makes of a job: the worst of what it is on the ranks.

    Raises:
        CannotRun: The optimizer itself does not train so, or not the same way each time.
    """
    references = _on_ranks(layout.saved_at, layout, lambda: _run(setup))
    again = _on_ranks(layout.saved_at, layout, lambda: _run(setup))
    if difference := find_difference(references, again):
        raise CannotRun(f"not the same each time: {difference}")
    return {
        name: _judge_way(WAYS[name], setup, layout, folder / str(number), references)
        for number, name in enumerate(ways)
    }


def _on_ranks(count: int, layout: Layout, function: Callable[[], Any]) -> list[Any]:
    """Return what a function returns on each rank; one rank needs no group.

    Raises:
        CannotRun: A rank raised it.
        RankError: The ranks did not get to the end.
    """
    if count == 1 and not layout.sharded:
        return [function()]

    def run() -> Any:
        try:
            return function()
        except CannotRun as error:
            return error

    found = RankThreads().run(count, run)
    for each in found:
        if isinstance(each, CannotRun):
            raise each
    return found


def _run(setup: Setup) -> tuple[Any, Any]:
    """Return the values of a job when it is saved, and at its end."""
    try:
        job = _start(setup)
        saved = job.values()
        _go_on(job)
        return saved, job.values()
    except CannotRun:
        raise
    except Exception as error:
        raise CannotRun(tell(error)) from error


def _start(setup: Setup) -> Job:
    """Return a job as it is saved."""
    job = Job(setup)
    batches = range(setup.case.steps)
    if setup.case.frozen:
        job.train(*batches[:-1])
        job.freeze(frozen=True)
        job.train(*batches[-1:])
    elif batches:
        job.train(*batches)
    return job


def _go_on(job: Job) -> None:
    case = job.setup.case
    if case.frozen:
        job.freeze(frozen=False)
    job.train(*range(case.steps, case.steps + AFTER))


def _judge_way(way: Way, setup: Setup, layout: Layout, folder: Path, references: list[Any]) -> Verdict:
    """Save and load a job on ranks."""

    def find_reference() -> tuple[Any, Any]:
        return references[dist.get_rank() if layout.sharded else 0]

    def save() -> Verdict:
        job = _start(setup)
        if _is_anywhere(find_difference(find_reference()[0], job.values()) != ""):
            raise CannotRun("a second run of it differs: it draws random numbers, which ranks that are threads share")
        failure = _try(way, "save", lambda: way.save(job, folder))
        return failure or _compare(job, find_reference()[1], "in the job that was saved: ", _go_on)

    def resume() -> Verdict:
        job = _make_other(setup)
        saved, end = find_reference()
        failure = _try(way, "load", lambda: way.load(job, folder)) or _compare(job, saved)
        return failure if failure.reason else _compare(job, end, "then ", _go_on)

    try:
        verdicts = _on_ranks(layout.saved_at, layout, save)
        if all(verdict.outcome in (EXACT, OTHER) for verdict in verdicts):
            verdicts = [*_on_ranks(layout.loaded_at, layout, resume), *verdicts]
    except RankError as error:
        return Verdict(ERROR, tell(error))
    # a rank with a difference ends, and the others wait for it: its verdict says more than theirs
    return max(verdicts, key=lambda verdict: (OUTCOMES.index(verdict.outcome), "has ended" not in verdict.reason))


def _is_anywhere(flag: bool) -> bool:
    """Collective where there is a process group: return whether a flag is set on any rank."""
    if not dist.is_initialized():
        return flag
    flags = [False] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


def _make_other(setup: Setup) -> Job:
    """Return a job with other weights and another learning rate, which is to be resumed."""
    job = Job(setup, weights=2)
    if setup.case.into:
        job.train(*range(10, 10 + setup.case.into))
    for group in getattr(job.optimizer, "param_groups", ()):
        if isinstance(group.get("lr"), float):
            group["lr"] *= 3
    if setup.case.frozen:
        job.freeze(frozen=True)
    return job


def _try(way: Way, where: str, act: Callable[[], None]) -> Verdict | None:
    try:
        act()
    except way.refusals as error:
        return Verdict(REFUSED, f"{where}: {tell(error)}")
    except (Exception, CheckpointException) as error:  # noqa: BLE001 a verdict for each
        return Verdict(ERROR, f"{where}: {tell(error)}")
    return None


def _compare(job: Job, expected: Any, where: str = "", act: Callable[[Job], None] = lambda job: None) -> Verdict:
    try:
        act(job)
        difference = find_difference(expected, job.values(), where)
    except Exception as error:  # noqa: BLE001 what was loaded does not train
        difference = f"{where}{tell(error)}"
    return Verdict(OTHER, " ".join(difference.split())) if difference else Verdict(EXACT)


@contextlib.contextmanager
def be_quiet() -> Iterator[None]:
    """Let optimizers warn, print and log as they like, and compile nothing."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
            warnings.simplefilter("ignore")
            with torch.compiler.set_stance("force_eager"):
                yield
    finally:
        logging.disable(before)


def tell(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, CheckpointException):
        error = next(failure for failure, _ in error.failures.values())
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def find_difference(one: Any, other: Any, where: str = "") -> str:
    """Return where two values differ in type, dtype or bits, and how; nothing if they do not."""
    if type(one) is not type(other):
        return f"{where}: {_show(one)} became {_show(other)}"
    if isinstance(one, torch.Tensor):
        return "" if _have_equal_bits(one, other) else f"{where}: {_show(one)} became {_show(other)}"
    if isinstance(one, dict):
        one, other = _number_tensors(one), _number_tensors(other)
        changed = [*(f"without {key!r}" for key in one if key not in other)]
        changed += [f"with {key!r}" for key in other if key not in one]
        if changed:
            return f"{where}: {', '.join(changed[:3])}"
        pairs = [(f"{where}.{key}".lstrip("."), one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple, deque)):
        if len(one) != len(other):
            return f"{where}: {len(one)} values became {len(other)}"
        pairs = [(f"{where}[{number}]", *pair) for number, pair in enumerate(zip(one, other, strict=True))]
    elif hasattr(one, "__dict__") and not isinstance(one, (type, Enum, types.FunctionType, types.MethodType)):
        pairs = [(f"{where}<{type(one).__name__}>", vars(one), vars(other))]
    else:
        return "" if repr(one) == repr(other) else f"{where}: {_show(one)} became {_show(other)}"
    return next((found for label, here, there in pairs if (found := find_difference(here, there, label))), "")


def _number_tensors(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict with numbers in the place of keys that are tensors: parameters, of which each job has its own."""
    items = enumerate(values.items())
    return {f"parameter {number}" if isinstance(key, torch.Tensor) else key: value for number, (key, value) in items}


def _have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements and _have_equal_bits(one.to_local(), other.to_local())
    if hasattr(one, "__tensor_flatten__"):
        names, _ = one.__tensor_flatten__()
        return all(_have_equal_bits(getattr(one, name), getattr(other, name)) for name in names)
    if one.layout != torch.strided:
        return torch.equal(one.to_dense(), other.to_dense())
    here, there = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(here, there)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = "" if type(value) is torch.Tensor else f"{type(value).__name__} "
        return f"{kind}{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:60] + '...'}"


class Row(NamedTuple):
    """The verdicts of an optimizer in a case.

    Attributes:
        name: The optimizer's name.
        dtype: Of the weights.
        layout: The name of the layout.
        case: The case.
        verdicts: By the way; none where the optimizer itself cannot.
        cannot: Why it cannot.
    """

    name: str
    dtype: str
    layout: str
    case: str
    verdicts: dict[str, Verdict]
    cannot: str = ""


def judge_all(
    entry: Entry, dtype: str, folder: Path, ways: Sequence[str] = (*WAYS,), layouts: Sequence[str] = (*LAYOUTS,)
) -> list[Row]:
    """Return the verdicts of an optimizer in all cases."""
    rows = []
    for name in layouts:
        for number, case in enumerate(CASES if name == "1 rank" else FEW):
            own = folder / f"{name}-{number}"
            own.mkdir()
            layout = LAYOUTS[name]
            mine = [way for way in ways if way != MANAGER or (name, case) == ("1 rank", MANAGED)]
            try:
                with be_quiet():
                    verdicts = judge(Setup(entry, DTYPES[dtype], case, layout.sharded), own, mine, layout)
                rows.append(Row(entry.name, dtype, name, str(case), verdicts))
            except (CannotRun, RankError) as error:
                rows.append(Row(entry.name, dtype, name, str(case), {}, " ".join(str(error).split())[:300]))
    return rows


def is_worse(row: Row) -> str:
    """Return why what we make of a case is worse than it may be; nothing if it is not."""
    best = row.verdicts.get(TORCH, Verdict(EXACT)).outcome
    for way in (OURS, MANAGER):
        ours = row.verdicts.get(way)
        if ours is not None and ours.outcome not in (EXACT, *((REFUSED, best) if best != EXACT else ())):
            return f"{row.layout}, {row.case}, {way}: {ours.outcome}: {ours.reason}"
    return ""


def write_table(rows: Sequence[Row]) -> list[str]:
    """Return the table: for each way its cases by outcome, and the optimizers all of whose cases are exact."""
    lines = [f"| | {' | '.join(OUTCOMES)} | optimizers | exact in all |", f"|---|{'---|' * (len(OUTCOMES) + 2)}"]
    for way in WAYS:
        found = [(row.name, row.verdicts[way].outcome) for row in rows if way in row.verdicts]
        counts = Counter(outcome for _, outcome in found)
        names = {name for name, _ in found}
        exact = names - {name for name, outcome in found if outcome != EXACT}
        cells = [*(counts[outcome] for outcome in OUTCOMES), len(names), len(exact)]
        lines.append(f"| {way} | {' | '.join(map(str, cells))} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if any resume of ours is worse than it may be."""
    parser = argparse.ArgumentParser(prog="python -m tests.adapters.optimizer_table", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="only optimizers whose names contain it")
    parser.add_argument("--packages", default="", metavar="NAMES", help="only those of these packages: a,b")
    parser.add_argument("--part", default="1/1", metavar="N/M", help="only a part of them: 2/3 is the second of three")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="NAMES", help="only these ways: a,b")
    parser.add_argument("--dtypes", default=",".join(DTYPES), metavar="NAMES", help="only these dtypes: a,b")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), metavar="NAMES", help="only these layouts: a,b")
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="append each verdict to a file, and judge no optimizer that it has already",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    site = find_site(SITE)
    entries, absent = find_optimizers(str(site) if site else None, [*filter(None, options.packages.split(","))])
    part, parts = map(int, options.part.split("/"))
    entries = [entry for entry in entries if options.only in entry.name][part - 1 :: parts]
    rows = read_rows(options.rows)
    ways, layouts = options.ways.split(","), options.layouts.split(",")
    known = {(row.name, row.dtype) for row in rows}
    for entry in entries:
        for dtype in options.dtypes.split(","):
            if (entry.name, dtype) in known:
                continue
            with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
                found = judge_all(entry, dtype, Path(folder), ways, layouts)
            rows += found
            marks = " ".join(
                "-" if row.cannot else "".join(verdict.outcome[:2] for verdict in row.verdicts.values())
                for row in found
            )
            print(f"{entry.name:45} {dtype} {marks}", flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.writelines(write_row(row) for row in found)
    print(*write_table(rows), sep="\n")
    for name, reason in absent.items():
        print(f"left out: {name}: {reason}")
    return int(any(map(is_worse, rows)))


def read_rows(file: Path | None) -> list[Row]:
    """Return what :func:`write_row` has written to a file."""
    rows: dict[tuple[str, ...], Row] = {}
    for line in file.read_text().splitlines() if file is not None and file.exists() else ():
        name, dtype, layout, case, way, outcome, *reason = line.split("\t")
        row = rows.setdefault((name, dtype, layout, case), Row(name, dtype, layout, case, {}))
        if way == CANNOT:
            rows[name, dtype, layout, case] = row._replace(cannot=outcome)
        else:
            row.verdicts[way] = Verdict(outcome, *reason)
    return [*rows.values()]


def write_row(row: Row) -> str:
    """Return the verdicts of a case, one for each way."""
    head = f"{row.name}\t{row.dtype}\t{row.layout}\t{row.case}"
    if row.cannot:
        return f"{head}\t{CANNOT}\t{row.cannot}\n"
    return "".join(f"{head}\t{way}\t{verdict.outcome}\t{verdict.reason}\n" for way, verdict in row.verdicts.items())


if __name__ == "__main__":
    sys.exit(main())
