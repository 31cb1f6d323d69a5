"""A reader of (safetensors, 1) that verifies, made from FORMAT.md alone: ``python -m ... DIRECTORY...``."""
import base64, hashlib, importlib.util, itertools, json, math, pathlib, re, zlib, numpy as np
from tests.safetensors.conformance.part_reader import join_parts
from tests.safetensors.conformance.protocol import Content, run_reader
from tests.safetensors.conformance.strict_json import need, parse_json, read_header
FEATURES, DIGESTS = {"index_parts": join_parts, "unaligned": lambda *_: None}, {"crc32": (4, zlib.crc32)}
if importlib.util.find_spec("xxhash"): DIGESTS["xxh3_64"] = (8, importlib.import_module("xxhash").xxh3_64_intdigest)
DTYPES = {name: np.dtype(f"V{-(-int(bits or 8) // 8)}") for name, bits in re.findall(r"([A-Z]+(\d*)\w*)", """BOOL U8 I8
  F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0 F4_E2M1_X2 I16 U16 F16 BF16 I32 U32 F32 C32 I64 U64 F64 C64 C128""")}
COLUMNS = [re.split("[:,]", c) for c in """text:c, text_end:S, file:F,S tensor:T2,S tensor_dtype:T,dtypes tensor_axes:T,
    tensor_shape:TA, tensor_end:T, box_offset:BA, box_extent:BA, box_file:B,F box_start:B, alias:L2,S alias_tensor:L,
    object:O2,S object_codec:O,codecs object_file:O,F object_start:O, object_nbytes:O,""".split()]  # its axes, its list
def read_file(place, name, limit=2**53):
    need(re.fullmatch(r"(?!.{1025})((?!\.\.?(/|$))[\w.-]{1,255}(/(?!$)|$)){1,32}", name, re.A), f"name {name!r:.99}")
    need((path := pathlib.Path(place).resolve() / name).is_file() and path.resolve() == path, f"{name}: none, or link")
    return need(path.stat().st_size <= limit, f"{name} has more than {limit} bytes") or path.read_bytes()
