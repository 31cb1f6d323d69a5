// What the feature `index_parts` adds to a reader: tensors and boxes of other files become rows of the index.
import { need, parseObject, readColumns, utf8 } from "./reader.mjs";

const split = (text) => text.split(" ").map((column) => column.split(":"));
const PARTS = split("text:c text_end:S tensor_end:T box_start:B part:K:S part_head:K");
const PART = split("text:c text_end:S tensor:T2:S tensor_dtype:T:dtypes tensor_axes:T tensor_shape:TA tensor_end:T "
  + "tensor_reach:TA page_offset:PA box:Bw");
const FIELDS = {
  U8: [1, (bytes, at) => bytes[at]], I16: [2, (bytes, at) => bytes.readInt16LE(at)],
  I32: [4, (bytes, at) => bytes.readInt32LE(at)], I64: [8, (bytes, at) => Number(bytes.readBigInt64LE(at))],
};
const isSame = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// Add the tensors and boxes of all parts to the columns `c` of the index; `grid` is the unit of their starts in bytes.
export function joinParts(index, indexHeader, c, text, dtypes, files, grid) {
  const { part: names, part_head: heads } = readColumns(index, indexHeader, {}, PARTS);
  const used = [...names, ...c.file].map((n) => text[n]).concat("index.safetensors", "common.safetensors");
  need(c.tensor.length === 0 && new Set(used).size === used.length, "tensors in the index, or a file twice");
  const count = c.file.length;
  names.map((n) => text[n]).forEach((name, k) => {
    const file = files.get(name);
    need(file && name.endsWith(".safetensors"), `${name} is no file of the record`);
    const header = file.header(1 << 22), about = parseObject(Buffer.from(header.metadata.shardckpt), name);
    const { dtypes: own, row, page } = about, sizes = { 2: 2, dtypes: own.length };
    const part = readColumns(file, header, sizes, PART);
    const axes = Math.max(0, ...part.tensor_axes);
    need(sizes.A === axes && axes <= 64 && row.length === 4, `${name}: the number of axes, or of fields`);
    need(Number.isInteger(page) && page > 0 && page < 2 ** 31, `${name}: the rows of a page`);
    const [from, to] = header.entries.box.data_offsets;
    need(header.begin + from === heads[k] && header.begin + to === file.size, `${name}: where its rows begin`);
    const fields = [...Array(axes).fill(row[0]), ...Array(axes).fill(row[1]), row[2], row[3]].map((f) => FIELDS[f]);
    need(header.entries.box.dtype === "U8" && sizes.w === fields.reduce((w, [n]) => w + n, 0), `${name}: its rows`);
    const rows = part.box.map((bytes) => {
      const buffer = Buffer.from(bytes);
      let at = 0;
      return fields.map(([width, get]) => get(buffer, (at += width) - width));
    });
    need(rows.flat().every((n) => Number.isSafeInteger(n) && n >= 0), `${name}: a number of a row`);
    const offset = rows.map((r) => r.slice(0, axes)), extent = rows.map((r) => r.slice(axes, 2 * axes));
    need(rows.every((r) => r[2 * axes] < count), `${name}: the file of a row`);
    need(isSame(part.page_offset, offset.filter((_, n) => n % page === 0)), `${name}: its page_offset`);
    const reach = part.tensor_end.map((end, t) => Array.from({ length: axes }, (_, axis) =>
      Math.max(0, ...extent.slice(part.tensor_end[t - 1] ?? 0, end).map((sizes) => sizes[axis]))));
    need(isSame(part.tensor_reach, reach), `${name}: its tensor_reach`);
    c.tensor.push(...part.tensor.map((pair) => pair.map((n) => n + text.length)));
    c.tensor_dtype.push(...part.tensor_dtype.map((n) => n + dtypes.length));
    c.tensor_end.push(...part.tensor_end.map((n) => n + c.box_file.length));
    c.tensor_axes.push(...part.tensor_axes);
    c.tensor_shape.push(...part.tensor_shape);
    c.box_offset.push(...offset);
    c.box_extent.push(...extent);
    c.box_file.push(...rows.map((r) => r[2 * axes]));
    c.box_start.push(...rows.map((r) => r[2 * axes + 1] * grid));
    text.push(...part.text_end.map((end, n) => utf8.decode(part.text.subarray(n ? part.text_end[n - 1] : 0, end))));
    dtypes.push(...own);
  });
}
