// A reader of (safetensors, 1) that verifies, from FORMAT.md alone: `node reader.mjs DIRECTORY...` prints JSON lines.
import crypto from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import zlib from "node:zlib";
import { joinParts } from "./parts.mjs";

const WIDTHS = {
  BOOL: 1, U8: 1, I8: 1, F8_E4M3: 1, F8_E5M2: 1, F8_E4M3FNUZ: 1, F8_E5M2FNUZ: 1, F8_E8M0: 1, F4_E2M1_X2: 1,
  I16: 2, U16: 2, F16: 2, BF16: 2, I32: 4, U32: 4, F32: 4, C32: 4, I64: 8, U64: 8, F64: 8, C64: 8, C128: 16,
};
// The axes of each column, and the list that its values are places in.
const COLUMNS = `text:c text_end:S file:F:S tensor:T2:S tensor_dtype:T:dtypes tensor_axes:T tensor_shape:TA tensor_end:T
  box_offset:BA box_extent:BA box_file:B:F box_start:B alias:L2:S alias_tensor:L object:O2:S object_codec:O:codecs
  object_file:O:F object_start:O object_nbytes:O`.split(/\s+/).map((column) => column.split(":"));
const LIMIT = Number.MAX_SAFE_INTEGER; // 2^53 - 1
export const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export function need(ok, why) {
  if (!ok) throw new Error(why);
}

const isCount = (n) => Number.isSafeInteger(n) && n >= 0;
const product = (numbers) => numbers.reduce((all, n) => all * BigInt(n), 1n);
const compareOffsets = (a, b) => a.map((n, axis) => n - b[axis]).find((n) => n !== 0) ?? 0;
const sha256 = (bytes) => crypto.createHash("sha256").update(bytes).digest("hex");

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});
const slowCrc32 = (bytes) => ~bytes.reduce((crc, byte) => CRC_TABLE[(crc ^ byte) & 255] ^ (crc >>> 8), ~0) >>> 0;
const crc32 = (!process.env.SLOW_CRC32 && zlib.crc32) || slowCrc32; // older versions of node have none

// By for-in: Object.values takes long where there are many keys.
function countKeys(value, count = 0) {
  if (Array.isArray(value)) return value.reduce((sum, one) => sum + countKeys(one), 0);
  if (value !== null && typeof value === "object") for (const key in value) count += 1 + countKeys(value[key]);
  return count;
}

// JSON.parse takes the last of two equal keys, and nests as deep as the text does: it checks neither.
function parseJson(bytes, what) {
  let depth = 0, quoted = false, colons = 0; // there is a colon outside of strings for each key
  for (let n = 0; n < bytes.length; n++) {
    const byte = bytes[n]; // 92 is a backslash, 34 a quotation mark, 58 a colon, the others are brackets
    if (byte === 34) quoted = !quoted;
    else if (quoted) n += byte === 92;
    else if (byte === 58) colons++;
    else if (byte === 91 || byte === 123) need(++depth <= 500, `${what}: nested too deep`);
    else if (byte === 93 || byte === 125) depth--;
  }
  const found = JSON.parse(utf8.decode(bytes));
  need(countKeys(found) === colons, `${what}: a key twice`);
  return found;
}

export function parseObject(bytes, what) {
  const found = parseJson(bytes, what);
  need(found !== null && typeof found === "object" && !Array.isArray(found), `${what} is not an object`);
  return found;
}

// A file of the checkpoint, read by ranges.
class File {
  constructor(place, name, limit = LIMIT) {
    const parts = typeof name === "string" && name.length <= 1024 ? name.split("/") : [];
    const safe = parts.every((part) => /^[A-Za-z0-9._-]{1,255}$/.test(part) && part !== "." && part !== "..");
    need(safe && parts.length >= 1 && parts.length <= 32, `not a name: ${JSON.stringify(name)?.slice(0, 99)}`);
    let at = place;
    for (const part of parts) {
      at = path.join(at, part);
      const kind = fs.lstatSync(at, { throwIfNoEntry: false });
      need(kind && !kind.isSymbolicLink(), `${name} is missing, or a link`);
      [this.name, this.size] = [name, kind.isFile() ? kind.size : Infinity];
    }
    need(this.size <= limit, `${name} is no file of at most ${limit} bytes`);
    this.handle = fs.openSync(at, "r");
  }

