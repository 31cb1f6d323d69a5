from __future__ import annotations

import ast
import json
import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardckpt_safetensors.objects
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt_safetensors.objects import decode_object, decode_tree_file, encode_object
from tests.safetensors.objects.hostile import WHAT
from tests.safetensors.objects.payload import STATES
from tests.tables import table


def make_file(tree: Any, entries: dict[str, Any], data: bytes = b"", metadata: Any = None) -> bytes:
    """A safetensors file with any header."""
    metadata = {"tree": tree if isinstance(tree, str) else json.dumps(tree)} if metadata is None else metadata
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    return len(header).to_bytes(8, "little") + header + data


def entry(shape: list[Any], end: int, kind: str = "U8", start: int = 0) -> dict[str, Any]:
    """A tensor's entry in a header."""
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


def refer(kind: str, **fields: Any) -> dict[str, Any]:
    """A reference to the first tensor of a file, with fields."""
    return {"$": kind, "v": {"name": "0", **fields}}


def refer_to(tensor: dict[str, Any], data: bytes, kind: str, **fields: Any) -> bytes:
    """A file with one tensor and a reference to it."""
    return make_file(refer(kind, **fields), {"0": tensor}, data)


#: Texts that are no tree.
TREES = [
    "",
    "{",
    "nul",
    "NaN",
    "Infinity",
    "1e999",
    "-1e999",
    "1" * 5000,
    "18446744073709551616",
    "-9223372036854775809",
    "\ufeff1",
    '{"a":1,"a":2}',
    '{"a":{"b":1,"b":1}}',
    '"\\ud800"',
    '{"\\ud800":1}',
    "[" * 501 + "]" * 501,
    "[" * 100_000,
    '{"a":' * 501 + "1" + "}" * 501,
    '{"$a":1}',
    '{"$":"tuple"}',
    '{"$":"tuple","v":[],"w":1}',
    '{"$":1,"v":1}',
    '{"v":1,"$x":2}',
    '{"$":"nothing","v":1}',
    '{"$":["tuple"],"v":1}',
    '{"$":{"$":"str","v":[]},"v":1}',
]


#: For each `$`, values that are none.
VALUES: dict[str, list[Any]] = {
    "str": ["a", [-1], [0x110000], [1.0], [True], {"a": 1}],
    "int": [1, "1", "0x", "0X1", "0x01", "0x_1", "0x1\n", "--0x1", "0xg", None],
    "float": [1.5, "NaN", "infinity", "7ff0000000000000", "3ff0000000000000", "7ff8", [], {}],
    "complex": [[1.0], [1, 2], [1.0, None], [1.0, 2.0, 3.0], ["nan", 1.0], 1.0, [{"$": "int", "v": "0x1"}, 1.0]],
    "range": [[0, 1], [0, 1, 0], [0, 1.0, 1], [0, 1, True], 3],
    "bytes": [
        "a",
        "a===",
        "YQ==\n",
        "é",
        1,
        [97],
        {"$": "tensor", "v": "0"},
        {"$": "bytes", "v": "YQ=="},
        {"$": "tensor"},
    ],
    "bytearray": ["a", None, {"$": "tensor", "v": {"name": "0"}}],
    "tuple": [1, {"a": 1}, "ab", {"$": "tuple", "v": []}],
    "set": [[[]], [1, 1], [1, 1.0], {"a": 1}, [{"$": "set", "v": []}], [{"a": 1}]],
    "frozenset": [[{}], "a"],
    "dict": [
        [[1]],
        [[1, 2, 3]],
        [[[], 1]],
        [[1, 2], [1, 3]],
        [[1, 2], [True, 3]],
        {"a": 1},
        [{"a": 1, "b": 2}],
        ["ab"],
    ],
    "ordered_dict": [[[1]], {"items": []}, {"items": [], "attributes": []}, {"items": 1, "attributes": {}}],
    "counter": [[[[], 1]], {"a": 1}],
    "defaultdict": [["os.system", []], [["list"], []], [None], [None, {}], ["eval", [["a", 1]]]],
    "deque": [[1, [1, 2]], [-1, []], [True, []], [1 << 63, []], [None], [1.0, []], [None, "ab"]],
    "namespace": [[], {"$": "dict", "v": [[1, 2]]}, 1, {"$": "tuple", "v": []}],
    "simple_namespace": [[["a", 1]], None],
    "size": [[1.0], ["a"], [1 << 63], [True], 1, [[1]]],
    "dtype": ["nothing", "float32x", "float", "save", "", "__class__", "nn.Module", 1, ["float32"]],
    "device": ["", "nothing", "cuda:x", "cpu:cpu", 1, [], "\0"],
    "scalar": [
        ["<f4", "AAA="],
        ["O", ""],
        ["<f4"],
        [">V4", "AAAAAA=="],
        ["<U1", "AAAAAA=="],
        [1, ""],
        ["<f4", 1],
        ["i4,i4", ""],
        ["<f4 ", "AAAAAA=="],
    ],
    "tensor": ["0", 1, None, [], {}],
    "array": ["0"],
    "parameter": ["0"],
}


