"""Nothing that stands in a checkpoint runs, leaves its directory or takes memory before it is checked."""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.dist_checkpointing import ShardedObject
from shardckpt.errors import UnsafePickleError
from tests.faults import samples
from tests.faults.hostile import DATA_FILE, MARK, OBJECT_KEY, Foreign, archive, build_on, call, named
from tests.faults.programs import run_in_new_interpreter
from tests.tables import table

UNSAFE, CORRUPT, STORAGE = "UnsafePickleError", "CorruptCheckpointError", "StorageError"
COMMAND = f"touch {MARK}"
Make = Callable[[Foreign], Any]


class Case(NamedTuple):
    """A hostile checkpoint, the errors that may refuse it, and what they must name."""

    name: str
    make: Make
    kinds: tuple[str, ...]
    texts: tuple[str, ...] = ()


# ---- pickles

CALLS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "posix.system": ("posix", "system", (COMMAND,)),
    "os.system": ("os", "system", (COMMAND,)),
    "nt.system": ("nt", "system", (COMMAND,)),
    "os.popen": ("os", "popen", (COMMAND,)),
    "os.execv": ("os", "execv", ("/bin/touch", ["touch", MARK])),
    "builtins.exec": ("builtins", "exec", (f"open({MARK!r}, 'w')",)),
    "builtins.eval": ("builtins", "eval", (f"open({MARK!r}, 'w')",)),
    "builtins.execfile": ("__builtin__", "execfile", (MARK,)),
    "builtins.compile": ("builtins", "compile", ("1", "x", "eval")),
    "builtins.__import__": ("builtins", "__import__", ("os",)),
    "builtins.open": ("builtins", "open", (MARK, "w")),
    "builtins.breakpoint": ("builtins", "breakpoint", ()),
    "builtins.type": ("builtins", "type", ("X", (), {})),
    "builtins.map": ("builtins", "map", ()),
    "subprocess.Popen": ("subprocess", "Popen", (["touch", MARK],)),
    "subprocess.check_output": ("subprocess", "check_output", (["touch", MARK],)),
    "runpy.run_path": ("runpy", "run_path", (MARK,)),
    "runpy._run_code": ("runpy", "_run_code", ("1", {})),
    "importlib.import_module": ("importlib", "import_module", ("os",)),
    "functools.partial": ("functools", "partial", (print,)),
    "functools.reduce": ("functools", "reduce", ()),
    "operator.attrgetter": ("operator", "attrgetter", ("system",)),
    "operator.methodcaller": ("operator", "methodcaller", ("system", COMMAND)),
    "_operator.attrgetter": ("_operator", "attrgetter", ("system",)),
    "pickle.loads": ("pickle", "loads", (b".",)),
    "_pickle.loads": ("_pickle", "loads", (b".",)),
    "marshal.loads": ("marshal", "loads", (b".",)),
    "types.FunctionType": ("types", "FunctionType", ()),
    "types.CodeType": ("types", "CodeType", ()),
    "shutil.rmtree": ("shutil", "rmtree", (MARK,)),
    "os.remove": ("os", "remove", (MARK,)),
    "pathlib.Path.touch": ("pathlib", "Path.touch", ()),
    "socket.create_connection": ("socket", "create_connection", (("127.0.0.1", 9),)),
    "ctypes.CDLL": ("ctypes", "CDLL", (None,)),
    "code.InteractiveInterpreter": ("code", "InteractiveInterpreter", ()),
    "pydoc.locate": ("pydoc", "locate", ("os.system",)),
    "torch.load": ("torch", "load", (MARK,)),
    "torch.serialization.load": ("torch.serialization", "load", (MARK,)),
    "torch.jit.load": ("torch.jit", "load", (MARK,)),
    "torch.hub.load": ("torch.hub", "load", (MARK,)),
    "torch.ops": ("torch", "ops", ()),
    "torch.nn.Module": ("torch.nn", "Module", ()),
    "torch._utils._rebuild_device_tensor_from_numpy": ("torch._utils", "_rebuild_device_tensor_from_numpy", ()),
    "torch.storage._load_from_file": ("torch.storage", "_load_from_file", ()),
    "numpy.load": ("numpy", "load", (MARK,)),
    "numpy.testing._private.utils.runstring": ("numpy.testing._private.utils", "runstring", (COMMAND, {})),
    "numpy.dtypes.sys.DType": ("numpy.dtypes", "sys.DType", ()),
    "shardckpt.dist_checkpointing.save": ("shardckpt.dist_checkpointing", "save", ({}, MARK)),
    "collections.OrderedDict.fromkeys": ("collections", "OrderedDict.fromkeys", ()),
    "torch.Tensor.backward": ("torch", "Tensor.backward", ()),
    # torch imports these when their attribute is asked for
    **{f"torch.{name}": ("torch", name, ()) for name in ("_dynamo", "_inductor", "onnx")},
}