  read(start, nbytes) {
    need(isCount(start) && isCount(nbytes) && start + nbytes <= this.size, `${this.name}: bytes behind its end`);
    const bytes = Buffer.alloc(nbytes);
    for (let done = 0, got = 0; done < nbytes; done += got) {
      got = fs.readSync(this.handle, bytes, done, nbytes - done, start + done);
      need(got > 0, `${this.name} ends early`);
    }
    return bytes;
  }

  // Where the header of a safetensors file ends.
  headerEnd(limit) {
    const length = this.read(0, 8).readBigUInt64LE();
    need(length <= BigInt(Math.min(limit, this.size - 8)), `${this.name}: header longer than the file, or its limit`);
    return 8 + Number(length);
  }

  // The header of a safetensors file: entries by name, metadata, where the payloads begin.
  header(limit) {
    const begin = this.headerEnd(limit);
    const entries = parseObject(this.read(8, begin - 8), this.name), metadata = entries.__metadata__ ?? {};
    delete entries.__metadata__;
    const spans = [];
    for (const name in entries) {
      const span = entries[name].data_offsets, sound = span?.length === 2 && span.every(isCount) && span[0] <= span[1];
      need(sound, `${this.name}: offsets in its header`);
      spans.push(span);
    }
    let end = 0;
    for (const [from, to] of spans.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
      need(from === end, `${this.name}: its header has a hole or an overlap at ${end}`);
      end = to;
    }
    need(begin + end === this.size, `${this.name}: its header describes ${end} bytes of ${this.size - begin}`);
    return { entries, metadata, begin };
  }
}

// The lengths of a file's segments, and their digests.
function readTable(row, open) {
  const table = isCount(row.segments) && open(`${row.name}.digests`, row.segments), half = row.segments >> 1;
  if (table) return [table.read(0, half), table.read(half, row.segments - half)];
  const blob = Buffer.from(row.segments, "base64");
  need(blob.toString("base64") === row.segments, `${row.name}: segments are no base64`);
  // what follows the lengths is at least as long as they are: that bounds what they may inflate to
  const { buffer, engine } = zlib.inflateSync(blob, { info: true, maxOutputLength: blob.length });
  return [buffer, blob.subarray(engine.bytesWritten)];
}

function checkDigests(file, row, open) {
  const [lengths, digests] = readTable(row, open);
  need(digests.length === lengths.length && lengths.length % 4 === 0, `${row.name}: lengths and digests do not match`);
  need(sha256(Buffer.concat([lengths, digests])) === row.digest, `${row.name}: the digest of its table differs`);
  let end = 0;
  for (let n = 0; n < lengths.length; n += 4) {
    const length = lengths.readUInt32LE(n);
    need(length >= 1 && length <= 1 << 20, `${row.name}: a segment of ${length} bytes`);
    need(crc32(file.read(end, length)) === digests.readUInt32LE(n), `${row.name}: a digest differs at ${end}`);
    end += length;
  }
  need(end === row.size, `${row.name}: its segments have ${end} bytes`);
}

// The record, all of whose fields that matter are sound.
function readRecord(open) {
  const [marked, recorded] = [open("metadata.json", 1 << 20), open("shardckpt.json", 2 ** 31)];
  const marker = parseObject(marked.read(0, marked.size), "metadata.json");
  const text = recorded.read(0, recorded.size), record = parseObject(text, "shardckpt.json");
  const backend = [marker.sharded_backend, marker.sharded_backend_version, record.backend, record.version];
  need(JSON.stringify(backend) === '["safetensors",1,"safetensors",1]', `backend and version are ${backend}`);
  need([1, 2, 3].includes(record.format), `shardckpt.json: unknown format ${record.format}`);
  need(/^[0-9a-f]{64}$/.test(record.self_digest), "shardckpt.json: no self_digest");
  const at = text.lastIndexOf(record.self_digest);
  text.fill("0", at, at + 64);
  need(sha256(text) === record.self_digest, "shardckpt.json: self_digest differs");
  need(record.digest_algorithm === "crc32", `digests are ${record.digest_algorithm}: this reader has crc32 alone`);
  return record;
}