def read_files(place):  # the record's save_id, the bytes of each file by name, the common state's tree
    marker, raw = parse_json(read_file(place, "metadata.json", 1 << 20)), read_file(place, "shardckpt.json", 1 << 31)
    root = (record := parse_json(raw))["self_digest"]
    backend = [marker["sharded_backend"], marker["sharded_backend_version"], record["backend"], record["version"]]
    need(json.dumps(backend) == '["safetensors", 1, "safetensors", 1]', f"backend and version are {backend}")
    need(hashlib.sha256((b"0" * 64).join(raw.rsplit(root.encode(), 1))).hexdigest() == root, "self_digest differs")
    wide, digest = DIGESTS.get(record["digest_algorithm"]) or need(0, f"cannot check {record['digest_algorithm']}")
    data = {file["name"]: read_file(place, file["name"], file["size"]) for file in record["files"]}
    need(record["format"] in (1, 2, 3) and len(data) == len(record["files"]), "a later format, or a file twice")
    for name, size, expected, text in ([f[k] for k in ("name", "size", "digest", "segments")] for f in record["files"]):
        own, z = isinstance(text, int), zlib.decompressobj()
        raw = read_file(place, f"{name}.digests", text) if own else base64.b64decode(text, validate=True)
        table = (raw[: (n := text // (4 + wide) * 4)], raw[n:]) if own else (z.decompress(raw, len(raw)), z.unused_data)
        lengths, digests = (np.frombuffer(column, f"<u{n}").tolist() for column, n in zip(table, (4, wide)))
        need(hashlib.sha256(b"".join(table)).hexdigest() == expected, f"{name}: the digest of its table differs")
        need(sum(lengths) == len(data[name]) == size and all(0 < n <= 1 << 20 for n in lengths), f"{name}: its lengths")
        ends = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        need(digests == [digest(data[name][a:b]) for a, b in ends], f"{name}: a digest differs")
    return record["save_id"], data, parse_json(read_header(data["common.safetensors"], 10**8)[1]["tree"].encode())
def read_columns(raw, columns):  # of the index, or of a part: the JSON, the columns as lists, the strings
    head, metadata, rest = read_header(raw, 1 << 22)
    about, size, col = parse_json(metadata["shardckpt"].encode()), {"": 2**53, "2": 2}, {}
    size |= {name: len(about[name]) for name in ("dtypes", "codecs") if name in about}
    for name, axes, places in columns:
        kind, shape = {"U8": "u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}[head[name]["dtype"]], head[name]["shape"]
        col[name] = c = np.frombuffer(rest[slice(*head[name]["data_offsets"])], kind).reshape(shape)
        need(shape == [size.setdefault(a, n) for a, n in zip(axes, shape, strict=True)], f"{name}: its shape")
        need(((c >= 0) & (c < size[places])).all(), f"{name} has a value that it cannot have")
    text, col = col["text"].tobytes(), {name: column.tolist() for name, column in col.items()}
    for ends, last in ((col["text_end"], len(text)), (col["tensor_end"], size["B"])):
        need(ends == sorted(ends) and [0, *ends][-1] == last, "text_end or tensor_end decreases, or ends elsewhere")
    need(size["A"] == max(col["tensor_axes"], default=0) <= 64, "the number of axes")
    return about, col, [text[a:b].decode() for a, b in itertools.pairwise([0, *col["text_end"]])]
def read_checkpoint(place):  # a Content: tensors by name as (dtype, shape, bytes); objects by name as (codec, payload)
    save_id, data, _ = read_files(place)
    about, col, text = read_columns(data["index.safetensors"], COLUMNS)
    need(re.fullmatch(r"1\.[0-9]+", about["format"]) and about["id"] == save_id, "another format, or another save")
    for name in (features := about["required_features"]): FEATURES[name](read_columns, about, col, text, data)
    names = [text[a] + text[b] for kind in ("tensor", "alias", "object") for a, b in col[kind]]
    need(len({*names}) == len(names) and all(0 < len(n.encode()) <= 4096 and "\0" not in n for n in names), "names")
    dtypes, codecs, files = about["dtypes"], about["codecs"], [text[i] for i in col["file"]]
    ends = [8 + int.from_bytes(data[f][:8], "little") for f in files]  # of what has been seen in each: the header
    need(all(f.endswith(".safetensors") and e <= min(len(data[f]), 8 + 10**8) for f, e in zip(files, ends)), "a header")
    need(len({*files} - {"index.safetensors", "common.safetensors"}) == len(files), "a file twice, or no data file")
    rest = [*zip(*(col["object_" + k] for k in ("file", "start", "nbytes", "codec")))]
    boxes = [[col["box_" + k][a:b] for k in ("file", "start", "offset", "extent")]
             for a, b in itertools.pairwise([0, *col["tensor_end"]])]
    found, kinds = {}, [[DTYPES[name] for name in dtypes][d] for d in col["tensor_dtype"]]
    spans = [(f, s, math.prod(e) * kind.itemsize) for kind, rows in zip(kinds, boxes) for f, s, _, e in zip(*rows)]
    for f, s, n in sorted(spans + [o[:3] for o in rest]):
        need(ends[f] <= s <= s + n <= len(data[files[f]]) and (s % 64 == 0 or "unaligned" in features), f"{f} at {s}")
        ends[f] = s + n
    for t, (name, kind, n, shape) in enumerate(zip(names, kinds, col["tensor_axes"], col["tensor_shape"])):
        need(math.prod(x or 1 for x in shape) * kind.itemsize < 2**53 and {*shape[n:]} <= {1}, f"{name}: its shape")
        need(sum(map(math.prod, boxes[t][3])) == math.prod(shape) and sorted(b := boxes[t][2]) == b, f"holes: {name}")
        array, seen = np.empty(shape[:n], kind), np.zeros(shape[:n], bool)
        for f, s, o, e in zip(*boxes[t]):
            need(all(x + y <= z for x, y, z in zip(o, e, shape)) and {*e[n:]} <= {1}, f"{name}: a box outside of it")
            box = tuple(slice(x, x + y) for x, y in zip(o[:n], e[:n]))
            array[box], seen[box] = np.frombuffer(data[files[f]], kind, math.prod(e), s).reshape(e[:n]), True
        found[name] = need(seen.all(), "an overlap") or (dtypes[col["tensor_dtype"][t]], shape[:n], array.tobytes())
    found |= {name: found[names[t]] for name, t in zip(names[len(boxes) :], col["alias_tensor"])}
    return Content(found, {o: (codecs[c], data[files[f]][a:][:n]) for o, (f, a, n, c) in zip(names[len(found):], rest)})
if __name__ == "__main__": run_reader(read_checkpoint)