#: A chain of getattr from an allowed class to its module's globals.
GETATTR_CHAIN = (
    b"\x80\x02"
    + named("builtins", "getattr")
    + b"("
    + named("builtins", "getattr")
    + b"("
    + named("collections", "OrderedDict")
    + b"X\x08\x00\x00\x00__init__tR"
    + b"X\x0b\x00\x00\x00__globals__tR."
)


#: An extension code, which copyreg would resolve, and a name that is computed on the stack.
EXTENSION_CODE = b"\x80\x02\x82\x01)R."
STACKED_NAME = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + bytes([len(COMMAND)]) + COMMAND.encode() + b"\x85R."
OLD_INSTANCE = b"(S'" + COMMAND.encode() + b"'\niposix\nsystem\n."
OLD_OBJECT = b"(cposix\nsystem\nS'" + COMMAND.encode() + b"'\no."
NEW_OBJECT = b"\x80\x02cposix\nsystem\n(S'" + COMMAND.encode() + b"'\nt\x81."


def reduced(function: bytes, args: bytes, state: bytes | None = None) -> bytes:
    """The part of a pickle that calls a function, and gives the result a state."""
    return function + args + b"R" + (b"" if state is None else state + b"b")


def plain(value: Any) -> bytes:
    """The part of a pickle that is a plain value."""
    return pickle.dumps(value, 2)[2:-1]


def dtype(name: str, state: bytes) -> bytes:
    """The part of a pickle that is a dtype."""
    return reduced(named("numpy", "dtype"), plain((name, False, True)), state)


def array(of: bytes, content: bytes, shape: tuple[int, ...] = (1,)) -> bytes:
    """The pickle of a numpy array of any dtype."""
    made = b"(" + named("numpy", "ndarray") + plain((0,)) + plain("b") + b"t"
    state = b"(K\x01" + plain(shape) + of + b"\x89" + b"U" + bytes([len(content)]) + content + b"t"
    return b"\x80\x02" + reduced(named("numpy.core.multiarray", "_reconstruct"), made, state) + b"."


POINTER = (0x4141414141414140).to_bytes(8, "little")[:-1] + b"\0"  # Python 2's short strings are ASCII
PLAIN_STATE = (3, "<", None, None, None, -1, -1, 0)
OBJECTS = dtype("O8", plain((3, "|", None, None, None, -1, -1, 0)))
FIELD = b"(K\x03" + plain("|") + b"N" + plain(("a",)) + b"}" + plain("a") + b"%s" + b"K\x00\x86sK\x08K\x01K\x00t"
OBJECT_FIELD = dtype("V8", FIELD % OBJECTS)
LONG_FIELD = dtype("V8", FIELD % dtype("S400", plain((3, "|", None, None, None, 400, 1, 0))))
_F8 = dtype("f8", plain(PLAIN_STATE))


#: A pickle, the errors that may refuse it, and what they must name.
Hostile = tuple[bytes, tuple[str, ...], tuple[str, ...]]


def unsafe(pickled: bytes, *texts: str) -> Hostile:
    """A pickle that asks for what is not allowed."""
    return pickled, (UNSAFE,), texts