@table("text", TREES, ids=range(len(TREES)))
def test_malformed_trees_are_damage(text: str) -> None:
    """A text that is not exactly a tree is damage that names the object, by both codecs that hold trees."""
    with pytest.raises(CorruptCheckpointError, match=f"^{WHAT} is damaged: "):
        decode_object("json", text.encode("utf-8", "surrogatepass"), WHAT)
    with pytest.raises(CorruptCheckpointError, match=f"^{WHAT} is damaged: "):
        decode_tree_file(make_file(text, {}), WHAT)


@table("kind", VALUES)
def test_wrong_values_are_damage(kind: str) -> None:
    """What `$` names is checked by type, length and range before anything is made of it."""
    for value in VALUES[kind]:
        for tree in ({"$": kind, "v": value}, [{"a": {"$": kind, "v": value}}]):
            with pytest.raises(CheckpointingException, match=f"^{WHAT} (is damaged|cannot be loaded): ") as caught:
                decode_object("json", json.dumps(tree).encode(), WHAT)
            assert kind == "dtype" or type(caught.value) is CorruptCheckpointError


def test_every_kind_has_hostile_values() -> None:
    """The list above has each kind that the decoder knows."""
    decoder = sys.modules["shardckpt_safetensors.objects.decoder"]
    assert {*decoder.DECODERS, *decoder._BUILDERS, *decoder._IN_FILE, *decoder._BYTES} == VALUES.keys()


TENSOR = {"$": "tensor", "v": "0"}

