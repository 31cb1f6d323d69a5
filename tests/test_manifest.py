from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.engine.transaction import as_json
from shardckpt.errors import CorruptCheckpointError, VersionTooNewError
from shardckpt.manifest import FileRecord, Integrity, Marker, Record, lacks_weights, parse_plain
from shardckpt.manifest.names import NO_DIGEST
from shardckpt.mapping import ShardedTensor
from tests import backends
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECORD = Record(
    save_id="0123" * 8,
    backend="npy",
    version=2,
    reader="shardckpt-npy 2.0",
    writer={"shardckpt": "0.1.0"},
    world_size=4,
    digest_algorithm="crc32",
    files=(FileRecord(name="a.npy", size=3, rank=1, keys=1, digest="00", segments="eJw="),),
)


def test_a_record_comes_back_as_it_was() -> None:
    """What is dumped is parsed to the same, its digest set."""
    parsed = Record.parse(RECORD.dump())
    assert parsed.model_copy(update={"self_digest": RECORD.self_digest}) == RECORD
    assert parsed.self_digest != RECORD.self_digest


def _named(*names: str, **fields: Any) -> bytes:
    """A record of files with these names, with a right digest, whatever they are."""
    files = [RECORD.files[0].model_dump() | {"name": name} for name in names]
    text = json.dumps({**RECORD.model_dump(), "files": files, **fields}).encode()
    return text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode())


@table(
    "names",
    [
        ["../x"],
        ["a/../b"],
        ["/etc/passwd"],
        ["a//b"],
        ["a/"],
        ["."],
        [".."],
        ["a\\b"],
        ["a\u0000b"],
        ["C:/x"],
        ["a/b\n"],
        ["x" * 256],
        ["/".join("a" * 33)],
        ["a", "a/b"],
        ["a/b/c", "a/b"],
    ],
)
def test_a_record_with_names_that_no_save_writes_is_refused(tmp_path: Path, names: list[str]) -> None:
    """Whatever its digest, a record whose names lead elsewhere, or are of files and folders, is damage to a load."""
    with pytest.raises(ValueError, match=r"letters, digits|file, and of a folder"):
        Record.parse(_named(*names))
    for number in (1, 2):
        (tmp_path / "metadata.json").write_text('{"sharded_backend": "npy", "sharded_backend_version": 2}')
        (tmp_path / "shardckpt.json").write_bytes(_named(*names, format=number))
        with pytest.raises(CorruptCheckpointError, match=r"shardckpt.json is damaged: "):
            dc.load({}, tmp_path)


def test_only_files_in_folders_need_format_2() -> None:
    """A record of files without folders stays one of format 1, which older releases read; the other has format 2."""
    for name, version in (("a.npy", 1), ("c/0/a.npy", 2)):
        file = RECORD.files[0].model_copy(update={"name": name})
        data = RECORD.model_copy(update={"files": (file,)}).dump()
        assert json.loads(data)["format"] == version
        parsed = Record.parse(data)
        assert (parsed.format, parsed.files) == (version, (file,))
        assert Record.parse(parsed.dump()) == parsed


def test_a_format_of_a_later_release_says_what_to_upgrade(tmp_path: Path) -> None:
    """A record in a format that is not known is no damage: the error says its number and what to upgrade to."""
    content = _named("a", "a/b", format=4, writer={"shardckpt": "7.1"}, world_size="many")
    with pytest.raises(
        VersionTooNewError, match=r"has format 4, written by shardckpt 7\.1; .* formats 1 to 3: upgrade"
    ):
        Record.parse(content)
    with pytest.raises(VersionTooNewError, match="has format 9, and does not say which release wrote it; this release"):
        Record.parse(_named("a", "a/b", format=9, writer={}))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "npy", "sharded_backend_version": 2}')
    (tmp_path / "shardckpt.json").write_bytes(content)
    with pytest.raises(VersionTooNewError, match=rf"^{tmp_path}: shardckpt.json has format 4"):
        dc.load({}, tmp_path)


def _first(text: str, field: str) -> str:
    return text.replace("{", "{" + field + ", ", 1)


def _changed(**fields: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **fields})


def _file_changed(**fields: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        record = json.loads(text)
        return json.dumps({**record, "files": [{**record["files"][0], **fields}, *record["files"][1:]]})

    return change


def _without(name: str) -> Callable[[str], str]:
    return lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != name})