// The columns of the index: arrays of numbers, checked against each other.
export function readColumns(file, header, sizes, names = COLUMNS) {
  const columns = {};
  for (const [name, axes, places] of names) {
    const { dtype, shape, data_offsets: [from, to] } = header.entries[name] ?? need(false, `no column ${name}`);
    need(["U8", "I16", "I32", "I64"].includes(dtype) && shape.every(isCount), `${name}: its dtype or shape`);
    need(shape.length === axes.length, `${name} has ${shape.length} axes`);
    shape.forEach((n, axis) => need((sizes[axes[axis]] ??= n) === n, `${name}: its shape ${shape}`));
    const width = WIDTHS[dtype];
    need(shape.reduce((product, n) => product * BigInt(n), BigInt(width)) === BigInt(to - from), `${name}: its size`);
    const bytes = file.read(header.begin + from, to - from);
    const get = { 1: (n) => bytes[n], 2: (n) => bytes.readInt16LE(n), 4: (n) => bytes.readInt32LE(n),
      8: (n) => Number(bytes.readBigInt64LE(n)) }[width];
    const values = Array.from({ length: bytes.length / width }, (_, n) => get(n * width));
    const limit = places ? sizes[places] : LIMIT + 1;
    need(values.every((n) => isCount(n) && n < limit), `${name}: a value that it cannot have`);
    const rows = () => Array.from({ length: shape[0] }, (_, n) => values.slice(n * shape[1], (n + 1) * shape[1]));
    columns[name] = name === "text" ? bytes : shape.length === 2 ? rows() : values;
  }
  for (const [name, total] of [["text_end", sizes.c], ["tensor_end", sizes.B]]) {
    const ends = [0, ...columns[name]];
    need(ends.every((end, n) => n === 0 || ends[n - 1] <= end) && ends.at(-1) === total, `${name}: its values`);
  }
  return columns;
}

// Copy the elements of a box to their places in the tensor, by runs along the last axis, and count them in `seen`.
function fillBox(target, seen, payload, shape, offset, extent, width) {
  const run = extent.at(-1) ?? 1;
  let done = 0;
  const walk = (axis, place) => {
    if (axis + 1 < shape.length) {
      for (let n = 0; n < extent[axis]; n++) walk(axis + 1, (place + offset[axis] + n) * shape[axis + 1]);
    } else {
      const start = place + (offset.at(-1) ?? 0);
      payload.copy(target, start * width, done, (done += run * width));
      for (let n = start; n < start + run; n++) seen[n]++;
    }
  };
  walk(0, 0);
}