FILES: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x05\0\0\0\0\0\0\0[]",
    "long header": (1 << 62).to_bytes(8, "little") + b"{}",
    "no object": b"\x02\0\0\0\0\0\0\0[]",
    "no metadata": b"\x02\0\0\0\0\0\0\0{}",
    "tree of another type": make_file(1, {}, metadata={"tree": 1}),
    "hole": make_file(TENSOR, {"0": entry([2], 3, start=1)}, b"abc"),
    "overlap": make_file(TENSOR, {"0": entry([2], 2), "1": entry([2], 3, start=1)}, b"abc"),
    "bytes left": make_file(TENSOR, {"0": entry([2], 2)}, b"abc"),
    "bytes missing": make_file(TENSOR, {"0": entry([4], 4)}, b"abc"),
    "negative": make_file(TENSOR, {"0": entry([-1], -1)}),
    "sizes that cancel": make_file(TENSOR, {"0": entry([-1, -3], 3)}, b"abc"),
    "true": make_file(TENSOR, {"0": entry([True], 1)}, b"a"),
    "size of another dtype": make_file(TENSOR, {"0": entry([3], 3, "F32")}, b"abc"),
    "no dtype": make_file(TENSOR, {"0": entry([3], 3, "F32X")}, b"abc"),
    "many axes": make_file(TENSOR, {"0": entry([1] * 65, 1)}, b"a"),
    "huge and empty": make_file(TENSOR, {"0": entry([0, 1 << 62, 1 << 62], 0)}),
    "more fields": make_file(TENSOR, {"0": {**entry([1], 1), "x": 1}}, b"a"),
    "two ways": make_file([TENSOR, {"$": "array", "v": "0"}], {"0": entry([1], 1)}, b"a"),
    "two dtypes": make_file([TENSOR, refer("tensor", dtype="int8", shape=[1])], {"0": entry([1], 1)}, b"a"),
    "dtype of another size": refer_to(entry([4], 4), b"abcd", "tensor", dtype="complex64", shape=[1]),
    "dtype of what has one": refer_to(entry([1], 4, "F32"), b"abcd", "tensor", dtype="int32", shape=[1]),
    "dtype that files have": refer_to(entry([4], 4), b"abcd", "tensor", dtype="float32", shape=[1]),
    "dtype of numpy that files have": refer_to(entry([4], 4), b"abcd", "array", dtype="<f4", shape=[1]),
    "dtype without shape": refer_to(entry([1], 1), b"a", "tensor", dtype="int8"),
    "quantized": refer_to(entry([1], 1), b"a", "tensor", dtype="qint8", shape=[1]),
    "gradients of integers": refer_to(entry([1], 1), b"a", "parameter", requires_grad=True),
    "gradients by number": refer_to(entry([1], 1), b"a", "tensor", requires_grad=1),
    "other field": refer_to(entry([1], 1), b"a", "tensor", device="cuda"),
    "bytes of floats": make_file({"$": "bytes", "v": TENSOR}, {"0": entry([1], 4, "F32")}, b"abcd"),
    "array of objects": refer_to(entry([8], 8), b"abcdefgh", "array", dtype="|O", shape=[1]),
    "array of structures": refer_to(entry([8], 8), b"abcdefgh", "array", dtype="i4,O", shape=[1]),
    "array of bfloat16": make_file({"$": "array", "v": "0"}, {"0": entry([1], 2, "BF16")}, b"ab"),
    "array of no characters": refer_to(entry([4], 4), b"\xff" * 4, "array", dtype="<U1", shape=[1]),
    "array of wide texts": refer_to(entry([1], 1), b"a", "array", dtype="|S999999999", shape=[0]),
    "array, huge and empty": refer_to(entry([0], 0), b"", "array", dtype=">f8", shape=[0, 1 << 62, 1 << 62]),
}


@table("name", FILES)
def test_malformed_files_are_damage(name: str) -> None:
    """A file that contradicts itself, or a reference that does not fit its tensor, is damage that names the object."""
    with pytest.raises(CorruptCheckpointError, match=f"^{WHAT} "):
        decode_object("safetensors", FILES[name], WHAT)


def _mutate(tree: Any, draw: random.Random, nodes: list[Any]) -> Any:
    """A tree with one part replaced by another part of it, or by what is often wrong."""
    if draw.random() < 0.1 or not isinstance(tree, (list, dict)) or not tree:
        return draw.choice([*nodes, None, -1, 1 << 63, 1e308, "", "a.b", [], {}, {"$": "tuple", "v": 1}, [[]]])
    if isinstance(tree, list):
        place = draw.randrange(len(tree))
        return [*tree[:place], _mutate(tree[place], draw, nodes), *tree[place + 1 :]]
    key = draw.choice(list(tree))
    if draw.random() < 0.1:
        return {draw.choice(["$", "v", "name", "$x", ""]) if k == key else k: v for k, v in tree.items()}
    return {**tree, key: _mutate(tree[key], draw, nodes)}


def _nodes(tree: Any) -> list[Any]:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tree, *(node for part in inner for node in _nodes(part))]


