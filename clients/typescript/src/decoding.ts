/** Decodes a response into the form of its request. */

import type { ResponseShape } from "./encoding.js";
import { unreadable } from "./errors.js";
import { DataType, type AttendResponse } from "./generated/attention/v1/attention_pb.js";
import type { AttentionResult, AttentionResults, AttentionWeights, Sequence } from "./values.js";

/** Rows and columns of a matrix, or of each matrix of a stack. */
type Size = readonly [stack: number, rows: number, columns: number];

/** Decodes a response; throws an AttentionClientError if it contradicts itself or the request. */
export function decodeResult(
  response: AttendResponse,
  shape: ResponseShape,
): AttentionResult | AttentionResults {
  const { modelName, modelVersion, modelDigest } = response;
  const model = { modelName, modelVersion, modelDigest };
  const vectors = decodeVectors(response, shape);
  const weights = decodeWeights(response, shape);
  if (shape.many) return { contextVectors: vectors, attentionWeights: weights, ...model };
  const [contextVectors] = vectors;
  if (!contextVectors) throw unreadable("context_vectors", "it is empty");
  return { contextVectors, attentionWeights: weights?.[0], ...model };
}

function decodeVectors({ contextVectors: message }: AttendResponse, shape: ResponseShape): Sequence[] {
  if (!message) throw unreadable("context_vectors", "it is missing");
  const { width, lengths } = message;
  const sent = lengths.map((rows): Size => [1, rows, width]);
  const given = sent.map(([, rows], index): Size => [1, shape.queryRows?.[index] ?? rows, width]);
  const pieces = split("context_vectors", message, shape.count, sent);
  return pieces.map((piece, index) => {
    const [, rows] = sizeAt(given, index);
    return { data: padded(piece, sizeAt(sent, index), sizeAt(given, index)), rows, width };
  });
}

function decodeWeights(
  { attentionWeights: message }: AttendResponse,
  shape: ResponseShape,
): AttentionWeights[] | undefined {
  if (!message) return undefined;
  const { numHeads: heads, queryLengths, keyLengths } = message;
  const sent = queryLengths.map((rows, index): Size => [heads, rows, keyLengths[index] ?? 0]);
  const given = sent.map(([, rows, columns], index): Size => [
    heads,
    shape.queryRows?.[index] ?? rows,
    shape.keyRows?.[index] ?? columns,
  ]);
  const pieces = split("attention_weights", message, shape.count, sent);
  return pieces.map((piece, index) => {
    const [, queryRows, keyRows] = sizeAt(given, index);
    return { data: padded(piece, sizeAt(sent, index), sizeAt(given, index)), heads, queryRows, keyRows };
  });
}

/** Splits the elements of all sequences; the parts are views of the only copy. */
function split(
  field: string,
  message: { dataType: DataType; data: Uint8Array },
  count: number,
  sizes: readonly Size[],
): Float32Array[] {
  if (message.dataType !== DataType.FP32)
    throw unreadable(field, `its data type is ${message.dataType}; expected FP32`);
  const elements = sizes.map(([stack, rows, columns]) => stack * rows * columns);
  const total = elements.reduce((sum, size) => sum + size, 0);
  if (sizes.length !== count || total * Float32Array.BYTES_PER_ELEMENT !== message.data.byteLength) {
    const found = `${sizes.length} sequences of ${total} elements in ${message.data.byteLength} bytes`;
    throw unreadable(field, `${found}; expected ${count} sequences`);
  }
  // The bytes of a message lie at any offset of their buffer; those of a Float32Array at a multiple of four.
  const floats = new Float32Array(new Uint8Array(message.data).buffer);
  let end = 0;
  return elements.map((size) => floats.subarray(end, (end += size)));
}

/** The elements in a larger size, with zeros after each row and after the last row. */
function padded(data: Float32Array, sent: Size, given: Size): Float32Array {
  const [stack, rows, columns] = sent;
  const [, allRows, allColumns] = given;
  if (rows === allRows && columns === allColumns) return data;
  if (rows > allRows || columns > allColumns)
    throw unreadable("lengths", "it has more rows than the request");
  const all = new Float32Array(stack * allRows * allColumns);
  for (let row = 0; row < stack * rows; row++) {
    const start = (Math.floor(row / rows) * allRows + (row % rows)) * allColumns;
    all.set(data.subarray(row * columns, (row + 1) * columns), start);
  }
  return all;
}

function sizeAt(sizes: readonly Size[], index: number): Size {
  return sizes[index] ?? [0, 0, 0];
}