#: What the page of the format says that a reader refuses: two programs would see two checkpoints in it.
ODD_RECORDS: dict[str, Callable[[str], str]] = {
    "files twice": lambda text: _first(text, '"files": []'),
    "size twice": lambda text: text.replace('"size":', '"size": 1, "size":', 1),
    "a key twice in another's field": lambda text: _first(text, '"later": {"a": 1, "a": 2}'),
    "NaN": lambda text: _first(text, '"later": NaN'),
    "Infinity": lambda text: _first(text, '"later": [-Infinity]'),
    "too many lists": lambda text: _first(text, '"later": ' + "[" * 501 + "]" * 501),
    "a text for a size": _file_changed(size="7"),
    "a float for a size": _file_changed(size=7.0),
    "a size of 2^53": _file_changed(size=1 << 53),
    "a truth for a rank": _file_changed(rank=True),
    "a text for keys": _file_changed(keys="1"),
    "a truth for a version": _changed(version=True),
    "a version of 2^70": _changed(version=1 << 70),
    "a float for a format": _changed(format=1.0),
    "a truth for a format": _changed(format=True),
    "format 0": _changed(format=0),
    "no format": _without("format"),
    "a world size of 2^70": _changed(world_size=1 << 70),
    "a number for a text": _changed(digest_algorithm=32),
    "a writer of numbers": _changed(writer={"shardckpt": 1}),
    "a short save id": _changed(save_id="ab"),
    "a save id of two lines": _changed(save_id="ab" * 16 + "\n"),
    "a parent with more around it": _changed(parent="ab" * 16 + "0"),
    "a text for a step": _changed(step="3"),
    "a step of 2^53": _changed(step=1 << 53),
    "no files": _without("files"),
    "a time that is no number": _changed(
        timings={"ranks": [0], "nbytes": [1], "start": {}, "seconds": {}, "spread": {"plan": ["1", 1, 1]}}
    ),
    "a time that is infinite": lambda text: _first(
        text, '"timings": {"ranks": [], "nbytes": [], "start": {}, "seconds": {}, "spread": {"plan": [1e999, 0, 0]}}'
    ),
}
ODD_MARKERS: dict[str, Callable[[str], str]] = {
    "a backend twice": lambda text: _first(text, '"sharded_backend": "other"'),
    "a version twice": lambda text: _first(text, '"sharded_backend_version": 7'),
    "NaN": lambda text: _first(text, '"later": NaN'),
    "a text for a version": _changed(sharded_backend_version="1"),
    "a truth for a version": _changed(sharded_backend_version=True),
    "a float for a version": _changed(sharded_backend_version=1.0),
    "a version of 2^53": _changed(sharded_backend_version=1 << 53),
    "no version": _without("sharded_backend_version"),
    "a generation with more around it": _changed(shardckpt_generation=f"../generation-{'ab' * 16}"),
}


def _signed(text: str, change: Callable[[str], str]) -> bytes:
    """The bytes of a record that is changed and has a right digest: only what it says is wrong."""
    changed = change(json.dumps({**json.loads(text), "self_digest": NO_DIGEST}))
    return changed.replace(NO_DIGEST, hashlib.sha256(changed.encode()).hexdigest()).encode()