@pytest.mark.filterwarnings("ignore")  # torch warns of experimental dtypes that it is asked for
@pytest.mark.parametrize(
    "rounds", [150, pytest.param(1000, marks=pytest.mark.ci), pytest.param(20_000, marks=pytest.mark.proof)]
)
@pytest.mark.parametrize("name", [*STATES, "values"])
def test_mutated_payloads_are_errors_or_values(name: str, rounds: int) -> None:
    """Payloads with flipped bytes, cut, or with parts exchanged are errors of the family or values."""
    values = [
        torch.arange(2),
        torch.ones(2, dtype=torch.complex64),
        torch.nn.Parameter(torch.ones(1)),
        np.arange(2),
        np.ones(2, ">f4"),
    ]
    state = [
        *values,
        np.float32(1),
        {1, 2},
        (1,),
        {1: 2},
        b"abc",
        1j,
        torch.Size([1]),
        torch.float32,
        1 << 70,
        "\ud800",
    ]
    codec, data = encode_object(STATES.get(name, state), WHAT)
    head = 8 + int.from_bytes(data[:8], "little") if codec == "safetensors" else len(data)
    draw = random.Random(name)
    refused = 0
    for turn in range(rounds):
        mutated = bytearray(data)
        if turn % 3 == 0:
            mutated[draw.randrange(head)] = draw.randrange(256)
        elif turn % 3 == 1:
            del mutated[draw.randrange(len(data)) :][: draw.randrange(1, 9)]
        elif codec == "safetensors":
            header = json.loads(data[8:head])
            tree = json.loads(header["__metadata__"]["tree"])
            if draw.random() < 0.7:
                header["__metadata__"]["tree"] = json.dumps(_mutate(tree, draw, _nodes(tree)))
            else:
                header = _mutate(header, draw, _nodes(header))
            text = json.dumps(header).encode()
            mutated = bytearray(len(text).to_bytes(8, "little") + text + data[head:])
        else:
            tree = json.loads(data)
            mutated = bytearray(json.dumps(_mutate(tree, draw, _nodes(tree))).encode())
        try:
            decode_object(codec, mutated, WHAT)
        except CheckpointingException as error:
            assert WHAT in str(error)  # noqa: PT017
            assert len(str(error)) < 2000  # noqa: PT017
            refused += 1
    assert refused > rounds // 5


BOMBS = {
    "lists": "[" + "[]," * 15_000 + "[]]",
    "objects": "[" + '{"a":0},' * 8_000 + "0]",
    "tuples": "[" + '{"$":"tuple","v":[]},' * 10_000 + "0]",
    "deques": "[" + '{"$":"deque","v":[1,[]]},' * 10_000 + "0]",
    "floats": "[" + "1e9," * 60_000 + "0]",
    "range": '{"$":"range","v":[0,9223372036854775807,1]}',
    "code points": '{"$":"str","v":[' + "65536," * 40_000 + "0]}",
    "long integer": '{"$":"int","v":"0x' + "f" * 1_000_000 + '"}',
    "one bytearray often": make_file(
        [{"$": "bytearray", "v": TENSOR}] * 2_000, {"0": entry([400_000], 400_000)}, bytes(400_000)
    ),
    "empty tensors": make_file(TENSOR, {str(i): entry([0], 0) for i in range(1_000)}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_a_small_multiple_of_the_payload(name: str) -> None:
    """However a payload is filled, decoding takes at most 150 times its bytes, and no repetition of a tensor's."""
    data = BOMBS[name]
    tracemalloc.start()
    try:
        if isinstance(data, str):
            decode_object("json", data.encode(), WHAT)
        else:
            decode_object("safetensors", data, WHAT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 150 * len(data) + 100_000


def test_keys_of_one_hash_are_refused() -> None:
    """Keys that are made to have one hash, whose dict would take hours, are refused at once."""
    keys = [{"$": "int", "v": hex(1 + i * ((1 << 61) - 1))} for i in range(20_000)]
    for tree in ({"$": "set", "v": keys}, {"$": "dict", "v": [[key, 0] for key in keys]}):
        with pytest.raises(CorruptCheckpointError, match="same hash"):
            decode_object("json", json.dumps(tree).encode(), WHAT)


def test_decoding_runs_nothing() -> None:
    """No file of the room imports pickle, calls eval, or imports a module by a name from a payload."""
    room = Path(shardckpt_safetensors.objects.__file__).parent
    for path in room.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not {"pickle", "marshal", "shelve", "dill"} & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("import_module", "__import__", "eval", "exec")
            ):
                assert ast.unparse(node) == "importlib.import_module('numpy')"