function readCheckpoint(open) {
  const record = readRecord(open);
  const files = new Map();
  for (const row of record.files) {
    need(!files.has(row.name), `${row.name} twice in the record`);
    const file = open(row.name);
    need(file.size === row.size, `${row.name} has ${file.size} bytes, not ${row.size}`);
    files.set(row.name, file);
  }
  for (const row of record.files) checkDigests(files.get(row.name), row, open);
  const index = files.get("index.safetensors") ?? need(false, "the record names no index.safetensors");
  const common = files.get("common.safetensors") ?? need(false, "the record names no common.safetensors");
  parseJson(Buffer.from(common.header(1e8).metadata.tree), "the common state");
  const header = index.header(1 << 22);
  const about = parseObject(Buffer.from(header.metadata.shardckpt ?? need(false, "no shardckpt")), "shardckpt");
  need(/^1\.[0-9]+$/.test(about.format) && about.id === record.save_id, `format ${about.format} of save ${about.id}`);
  const { required_features: required, optional_features: optional, dtypes, codecs } = about;
  need([required, optional, dtypes, codecs].every(Array.isArray), "a list of the index is missing");
  need(required.every((name) => ["index_parts", "unaligned"].includes(name)), `unknown required features: ${required}`);
  const sizes = { 2: 2, dtypes: dtypes.length, codecs: codecs.length };
  const c = readColumns(index, header, sizes);
  need(sizes.A === Math.max(0, ...c.tensor_axes) && sizes.A <= 64, `tensors of up to ${sizes.A} axes`);
  const text = c.text_end.map((end, n) => utf8.decode(c.text.subarray(n ? c.text_end[n - 1] : 0, end)));
  const seen = new Set(), grid = required.includes("unaligned") ? 1 : 64;
  if (required.includes("index_parts")) joinParts(index, header, c, text, dtypes, files, grid);
  need(dtypes.every((name) => Object.hasOwn(WIDTHS, name)), `an unknown dtype: ${dtypes}`);
  const [tensors, aliases, objects] = [c.tensor, c.alias, c.object].map((rows) => rows.map(([a, b]) => {
    const name = text[a] + text[b], nbytes = Buffer.byteLength(name);
    need(nbytes >= 1 && nbytes <= 4096 && !name.includes("\0"), `a name of ${nbytes} bytes, or with NUL`);
    need(!seen.has(name), `${name} twice`);
    seen.add(name);
    return name;
  }));
  const data = c.file.map((n) => {
    const file = files.get(text[n]);
    const fits = text[n].endsWith(".safetensors") && file !== index && file !== common;
    need(file && fits, `${text[n]} is no data file of the record`);
    return { file, end: file.headerEnd(1e8) };
  });
  need(new Set(c.file.map((n) => text[n])).size === data.length, "a data file twice");

  const widths = c.tensor_dtype.map((n) => WIDTHS[dtypes[n]]);
  const payloads = objects.map((_, o) => [c.object_file[o], c.object_start[o], BigInt(c.object_nbytes[o])]);
  const boxes = (t) => [...c.box_file.keys()].slice(c.tensor_end[t - 1] ?? 0, c.tensor_end[t]); // the rows of a tensor
  for (const t of tensors.keys())
    for (const b of boxes(t))
      payloads.push([c.box_file[b], c.box_start[b], product(c.box_extent[b]) * BigInt(widths[t])]);
  for (const [f, start, nbytes] of payloads.sort((a, b) => a[0] - b[0] || a[1] - b[1] || Number(a[2] - b[2]))) {
    const end = BigInt(start) + nbytes;
    const fits = start % grid === 0 && data[f].end <= start && end <= BigInt(data[f].file.size);
    need(fits, `${data[f].file.name}: no payload may be at ${start}`);
    data[f].end = Number(end);
  }

  const found = {};
  tensors.forEach((name, t) => {
    const axes = c.tensor_axes[t], shape = c.tensor_shape[t].slice(0, axes);
    const whole = c.tensor_shape[t].map((n) => n || 1);
    need(c.tensor_shape[t].every((n, axis) => axis < axes || n === 1), `${name}: sizes of no axis`);
    need(product(whole) * BigInt(widths[t]) <= BigInt(LIMIT), `${name} is too large`);
    const rows = boxes(t);
    rows.forEach((b, n) => {
      const inside = c.tensor_shape[t].every((n, axis) => c.box_offset[b][axis] + c.box_extent[b][axis] <= n);
      need(inside && c.box_extent[b].every((n, axis) => axis < axes || n === 1), `${name}: a box outside of it`);
      need(!n || compareOffsets(c.box_offset[b - 1], c.box_offset[b]) <= 0, `${name}: its boxes are not sorted`);
    });
    const stored = rows.reduce((sum, b) => sum + product(c.box_extent[b]), 0n);
    need(stored === product(shape), `${name}: its boxes have ${stored} elements of ${product(shape)}`);
    const bytes = Buffer.alloc(Number(stored) * widths[t]), counts = new Uint8Array(Number(stored));
    for (const b of rows) {
      const nbytes = Number(product(c.box_extent[b])) * widths[t];
      const payload = data[c.box_file[b]].file.read(c.box_start[b], nbytes);
      const [offset, extent] = [c.box_offset[b].slice(0, axes), c.box_extent[b].slice(0, axes)];
      if (nbytes) fillBox(bytes, counts, payload, shape, offset, extent, widths[t]);
    }
    need(counts.every((n) => n === 1), `${name}: an element in two boxes, another in none`);
    found[name] = [dtypes[c.tensor_dtype[t]], shape, sha256(bytes)];
  });
  aliases.forEach((name, n) => { found[name] = found[tensors[c.alias_tensor[n]]] ?? need(false, `${name}: of none`); });
  const shown = Object.fromEntries(objects.map((name, o) => {
    const payload = data[c.object_file[o]].file.read(c.object_start[o], c.object_nbytes[o]);
    return [name, [codecs[c.object_codec[o]], sha256(payload)]];
  }));
  return { verdict: "valid", tensors: found, objects: shown };
}

for (const place of process.argv.slice(2)) {
  const opened = [];
  const open = (name, limit) => opened[opened.push(new File(place, name, limit)) - 1];
  let line;
  try {
    line = readCheckpoint(open);
  } catch (error) {
    line = { verdict: "invalid", why: String(error.message ?? error).slice(0, 300) };
    process.exitCode = 1;
  }
  opened.forEach((file) => fs.closeSync(file.handle));
  process.stdout.write(JSON.stringify(line) + "\n");
}