def corrupt(pickled: bytes, *texts: str) -> Hostile:
    """A pickle that cannot be right."""
    return pickled, (CORRUPT,), texts


def opcodes(*parts: bytes) -> bytes:
    """A pickle of parts."""
    return b"\x80\x02" + b"".join(parts) + b"."


RECONSTRUCT, NDARRAY = named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray")


#: Arrays whose memory is not what they say.
NUMPY_LIES: dict[str, Hostile] = {
    "an array over pointers": unsafe(call("numpy", "ndarray", (1,), "O", POINTER), "numpy.ndarray"),
    "objects that are bytes": corrupt(array(OBJECTS, POINTER), "numpy array"),
    "a field of objects that are bytes": corrupt(array(OBJECT_FIELD, POINTER), "numpy array"),
    "a field behind its record": corrupt(array(LONG_FIELD, bytes(8)), "numpy dtype"),
    "more elements than bytes": corrupt(array(_F8, bytes(8), (1000,)), "numpy array"),
    "a negative size": corrupt(array(_F8, bytes(8), (-1,)), "numpy array"),
    "an array without state": corrupt(
        opcodes(reduced(RECONSTRUCT, b"(" + NDARRAY + plain((10**11,)) + plain("b") + b"t")), "without its state"
    ),
    "a scalar of objects": corrupt(
        opcodes(reduced(named("numpy.core.multiarray", "scalar"), OBJECTS + plain("x" * 8) + b"\x86")), "numpy scalar"
    ),
    "a state for a finished dtype": unsafe(opcodes(_F8, plain(PLAIN_STATE), b"b"), "dtype"),
}

RANGE = reduced(named("builtins", "range"), plain((30_000_000,)))
COPIES = (named("builtins", "list") + b"h\x01\x85R") * 5_000


#: Pickles of a few bytes, or that copy themselves, that would fill the memory.
MEMORY: dict[str, Hostile] = {
    **{
        f"a {kind} of a range": corrupt(opcodes(named(*kind.rsplit(".", 1)), RANGE, b"\x85R"), "range")
        for kind in ("builtins.list", "builtins.tuple", "builtins.set", "builtins.frozenset", "collections.deque")
    },
    "a list made of a range without a call": corrupt(opcodes(named("builtins", "tuple"), RANGE, b"\x85\x81"), "range"),
    "arguments that are a range": corrupt(opcodes(named("builtins", "list"), RANGE, b"R"), "range"),
    "a list copied again and again": corrupt(opcodes(plain([0] * 10_000), b"q\x010](", COPIES, b"e"), "copies itself"),
    "the text of a nest": corrupt(opcodes(named("builtins", "str"), plain([1]), b"\x85R"), "str of a list"),
    "torch.Tensor(10**9)": unsafe(call("torch", "Tensor", 10**9), "torch.Tensor"),
    "a bytearray that is not there": corrupt(b"\x80\x05\x96" + (1 << 30).to_bytes(8, "little") + b"a."),
}

HUGE = (1 << 60).to_bytes(8, "little")

PICKLES: dict[str, Hostile] = {
    **{name: unsafe(call(*what), name) for name, what in CALLS.items()},
    "a chain of getattr": unsafe(GETATTR_CHAIN, "attr"),
    "an extension code": corrupt(EXTENSION_CODE, "extension code"),
    "a name from the stack": unsafe(STACKED_NAME, "posix.system"),
    "an INST opcode": unsafe(OLD_INSTANCE, "posix.system"),
    "an OBJ opcode": unsafe(OLD_OBJECT, "posix.system"),
    "a NEWOBJ opcode": unsafe(NEW_OBJECT, "posix.system"),
    **NUMPY_LIES,
    **MEMORY,
    "an empty file": corrupt(b""),
    "no pickle": corrupt(b"\xff" * 100),
    "a cut pickle": corrupt(pickle.dumps({"a": list(range(1000))})[:-7]),
    "an unknown protocol": corrupt(b"\x80\x63N."),
    "a huge string": corrupt(b"\x80\x04\x8d" + HUGE + b"a."),
    "huge bytes": corrupt(b"\x80\x04\x8e" + HUGE + b"a."),
    "a huge bytearray": corrupt(b"\x80\x05\x96" + HUGE + b"a."),
}


