from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from shardckpt_npy.load import NpyLoadStrategy
from shardckpt_npy.save import NpySaveStrategy

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    ShardingError,
    UnknownBackendError,
    UnsafePickleError,
)
from shardckpt.huggingface import export_to_huggingface
from shardckpt.maintenance import convert_checkpoint
from shardckpt.maintenance.proof import StagedProof, SummedCheckpoint
from shardckpt.maintenance.sources import open_any
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.plugins import get_plugin_manager
from shardckpt.state_dict import diff
from shardckpt.tensors import tensor_bytes
from shardckpt.testing.tensors import DTYPES
from shardckpt_ep import EPSaveStrategy
from tests import backends
from tests.faults.hostile import archive, named
from tests.golden_checkpoints import VERSIONS, global_tensors
from tests.tables import table
from tests.testing.blocks import LoadBlocks, SaveBlocks
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardckpt import SaveContext
    from shardckpt.mapping import ShardedBase
    from tests.backends import Backend

MIB = 1 << 20
LEAST = 32 * MIB
#: Dtypes that numpy, or an unsigned integer of one or two bytes, stands in for.
COMMON_DTYPES = tuple(dtype for dtype in DTYPES if dtype is not getattr(torch, "complex32", None))

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(autouse=True)
def _more_strategies() -> Iterator[None]:
    """Register (blocks, 2) and (npy, 2) for a test."""
    registry = get_plugin_manager().registry
    with registry.preserved():
        for strategy in (SaveBlocks, LoadBlocks, NpySaveStrategy, NpyLoadStrategy):
            registry.add(strategy)
        yield


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits of a dtype; 0 and 1 as bool."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


whole = ShardedTensor.from_rank_offsets  # a tensor in one shard