@backends.both
def test_what_two_readers_read_as_two_is_refused(
    backend: backends.Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON with a key twice, NaN, texts or truths for numbers, or no format is damage to a load and every verb."""
    path = tmp_path / "c"
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, path)
    before = {name: (path / name).read_text() for name in ("shardckpt.json", "metadata.json")}
    (path / "shardckpt.json").write_bytes(_signed(before["shardckpt.json"], lambda text: text))
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
    assert dc.load(wanted, path)["w"].sum() == 2
    odd = {("shardckpt.json", what): _signed(before["shardckpt.json"], change) for what, change in ODD_RECORDS.items()}
    odd |= {("metadata.json", what): change(before["metadata.json"]).encode() for what, change in ODD_MARKERS.items()}
    for (name, what), data in odd.items():
        files = {**{each: text.encode() for each, text in before.items()}, name: data}
        for each, content in files.items():
            (path / each).write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match=rf"{name}( is damaged)?:? "):
            dc.load(wanted, path)
        if what != "a time that is no number":  # a listing reads no times
            assert parse_plain(files["metadata.json"], files["shardckpt.json"]) is None, (name, what)
        if what in ("files twice", "no version"):
            assert [main([verb, str(path)]) for verb in ("verify", "ls", "inspect")] == [1, 1, 2], (name, what)
            assert name in capsys.readouterr().err


def test_a_marker_of_megatron_may_lack_its_version() -> None:
    """Megatron reads a version that is not there as 1; where it stands, it is a number."""
    assert Marker.parse(b'{"sharded_backend": "torch_dist"}').sharded_backend_version == 1
    for wrong in ('"1"', "true", "1.0", "NaN", "null"):
        with pytest.raises(ValueError, match=r"version|JSON"):
            Marker.parse(b'{"sharded_backend": "torch_dist", "sharded_backend_version": %b}' % wrong.encode())


def test_integrity_json_is_parsed_strictly() -> None:
    """Two digests of one file, or what is no text, are refused."""
    assert Integrity.parse(b'{"algorithm": "sha256", "files": {"a": "00"}}').files == {"a": "00"}
    for wrong in (
        b'{"files": {"a": "00", "a": "01"}}',
        b'{"files": {"a": 0}}',
        b'{"files": {"a": NaN}}',
        b'{"files": {}}',
    ):
        with pytest.raises(ValueError, match=r"\w"):
            Integrity.parse(wrong)


@table("mask", [1, 16, 32])
def test_any_changed_byte_is_noticed(mask: int) -> None:
    """The file carries its own digest: no byte of it can change unseen, white space included."""
    data = RECORD.dump()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= mask
        with pytest.raises(ValueError, match=r"\w"):
            Record.parse(bytes(changed))


@table(
    "content",
    [{"kind": "reshardable", "versions": [1, 2.5, None, True]}, ["plain"], "0" * 64, {"self_digest": "0" * 64}],
    ids=str,
)
def test_content_metadata_is_read_without_unpickling(tmp_path: Path, content: Any) -> None:
    """What JSON can say stands in shardckpt.json, and is found there though the pickle beside it is gone."""
    dc.save({"a": 1}, tmp_path / "c", content_metadata=content)
    assert dc.load_common_state_dict(tmp_path / "c")["content_metadata"] == content
    (tmp_path / "c" / "common.pt").unlink()
    assert dc.load_content_metadata(tmp_path / "c") == content


@table("content", [{"sizes": (1, 2)}, {3: "three"}, {"nan": float("nan")}, {"inf": float("inf")}], ids=str)
def test_content_metadata_that_json_would_change_is_pickled(tmp_path: Path, content: Any) -> None:
    """A tuple comes back as a tuple, an integer key as an integer: such values are read from the common state."""
    dc.save({"a": 1}, tmp_path / "c", content_metadata=content)
    assert repr(dc.load_content_metadata(tmp_path / "c")) == repr(content)


def test_a_record_has_no_content_that_its_reader_refuses() -> None:
    """What is nested more deeply than a record can be written or read, or has infinity, does not stand in it."""
    content: Any = []
    for levels in range(2, 501):
        content = [content]
        if (found := as_json(content)) is not None:
            record = RECORD.model_copy(update={"content_metadata": found})
            assert Record.parse(record.dump()).content_metadata == content, levels
    assert as_json([[[]]]) == [[[]]]
    assert as_json(content) is None
    assert as_json({"a": float("inf")}) is as_json({1: "a", "1": "b"}) is None


@pytest.mark.parametrize(
    "names",
    [
        ("config.json", "tokenizer.json"),  # a model's settings alone
        ("config.json", "generation_config.json", "onnx"),  # its weights in a folder
        ("config.json", "generation_config.json", "weights.v1"),
        ("config.json", "generation_config.json", "pytorch_model.bin.index.json"),
        ("config.json", "generation_config.json", "model.gguf"),
        ("trainer_state.json", "checkpoint-100", "training_args.bin"),  # a run
        ("trainer_state.json", "all_results.json"),  # Trainer.save_state()
        ("trainer_state.json", "training_args.bin", "optimizer_0", "pytorch_model_fsdp_0"),
        ("trainer_state.json", "training_args.bin", "global_step100", "latest"),
        ("random_states_0.pkl", "optimizer_0", "pytorch_model_fsdp_0"),
        ("optimizer.pt", "scheduler.pt"),
        ("trainer_state.json", "training_args.bin", "custom_checkpoint.pt"),  # of a name that the user chose
    ],
)
def test_weights_elsewhere_are_not_lost(names: tuple[str, ...]) -> None:
    """A folder has lost its weights only if it has what is saved with them, and no weights, nor a folder of any."""
    assert not lacks_weights(names)
    assert lacks_weights(["LICENSE", "config.json", "training_args.bin"])
    assert lacks_weights(["optimizer.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"])  # of accelerate