#: Globals that pickles may name, and that they try to change.
BUILDS = {
    "torch.Size": ("torch", "Size"),
    "collections.OrderedDict": ("collections", "OrderedDict"),
    "pathlib.PosixPath": ("pathlib", "PosixPath"),
}

OBJECT_BUILDS = {
    "torch.Tensor": ("torch", "Tensor"),
    "torch.nn.Parameter": ("torch.nn.parameter", "Parameter"),
    "torch._utils._rebuild_tensor_v2": ("torch._utils", "_rebuild_tensor_v2"),
    "argparse.Namespace": ("argparse", "Namespace"),
    "types.SimpleNamespace": ("types", "SimpleNamespace"),
    "collections.Counter": ("collections", "Counter"),
    "collections.defaultdict": ("collections", "defaultdict"),
    "_codecs.encode": ("_codecs", "encode"),
    "builtins.getattr": ("builtins", "getattr"),
    "builtins.dict": ("builtins", "dict"),
    "torch.FloatStorage": ("torch", "FloatStorage"),
    "torch.float32": ("torch", "float32"),
    "a class of Megatron": ("megatron.core.transformer", "Config"),
    "numpy.ndarray": ("numpy", "ndarray"),
    "numpy.dtype": ("numpy", "dtype"),
}

METADATA_BUILDS = {
    "Metadata": ("torch.distributed.checkpoint.metadata", "Metadata"),
    "TensorProperties": ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    "torch.serialization._get_layout": ("torch.serialization", "_get_layout"),
}


def builds(table: dict[str, tuple[str, str]]) -> dict[str, Hostile]:
    """The pickles that try to set an attribute on each, in both ways that there are."""
    return {
        f"an attribute on {name}{' by slots' if slots else ''}": (build_on(*what, slots=slots), (UNSAFE, CORRUPT), ())
        for name, what in table.items()
        for slots in (False, True)
    }


def pickled_cases() -> list[Case]:
    """Every hostile pickle, as each of the files that are pickles."""
    cases = []
    for name, (pickled, kinds, texts) in {**PICKLES, **builds(BUILDS), **builds(METADATA_BUILDS)}.items():
        if name in {**NUMPY_LIES, **MEMORY}:
            kinds, texts = (UNSAFE, CORRUPT), ()  # noqa: PLW2901 - this reader knows none of these globals
        cases.append(
            Case(f".metadata: {name}", lambda f, p=pickled: f.put(".metadata", p), kinds, (".metadata", *texts))
        )
    for name, (pickled, kinds, texts) in {**PICKLES, **builds(BUILDS), **builds(OBJECT_BUILDS)}.items():
        content = archive(pickled)
        cases.append(
            Case(f"common.pt: {name}", lambda f, c=content: f.put("common.pt", c), kinds, ("common.pt", *texts))
        )
        cases.append(Case(f"object: {name}", lambda f, c=content: f.put_object(c), kinds, (OBJECT_KEY, *texts)))
    return cases


# ---- archives


def torchscript() -> bytes:
    """A real TorchScript archive, which torch.load would hand to the compiler."""
    file = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), file)
    return file.getvalue()