def make_state(dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """Tensors of every dtype, of no axis, empty, larger than a box, of column shards; objects; common state."""
    columns = random_tensor(torch.int16, 64, 4096).chunk(4, 1)
    return {
        "tensors": [whole(f"dtypes.{dtype}", random_tensor(dtype, 5, 6)) for dtype in dtypes],
        "scalar": whole("scalar", torch.tensor(2.5, dtype=torch.bfloat16)),
        "empty": whole("empty", torch.empty(0, 4)),
        "rows": whole("rows", random_tensor(torch.float32, 3, 700, 500)),
        "long": whole("long", random_tensor(torch.uint8, 1, 5 * MIB)),
        "columns": [ShardedTensor.from_rank_offsets("columns", c, (1, n, 4)) for n, c in enumerate(columns)],
        "objects": [ShardedObject("objects", {"number": n, "names": ["a"]}, (2, 1), (n, 0)) for n in range(2)],
        "step": 17,
        "nest": {"rates": [0.1, 2, None], "name": "run"},
    }


def assert_same(old: Path, new: Path) -> None:
    """Compare all that two checkpoints store: keys, shapes, dtypes, bits, objects, common state."""
    with dc.open_checkpoint(old) as a, dc.open_checkpoint(new) as b:
        assert sorted(a) == sorted(b)
        assert sorted(a.objects) == sorted(b.objects)
        for key in a:
            x, y = a[key].read(), b[key].read()
            assert (x.shape, x.dtype) == (y.shape, y.dtype), key
            assert tensor_bytes(x) == tensor_bytes(y), key
        for key in a.objects:
            assert diff({"": a.read_object(key)}, {"": b.read_object(key)}) == ([], [], []), key
        assert diff(a.common, b.common) == ([], [], [])
    assert dc.load_content_metadata(old) == dc.load_content_metadata(new)


@pytest.mark.parametrize(
    ("first", "second", "dtypes"),
    [
        ("torch_dist", "ep", DTYPES),
        ("torch_dist", ("blocks", 2), DTYPES),
        ("torch_dist", "npy", COMMON_DTYPES),
        ("torch_dist", "safetensors", DTYPES),
        ("ep", ("safetensors", 1), DTYPES),
    ],
    ids=["ep", "blocks", "npy", "safetensors", "ep-safetensors"],
)
def test_everything_goes_there_and_back(
    tmp_path: Path, first: str, second: Any, dtypes: tuple[torch.dtype, ...]
) -> None:
    """What one format stores is in the other bit for bit, and, taken back, as it was."""
    dc.save(make_state(dtypes), tmp_path / "old", first, content_metadata={"writer": "test"})
    there = convert_checkpoint(tmp_path / "old", tmp_path / "there", second, memory_budget=LEAST)
    assert there.old == (first, 1)
    assert there.new[0] == (second if isinstance(second, str) else second[0])
    assert (there.tensors, there.objects) == (len(dtypes) + 5, 2)
    assert_same(tmp_path / "old", tmp_path / "there")
    back = convert_checkpoint(tmp_path / "there", tmp_path / "back", first, memory_budget=LEAST)
    assert (back.old, back.new, back.nbytes) == (there.new, there.old, there.nbytes)
    assert_same(tmp_path / "old", tmp_path / "back")
    assert dc.load_content_metadata(tmp_path / "back") == {"writer": "test"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "old", "there"]


def test_urls_are_converted(tmp_path: Path) -> None:
    """OLD and NEW may be URLs."""
    url = "memory://bucket/folder/c"
    dc.save(make_state(COMMON_DTYPES), tmp_path / "old")
    try:
        convert_checkpoint(tmp_path / "old", url, "safetensors", memory_budget=2 * LEAST)
        convert_checkpoint(url, tmp_path / "new", "torch_dist", memory_budget=LEAST)
    finally:
        fsspec.filesystem("memory").store.clear()
    assert_same(tmp_path / "old", tmp_path / "new")


@table("to", ["torch_dist", "safetensors", "hf"])
def test_what_a_store_does_not_give_back_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """If the store has other values than were sent, an error says so, and nothing is left there."""
    dc.save({"w": whole("w", torch.ones(1 << 14))}, tmp_path / "old")
    files, make = fsspec.filesystem("memory"), StagedProof.make

    def make_after_damage(proof: StagedProof, *args: Any) -> None:
        name = max((name for name in files.store if f"/wrong/{to}/" in name), key=lambda name: files.info(name)["size"])
        files.pipe_file(name, files.cat_file(name).replace(b"\x80?", b"\x81?"))
        make(proof, *args)

    monkeypatch.setattr(StagedProof, "make", make_after_damage)
    with pytest.raises(CorruptCheckpointError):
        convert_checkpoint(tmp_path / "old", f"memory://bucket/wrong/{to}", to)
    assert not [name for name in files.store if "/wrong" in name]


def test_large_tensors_are_stored_in_parts(tmp_path: Path) -> None:
    """A tensor larger than its part of the memory becomes boxes that are smaller, also where its first axis is 1."""
    dc.save(
        {"rows": whole("rows", torch.ones(3, 2 * MIB)), "long": whole("long", torch.ones(1, 5 * MIB))}, tmp_path / "a"
    )
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "ep", memory_budget=LEAST)
    stored = dcp.FileSystemReader(tmp_path / "b").read_metadata().state_dict_metadata
    sizes = {key: [chunk.sizes.numel() * 4 for chunk in entry.chunks] for key, entry in stored.items()}  # type: ignore[union-attr]
    assert {key: sum(each) for key, each in sizes.items()} == {"rows": 24 * MIB, "long": 20 * MIB}
    assert max(map(max, sizes.values())) <= LEAST // 4


@table("version", VERSIONS)
@table("to", ["torch_dist", "ep", "safetensors", "blocks"])
def test_megatrons_checkpoints_are_converted(tmp_path: Path, version: str, to: str) -> None:
    """Every dialect of Megatron's, flattened shards among them, is rewritten with its true shapes and values."""
    old = GOLDEN / f"mcore-{version}"
    convert_checkpoint(old, tmp_path / "new", to)
    assert_same(old, tmp_path / "new")
    with dc.open_checkpoint(tmp_path / "new") as stored:
        for key, values in global_tensors(version).items():
            assert torch.equal(stored[key].read(), values)


def test_plain_objects_come_along(tmp_path: Path) -> None:
    """Objects that are stored for stock DCP are found by it under all their keys after a conversion."""
    plain = PlainObject("own", 0.5, keys=("groups.0.lr", "groups.1.lr"))
    dc.save({"w": whole("w", torch.ones(3)), "plain": plain, "one": PlainObject("one", [1])}, tmp_path / "old")
    assert convert_checkpoint(tmp_path / "old", tmp_path / "ep", "ep").objects == 0  # inspect counts none either
    convert_checkpoint(tmp_path / "ep", tmp_path / "new", "torch_dist")
    wanted = {"w": torch.zeros(3), "groups.0.lr": 0.0, "groups.1.lr": 0.0, "one": None}
    dcp.load(wanted, checkpoint_id=tmp_path / "new")
    assert (wanted["groups.0.lr"], wanted["groups.1.lr"], wanted["one"]) == (0.5, 0.5, [1])


