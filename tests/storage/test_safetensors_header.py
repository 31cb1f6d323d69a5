from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage import LENGTH_BYTES, HeaderEntry, encode_header, header_length, parse_head
from tests.tables import table

U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def _parse(header: Any, payload: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    parse_head(text, LENGTH_BYTES + len(text) + payload, "here")


def test_what_stock_safetensors_wrote() -> None:
    """A header of stock safetensors gives its tensors and metadata, each with its place in the file."""
    data = save({"a": torch.arange(4), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, {"format": "pt"})
    length = header_length(data[:LENGTH_BYTES], len(data), "here")
    metadata, found = parse_head(memoryview(data)[LENGTH_BYTES : LENGTH_BYTES + length], len(data), "here")
    assert metadata == {"format": "pt"}
    assert {name: (entry.kind, entry.shape, entry.stop - entry.start) for name, entry in found.items()} == {
        "a": ("I64", (4,), 32),
        "b": ("BF16", (2, 3), 12),
    }
    assert data[found["a"].start : found["a"].stop] == bytes(torch.arange(4).view(torch.uint8).tolist())


@table(("align", "rest"), [(8, 0), (64, 0), (4096, 128), (4096, 4032)])
def test_payloads_begin_where_they_are_to(align: int, rest: int) -> None:
    """A head is padded with spaces to leave the remainder, and stock safetensors reads the file."""
    head = encode_header([HeaderEntry("a", "U8", (3,), 3)], align=align, rest=rest)
    assert len(head) % align == rest
    assert safetensors.deserialize(head + b"abc")[0][1]["data"] == b"abc"


@table(
    ("header", "payload"),
    [
        ([], 0),
        ({"a": []}, 0),
        ({"a": {**U8, "more": 1}}, 4),
        ({"a": {**U8, "dtype": "U9"}}, 4),
        ({"a": {**U8, "dtype": 7}}, 4),
        ({"a": {**U8, "shape": [-4]}}, 4),
        ({"a": {**U8, "shape": [True] * 4}}, 4),
        ({"a": {**U8, "shape": [4.0]}}, 4),
        ({"a": {**U8, "shape": [5]}}, 4),
        ({"a": {**U8, "shape": [1] * 65}}, 4),
        ({"a": {**U8, "data_offsets": [4, 0]}}, 4),
        ({"a": {**U8, "data_offsets": [0, 4, 4]}}, 4),
        ({"a": {**U8, "data_offsets": [1, 5]}}, 5),
        ({"a": U8}, 3),
        ({"a": U8}, 5),
        ({"a": U8, "b": U8}, 4),
        ({"a": U8, "b": {**U8, "data_offsets": [5, 9]}}, 9),
        ({"__metadata__": {"a": 1}}, 0),
        ({"__metadata__": []}, 0),
        (
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            0,
        ),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0),
        (b"{", 0),
        (b"\xff{}", 0),
    ],
)
def test_malformed_headers_are_refused(header: Any, payload: int) -> None:
    """A hole, an overlap, a wrong size, a name twice, anything but integers: an error that names the file."""
    with pytest.raises(CorruptCheckpointError, match="here"):
        _parse(header, payload)


@pytest.mark.parametrize("part", [b"[", b'{"a":', b"[0],", b'"a":{},', b"9"])
def test_hostile_headers_cost_little(part: bytes) -> None:
    """Deep nesting, many parts and long numbers of 8 MB are refused, within four times their size."""
    text = b'{"a":' + part * ((8 << 20) // len(part))
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError, match="here"):
        _parse(text, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