def legacy_torch_save() -> bytes:
    """What torch.save wrote before 1.6: pickles one after the other."""
    file = BytesIO()
    torch.save({"x": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def oversized_member() -> bytes:
    """An archive whose directory claims more bytes for a member than there are."""
    whole = bytearray(archive(pickle.dumps({"x": 1}, 2)))
    entry = whole.index(b"PK\x01\x02")
    whole[entry + 20 : entry + 28] = (0x7FFFFFF0).to_bytes(4, "little") * 2
    return bytes(whole)


def overlapping_members(count: int, size: int) -> bytes:
    """An archive whose members all claim the same bytes, and an object that asks for every one of them."""
    names = [f"archive/data/{number}".encode() for number in range(count)]
    tensors = b"".join(_tensor(str(number), size, (size,), (1,)) + b"a" for number in range(count))
    members = {b"archive/data.pkl": b"\x80\x02]" + tensors + b"."}
    body, central = b"", b""
    for name, content in members.items():
        central += _central(name, len(content), len(body))
        body += _local(name, len(content)) + content
    for name in names:
        central += _central(name, size, len(body))
        body += _local(name, size)
    body += bytes(size)
    end = b"PK\x05\x06" + bytes(4) + (count + 1).to_bytes(2, "little") * 2
    return body + central + end + len(central).to_bytes(4, "little") + len(body).to_bytes(4, "little") + bytes(2)


def _local(name: bytes, size: int) -> bytes:
    sizes = size.to_bytes(4, "little") * 2
    return b"PK\x03\x04" + b"\x14" + bytes(13) + sizes + len(name).to_bytes(2, "little") + bytes(2) + name


def _central(name: bytes, size: int, offset: int) -> bytes:
    sizes = size.to_bytes(4, "little") * 2
    lengths = len(name).to_bytes(2, "little") + bytes(12)
    return b"PK\x01\x02" + b"\x14\x00\x14" + bytes(13) + sizes + lengths + offset.to_bytes(4, "little") + name


def _tensor(key: str, numel: int, shape: tuple[int, ...], stride: tuple[int, ...], first: int = 0) -> bytes:
    """The part of a pickle that rebuilds a tensor of bytes."""
    text = f"X{chr(len(key))}\0\0\0{key}".encode()
    storage = b"(X\x07\x00\x00\x00storage" + named("torch", "ByteStorage") + text + b"X\x03\x00\x00\x00cpu"
    place = b"".join(pickle.dumps(part, 2)[2:-1] for part in (first, shape, stride))
    return (
        named("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage
        + pickle.dumps(numel, 2)[2:-1]
        + b"tQ"
        + place
        + b"\x89"
        + named("collections", "OrderedDict")
        + b")RtR"
    )


def tensor_archive(numel: int, shape: tuple[int, ...], stride: tuple[int, ...], first: int = 0) -> bytes:
    """An archive of one tensor over a storage of 16 bytes."""
    return archive(b"\x80\x02" + _tensor("0", numel, shape, stride, first) + b".", {"0": bytes(16)})


ARCHIVES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "a TorchScript archive": (torchscript(), (UNSAFE, "CannotLoadError")),
    "torch.save of old": (legacy_torch_save(), (CORRUPT,)),
    "a compressed zip": (archive(pickle.dumps({"x": 1}), compression=zipfile.ZIP_DEFLATED), ("CannotLoadError",)),
    "a zip without pickle": (archive(b"N.").replace(b"data.pkl", b"data.pk_"), (CORRUPT,)),
    "the other byte order": (archive(b"N.").replace(sys.byteorder.encode(), b"middle"), (CORRUPT,)),
    "an oversized member": (oversized_member(), (CORRUPT,)),
    "overlapping members": (overlapping_members(2000, 2 << 20), (CORRUPT,)),
    "a storage that is not there": (archive(b"\x80\x02" + _tensor("9", 16, (16,), (1,)) + b"."), (CORRUPT,)),
    "a storage larger than the file": (tensor_archive(1 << 60, (16,), (1,)), (CORRUPT,)),
    "a tensor larger than its storage": (tensor_archive(16, (1 << 40,), (1,)), (CORRUPT,)),
    "a tensor of 2**62 elements": (tensor_archive(16, (1 << 62,), (1,)), (CORRUPT,)),
    "a negative stride": (tensor_archive(16, (16,), (-1,), 15), (CORRUPT,)),
    "a negative offset": (tensor_archive(16, (16,), (1,), -8), (CORRUPT,)),
    "a persistent id of another kind": (archive(b"\x80\x02X\x04\x00\x00\x00evilQ."), (CORRUPT,)),
}


def archive_cases() -> list[Case]:
    """Every malformed archive, as common state and as object."""
    cases = []
    for name, (content, kinds) in ARCHIVES.items():
        cases.append(Case(f"common.pt: {name}", lambda f, c=content: f.put("common.pt", c), kinds, ("common.pt",)))
        cases.append(Case(f"object: {name}", lambda f, c=content: f.put_object(c), kinds, (OBJECT_KEY,)))
    return cases


# ---- metadata that lies


def edit(change: Callable[[Any], Any]) -> Make:
    """Change ``.metadata`` as DCP's classes show it."""
    return lambda foreign: foreign.edit_metadata(change)


def places(**fields: Any) -> Callable[[Any], Any]:
    """Say something else of where every item is."""

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            merged = {"relative_path": info.relative_path, "offset": info.offset, "length": info.length, **fields}
            metadata.storage_data[index] = type(info)(**merged)

    return change


def tensor_fields(**fields: Any) -> Callable[[Any], Any]:
    """Say something else of the tensor ``split``."""

    def change(metadata: Any) -> None:
        for name, value in fields.items():
            setattr(metadata.state_dict_metadata["split"], name, value)

    return change


def whole_of(size: int) -> Callable[[Any], Any]:
    """Say that ``split`` is one chunk of that many elements."""

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["split"]
        chunk = entry.chunks[0]
        chunk.offsets, chunk.sizes = torch.Size((0,)), torch.Size((size,))
        entry.size = torch.Size((size,))
        for index in [index for index in metadata.storage_data if index.fqn == "split"]:
            info = metadata.storage_data.pop(index)
            metadata.storage_data[type(index)("split", torch.Size((0,)))] = info

    return change


def no_fragments(metadata: Any) -> None:
    """Say that ``split`` is a slice of a grid of no cells."""
    entry = metadata.state_dict_metadata["split"]
    metadata.mcore_data = {"split": {"nd_reformulated_orig_global_shape": (entry.size[0],)}}
    entry.size, sizes = torch.Size((0, entry.size[0])), entry.chunks[0].sizes
    entry.chunks = entry.chunks[:1]
    entry.chunks[0].offsets, entry.chunks[0].sizes = torch.Size((0, 0)), torch.Size((0, *sizes[:1]))
    for index in [index for index in metadata.storage_data if index.fqn == "split"]:
        info = metadata.storage_data.pop(index)
        metadata.storage_data[type(index)("split", torch.Size((0, 0)))] = info


def aliased(metadata: Any) -> None:
    """Say that 512 chunks of ``split`` are the same bytes."""
    entry = metadata.state_dict_metadata["split"]
    sizes, places = entry.chunks[0].sizes, metadata.storage_data
    indices = [index for index in places if index.fqn == "split"]
    info, index = places[indices[0]], indices[0]
    for old in indices:
        del places[old]
    step, rest = sizes[0], tuple(sizes[1:])
    entry.size = torch.Size((512 * step, *rest))
    starts = [torch.Size((number * step, *(0 for _ in rest))) for number in range(512)]
    entry.chunks = [type(entry.chunks[0])(start, sizes) for start in starts]
    places.update({type(index)("split", start): info for start in starts})


PATHS = (
    "../outside.distcp",
    "/etc/hostname",
    "a/../../outside.distcp",
    "",
    ".",
    "..",
    "a\0b",
    "x" * 5000,
    "C:\\x",
    "\u202egpj",
)


#: Sizes that the files do not have.
BOMBS: dict[str, Make] = {
    "a shape of 2**62": edit(whole_of(1 << 62)),
    "a shape of 2**40": edit(whole_of(1 << 40)),
    "a global shape of 2**40": edit(tensor_fields(size=torch.Size((1 << 40, 8)))),
    "chunks that are the same bytes": edit(aliased),
    "a shape of 2**34 and as many bytes": lambda f: (edit(whole_of(1 << 34))(f), edit(places(length=1 << 40))(f)),
}


def link_to_the_system(foreign: Foreign) -> None:
    """Name a link that leads out of the directory."""
    (foreign.directory / "up").symlink_to("/etc/hostname")
    foreign.edit_metadata(places(relative_path="up"))


def key_that_is_no_text(metadata: Any) -> None:
    """Name a tensor by a number."""
    metadata.state_dict_metadata[5] = metadata.state_dict_metadata.pop("split")


def dtype_that_is_none(metadata: Any) -> None:
    """Put another object where the dtype of ``split`` is."""
    metadata.state_dict_metadata["split"].properties.dtype = torch.Size((1,))


def attribute(name: str, value: Any) -> Make:
    """Say something else of the checkpoint as a whole."""
    return edit(lambda metadata: setattr(metadata, name, value))


LIES: dict[str, tuple[Make, tuple[str, ...], tuple[str, ...]]] = {
    **{f"path {path[:20]!r}": (edit(places(relative_path=path)), (CORRUPT,), ("not allowed",)) for path in PATHS},
    "a path that is no text": (edit(places(relative_path=5)), (CORRUPT,), ()),
    "a link to the system": (link_to_the_system, (STORAGE, CORRUPT), ("up",)),
    "a negative offset": (edit(places(offset=-10)), (CORRUPT,), (DATA_FILE,)),
    "an offset behind the file": (edit(places(offset=1 << 40)), (CORRUPT,), (DATA_FILE,)),
    "a negative length": (edit(places(length=-1)), (CORRUPT,), (DATA_FILE,)),
    "a length of 2**50": (edit(places(length=1 << 50)), (CORRUPT,), (DATA_FILE,)),
    **{name: (make, (CORRUPT, "ShapeMismatchError"), ("split",)) for name, make in BOMBS.items()},
    "a dtype that is none": (edit(dtype_that_is_none), (CORRUPT,), (".metadata",)),
    "axes that differ": (edit(tensor_fields(size=torch.Size((96,)))), (CORRUPT,), ("split",)),
    "chunks that are none": (edit(tensor_fields(chunks=5)), (CORRUPT,), (".metadata",)),
    "a key that is no text": (edit(key_that_is_no_text), (CORRUPT,), (".metadata",)),
    "no table of tensors": (attribute("state_dict_metadata", 7), (CORRUPT,), (".metadata",)),
    "no table of places": (attribute("storage_data", [1]), (CORRUPT,), (".metadata",)),
    "no elements, by a division": (edit(no_fragments), (CORRUPT,), (".metadata",)),
    "places for nothing": (attribute("storage_data", {}), (CORRUPT,), ()),
    "another object": (lambda foreign: foreign.put(".metadata", pickle.dumps([1, 2])), (CORRUPT,), (".metadata",)),
}

METADATA_CASES = [Case(f"metadata: {name}", *lie) for name, lie in LIES.items()]


# ---- files that are no files


def replaced(name: str, make: Callable[[Path], Any]) -> Make:
    """Put something else in the place of a file."""

    def change(foreign: Foreign) -> None:
        path = foreign.directory / name
        path.rename(foreign.directory.parent / f"{foreign.directory.name}-{name.strip('.')}")
        make(path)

    return change


def as_link(path: Path) -> None:
    """A symbolic link to the file, which is outside now."""
    path.symlink_to(path.parent.parent / f"{path.parent.name}-{path.name.strip('.')}")


FILES = ("metadata.json", ".metadata", "common.pt", DATA_FILE)

FILE_CASES = [
    Case(f"{name} as {what}", replaced(name, make), kinds, (name,))
    for name in FILES
    for what, make, kinds in (
        ("a link", as_link, (STORAGE, CORRUPT)),
        ("a pipe", os.mkfifo, (CORRUPT, STORAGE)),
        ("a directory", Path.mkdir, (CORRUPT, STORAGE, "IsADirectoryError")[:2]),
        ("a device", lambda path: path.symlink_to("/dev/zero"), (STORAGE, CORRUPT)),
    )
]

JSONS = {
    "deep": b"[" * 100_000,
    "a huge number": b'{"sharded_backend": "torch_dist", "sharded_backend_version": ' + b"9" * 10_000 + b"}",
    "not a number": b'{"sharded_backend": "torch_dist", "sharded_backend_version": NaN}',
    "another type": b'{"sharded_backend": ["torch_dist"]}',
    "a list": b"[]",
    "no text": b"\xff\xfe\x00\x01",
    "a lone surrogate": b'{"sharded_backend": "\\ud800"}',
    "too large": b" " * ((1 << 20) + 1),
}

JSON_CASES = [
    Case(f"metadata.json: {name}", lambda f, c=content: f.put("metadata.json", c), (CORRUPT, "UnknownBackendError"))
    for name, content in JSONS.items()
]

_PICKLED = pickled_cases()
CASES = [*_PICKLED, *archive_cases(), *METADATA_CASES, *FILE_CASES, *JSON_CASES]


#: In the default run: a third of the pickles, each place that has pickles among them, and all that is no pickle.
_QUICK = {case.name for case in [*_PICKLED[::3], *CASES[len(_PICKLED) :]]}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process of its own reports of every case that is run, by the case's name; ``grown`` is its memory."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = {case.name for item in items if item.module is request.module and (case := _case_of(item))}
    cases = [case for case in CASES if case.name in names or case in METADATA_CASES]
    root = tmp_path_factory.mktemp("hostile")
    base = root / "base"
    dist_checkpointing.save(samples.state_dict(1), base)
    (root / "outside.distcp").write_bytes((base / DATA_FILE).read_bytes())
    directories = {case.name: root / str(number) for number, case in enumerate(cases)}
    for case in cases:
        case.make(Foreign(base, directories[case.name]))
    work = root / "work"
    work.mkdir()
    asked = json.dumps([str(base), *map(str, directories.values())])
    done = run_in_new_interpreter("hostile", text=asked, cwd=work)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    honest = report["reports"][str(base)]
    assert (honest["kind"], honest["values"], honest["events"], honest["plain"]) == ("", [], [], "")
    found = {case.name: report["reports"][str(directories[case.name])] for case in cases}
    return {**found, "grown": report["grown"], "made": [path.name for path in work.iterdir()]}


def _case_of(item: pytest.Function) -> Case | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("case") if callspec else None


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in _QUICK else pytest.mark.proof) for c in CASES],
)
def test_refused(found: dict[str, Any], case: Case) -> None:
    """The load is refused by an error of the family that names the culprit; nothing ran and nothing was changed."""
    report = found[case.name]
    assert report["kind"] in case.kinds, report
    assert report["family"]
    for text in case.texts:
        assert text in report["message"]
    assert report["events"] == []
    assert report["polluted"] == []