@pytest.mark.parametrize("to", ["blocks", "safetensors"])
def test_plain_objects_that_are_left_out_are_reported(
    tmp_path: Path, to: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A format without a place for them does not get them: report and warning name every key, the command counts."""
    plain = PlainObject("own", 0.5, keys=("groups.0.lr", "groups.1.lr"))
    state = {"w": whole("w", torch.ones(3)), "plain": plain, "one": PlainObject("one", [1])}
    dc.save(state, tmp_path / "old", "torch_dist")
    (tmp_path / "taken" / "other").mkdir(parents=True)
    with pytest.raises(CheckpointingException, match="is not empty"):  # before it is said what would not be written
        convert_checkpoint(tmp_path / "old", tmp_path / "taken", to)
    assert not caplog.records
    report = convert_checkpoint(tmp_path / "old", tmp_path / "new", to)
    assert (report.objects, sorted(report.left_out)) == (0, ["groups.0.lr", "groups.1.lr", "one"])
    assert report.plain_objects == 3
    (warning,) = (entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING")
    assert "leaves out 3 objects" in warning
    assert all(key in warning for key in report.left_out)
    assert_same(tmp_path / "old", tmp_path / "new")
    assert main(["migrate", str(tmp_path / "old"), str(tmp_path / "again"), "--to", to]) == 0
    assert "not written: 3 objects for readers of other libraries alone" in capsys.readouterr().out
    dcp.save({"lr": 0.5, "w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert not convert_checkpoint(tmp_path / "dcp", tmp_path / "of-dcp", to).left_out  # they are its common state
    assert dc.load_common_state_dict(tmp_path / "of-dcp")["lr"] == 0.5


@table("to", ["nothing", "zarr", ("ep", 9), "torch_dist"])
def test_what_cannot_be_written_is_refused(tmp_path: Path, to: Any) -> None:
    """A format that is unknown, only read, or the source's already is an error, which lists those that are written."""
    dc.save({"w": whole("w", torch.ones(3))}, tmp_path / "old")
    text = r"no installed strategy saves .*installed: .*torch_dist 1"
    if to == ("ep", 9):
        text = r"no strategy saves version 9 of 'ep': installed is version 1 \("
    if to == "torch_dist":
        text = r"old is a 'torch_dist' checkpoint of version 1 already"
    with pytest.raises(CheckpointingException, match=text) as caught:
        convert_checkpoint(tmp_path / "old", tmp_path / "new", to)
    assert isinstance(caught.value, UnknownBackendError) == (to != "torch_dist")
    assert not (tmp_path / "new").exists()


def test_a_plugins_backend_may_have_any_name(tmp_path: Path) -> None:
    """What is a slip for a file of torch.save, ``pt``, is written where an installed strategy has that name."""
    dc.save({"w": whole("w", torch.ones(3))}, tmp_path / "old")
    with pytest.raises(UnknownBackendError, match=r"'pt' is no format to write: did you mean torch\?"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new", "pt")
    for strategy in (SaveBlocks, LoadBlocks):
        get_plugin_manager().registry.add(type(strategy.__name__, (strategy,), {"backend": "pt"}))
    convert_checkpoint(tmp_path / "old", tmp_path / "new", "pt")
    assert dc.load({"w": whole("w", torch.zeros(3))}, tmp_path / "new")["w"].equal(torch.ones(3))


def test_the_targets_refusal_names_the_key(tmp_path: Path) -> None:
    """An object or dtype that the new format cannot store is its own error, with the key; nothing is written."""
    state = {"w": whole("w", torch.ones(3)), "object": ShardedObject("common_state", 1, (1,), (0,))}
    dc.save(state, tmp_path / "old", "blocks")
    with pytest.raises(ShardingError, match="object 'common_state': the common state has that name"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new", "torch_dist")
    odd = {"odd": whole("odd", torch.ones(3, dtype=torch.uint8).view(torch.uint4))}
    dc.save(odd, tmp_path / "old", "torch_dist", overwrite=True)
    with pytest.raises(ShardingError, match=r"tensor 'odd': the format has no name for torch\.uint4"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new", "safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


class Custom:
    """A class that no load accepts unasked."""

    def __init__(self) -> None:
        self.value = 3


def test_objects_of_other_classes_need_leave(tmp_path: Path) -> None:
    """An object of a class of the user's is read and written if the caller allows it, and else an error names it."""
    state = {"w": whole("w", torch.ones(3)), "object": ShardedObject("object", Custom(), (1,), (0,))}
    dc.save(state, tmp_path / "old", allow_globals=[Custom])
    with pytest.raises(UnsafePickleError, match=r"Custom"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new", "ep")
    assert not (tmp_path / "new").exists()
    convert_checkpoint(tmp_path / "old", tmp_path / "new", "ep", allow_globals=(Custom,))
    with dc.open_checkpoint(tmp_path / "new", allow_globals=[Custom]) as stored:
        assert stored.read_object("object/shard_0_1").value == 3
    with pytest.raises(ShardingError, match=r"object 'object/shard_0_1'.*Custom"):  # no pickles there
        convert_checkpoint(tmp_path / "old", tmp_path / "other", "safetensors", allow_globals=(Custom,))
    assert not (tmp_path / "other").exists()


@table("name", ["Inner", "Outer.Inner", "In\0ner"])
def test_a_class_of_what_is_left_out_is_not_needed(tmp_path: Path, name: str) -> None:
    """What is left out needs no class, whatever its name: one in a class, or one that Python cannot have."""
    pickled = b"(S'args'\n" + named("nowhere", name) + b")RS'step'\nI7\nd."
    (tmp_path / "old.pt").write_bytes(archive(pickled))
    convert_checkpoint(tmp_path / "old.pt", tmp_path / "new", "safetensors", leave_out=["args"])
    assert dc.load_common_state_dict(tmp_path / "new")["step"] == 7


@table("to", ["ep", "safetensors", "blocks", "npy"])
def test_damage_is_not_copied(tmp_path: Path, to: str) -> None:
    """A flipped bit in the old checkpoint is an error of its class that names the key; nothing is at NEW."""
    dc.save({"w": whole("w", torch.ones(3)), "v": whole("v", torch.full((MIB // 2,), 7.0))}, tmp_path / "old")
    (file,) = (tmp_path / "old").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((64,), 7.0).numpy().tobytes()) + MIB] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"^(?!.*'w').*v.*digest differs"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]


class Overwrites(EPSaveStrategy):
    """Lets another save replace the old checkpoint before any tensor is read."""

    old: Path

    def save(self, shards: Any, common: Any, context: SaveContext) -> None:
        """Save."""
        state = {"w": whole("w", torch.zeros(MIB)), "step": 2}
        dc.save(state, self.old, overwrite=True)
        super().save(shards, common, context)


def test_a_conversion_is_of_one_save(tmp_path: Path) -> None:
    """If another save replaces the old checkpoint meanwhile, the new one has the values of one of the two saves."""
    dc.save({"w": whole("w", torch.ones(MIB)), "step": 1}, tmp_path / "old")
    saver = Overwrites()
    saver.old = tmp_path / "old"
    convert_checkpoint(tmp_path / "old", tmp_path / "new", saver)
    with dc.open_checkpoint(tmp_path / "new") as stored:
        assert bool((stored["w"].read() == (2 - stored.common["step"])).all())


@table("name", ["old", "new"])
def test_overwrite_replaces_in_one_step(tmp_path: Path, name: str) -> None:
    """With `overwrite` NEW is replaced, also where it is OLD; without it, and after an error, it stays."""
    dc.save({"w": whole("w", torch.arange(5.0)), "step": 1}, tmp_path / "old")
    dc.save({"w": whole("w", torch.zeros(3))}, tmp_path / "new")
    dc.save({"w": whole("w", torch.arange(5.0)), "step": 1}, tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    with pytest.raises(CheckpointingException, match="overwrite=True"):
        convert_checkpoint(tmp_path / "old", tmp_path / name, "ep")
    assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == before
    convert_checkpoint(tmp_path / "old", tmp_path / name, "ep", overwrite=True)
    with dc.open_checkpoint(tmp_path / name) as stored:
        assert stored.backend == "ep"
    assert_same(tmp_path / "copy", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "new", "old"]


def list_contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@backends.both_in_proof
def test_a_target_that_is_the_source_or_a_part_of_it_is_refused(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    """By real path, with and without --overwrite: the command says what would be lost, writes nothing, and exits 2."""
    dc.save({"w": whole("w", torch.full((4,), 1 + 2**-20)), "step": 1}, tmp_path / "run" / "c")
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pt")
    (tmp_path / "link").symlink_to("run/c")
    (tmp_path / "link.pt").symlink_to("x.pt")
    (tmp_path / "hard.pt").hardlink_to(tmp_path / "x.pt")
    (tmp_path / "view").mkdir()
    for path in (tmp_path / "run" / "c").iterdir():
        (tmp_path / "view" / path.name).symlink_to(path)
    member = f"run/c/{backend.index}"
    other = "ep" if backend.name == "torch_dist" else "torch_dist"
    before = list_contents(tmp_path)
    for verb, source, target, *to in (
        ("convert", "x.pt", "x.pt", "torch"),
        ("convert", "x.pt", "link.pt", "torch"),
        ("convert", "x.pt", "hard.pt", "torch"),
        ("convert", "link", member, "torch"),
        ("convert", "run/c", member, "torch"),
        ("convert", "view", member, "torch"),
        ("convert", "run/c", "run/c/new.pt", "torch"),
        ("convert", "run/c", "link", "hf"),
        ("convert", "run/c", "run", "hf"),
        ("convert", "run/c", "run", other),
        ("convert", "view", "run/c", other),
        ("convert", "run/c", "run/c/other", other),
        ("convert", member, "run/c", other),
        ("merge", "run/c", "run/c", other),
        ("merge", "x.pt", "hard.pt", "torch"),
        ("migrate", "run/c", "run", other),
        ("migrate", "run/c", "run"),
        ("export", "run/c", "link"),
        ("export", "run/c", "run"),
    ):
        sources = [source, "x.pt"] if verb == "merge" else [source]
        command = [verb, *(str(tmp_path / name) for name in (*sources, target)), *(f"--to={name}" for name in to)]
        for more in ([], ["--overwrite"]):
            assert main([*command, *more]) == 2, command
            said = capsys.readouterr().err
            assert re.search(r"the source.*Nothing was written; give another target", said), (command, said)
            assert list_contents(tmp_path) == before, command


def test_a_url_that_is_the_source_or_a_part_of_it_is_refused() -> None:
    """URLs of the source, of a folder in it and of one around it are refused, in other letters too."""
    url = "memory://overlap/run/c"
    dc.save({"w": whole("w", torch.ones(4))}, url)
    store = fsspec.filesystem("memory")
    before = store.find("/overlap")
    for target in (f"{url}/in", "memory://overlap/run", "memory://overlap", "Memory://overlap/run/"):
        for to in ("ep", "safetensors"):
            with pytest.raises(CheckpointingException, match=r"the source.*give another target"):
                convert_checkpoint(url, target, to, overwrite=True)
    for target in (f"{url}/", "MEMORY://overlap/run/c"):
        with pytest.raises(CheckpointingException, match=r"is the source.*give another target"):
            export_to_huggingface(url, target, overwrite=True)
    assert store.find("/overlap") == before


@backends.both
@table("to", ["torch", "hf", "other"])
def test_a_source_that_changes_is_found_before_the_commit(tmp_path: Path, backend: Backend, to: str) -> None:
    """If the source is written to while it is read, the old target stays; a change after all was read is no error."""
    to = to if to != "other" else "ep" if backend.name == "torch_dist" else "torch_dist"
    dc.save({"w": whole("w", torch.zeros(5)), "step": 1}, tmp_path / "c")
    convert_checkpoint(tmp_path / "c", tmp_path / "new", to)
    before = list_contents(tmp_path / "new") or (tmp_path / "new").read_bytes()
    make = StagedProof.make
    torch.save({"w": torch.ones(5)}, tmp_path / "x.pt")

    def write_source() -> None:
        torch.save({"w": torch.full((9,), 2.0)}, tmp_path / "x.pt")

    def write_and_prove(proof: StagedProof, *arguments: Any) -> None:
        write_source()
        make(proof, *arguments)

    read = SummedCheckpoint.values

    def read_and_write(checkpoint: SummedCheckpoint, wanted: list[ShardedBase]) -> list[Any]:
        found = read(checkpoint, wanted)
        if wanted:
            write_source()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SummedCheckpoint, "values", read_and_write)
        with pytest.raises(CheckpointingException, match=r"x\.pt was written to, or removed, while"):
            convert_checkpoint(tmp_path / "x.pt", tmp_path / "new", to, overwrite=True)
    assert (list_contents(tmp_path / "new") or (tmp_path / "new").read_bytes()) == before
    torch.save({"w": torch.ones(5)}, tmp_path / "x.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedProof, "make", write_and_prove)  # all was read, and checked, before the proof
        convert_checkpoint(tmp_path / "x.pt", tmp_path / "new", to, overwrite=True)
    with open_any(tmp_path / "new") as found:
        assert found["w"].read().equal(torch.ones(5))