@table("name", BOMBS)
def test_claimed_sizes(found: dict[str, Any], name: str) -> None:
    """A size that only the metadata has is refused where nothing but the checkpoint says what to allocate."""
    assert found[f"metadata: {name}"]["plain"].startswith("CorruptCheckpointError: ")
    assert "split" in found[f"metadata: {name}"]["plain"]


def test_nothing_was_made(found: dict[str, Any]) -> None:
    """No hostile pickle has made the file that every one of them tries to make."""
    assert found["made"] == []


def test_memory_stays(found: dict[str, Any]) -> None:
    """No claimed size is taken from memory before it is checked: all cases together grow by little."""
    assert found["grown"] < 300


class Evil:
    """Pickles as a call of os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (COMMAND,)


@table("place", ["common", "object"])
def test_hostile_object_with_right_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """What was saved so, with digests that are right, is refused as well, by the name of the global."""
    monkeypatch.chdir(tmp_path)
    state: dict[str, Any] = {"x": Evil() if place == "common" else ShardedObject("x", Evil(), (1,), (0,))}
    dist_checkpointing.save(state, tmp_path / "ckpt", allow_globals=[os.system])
    (tmp_path / MARK).unlink()  # the leave to save it let it run, once
    with pytest.raises(UnsafePickleError, match=r"posix\.system"):
        dist_checkpointing.load({"x": state["x"]} if place == "object" else {}, tmp_path / "ckpt")
    assert not (tmp_path / MARK).exists()
