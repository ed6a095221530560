/** Encodes the arguments of a call into a request. */

import { clone, create } from "@bufbuild/protobuf";

import { invalid } from "./errors.js";
import {
  AttendRequestSchema,
  DataType,
  TextSequencesSchema,
  TokenSequencesSchema,
  VectorSequencesSchema,
  type AttendRequest,
  type VectorSequences,
} from "./generated/attention/v1/attention_pb.js";
import { packMasks, type Extent, type Rows } from "./masks.js";
import type {
  ComputeOptions,
  ContextRows,
  Inputs,
  Integers,
  OneOrMany,
  Sequence,
  TextInputs,
  TokenInputs,
  VectorInputs,
  StoredContext,
} from "./values.js";

/** The form and the sizes that the result takes from the request. */
export interface ResponseShape {
  /** Whether the request holds a list of sequences, rather than one. */
  readonly many: boolean;
  readonly count: number;
  /** Rows of each sequence, including padding; undefined if only the server knows them, as for text. */
  readonly queryRows: readonly number[] | undefined;
  readonly keyRows: readonly number[] | undefined;
}

/** A request, and what is needed to decode its response. */
export interface EncodedCall {
  readonly request: AttendRequest;
  readonly shape: ResponseShape;
  /** The context of the request, if it was not given as an id. The request then has a copy of the caller's arrays. */
  readonly context?: StoredContext;
}

/** Encodes one request; throws an AttentionClientError if an argument is wrong or two do not match. */
export function encodeRequest(model: string, inputs: Inputs, options: ComputeOptions): EncodedCall {
  const request = create(AttendRequestSchema, {
    modelName: model,
    modelVersion: String(options.version ?? ""),
    returnWeights: options.returnWeights ?? false,
    outputDataType: DataType.FP32,
  });
  if ("text" in inputs) return encodeTexts(request, inputs);
  if ("tokenIds" in inputs) return encodeTokens(request, inputs);
  const { context } = inputs;
  if (typeof context !== "object") return encodeVectors(request, inputs);
  if (context.modelName !== model) throw invalid("context", `one of model ${model}`, context.modelName);
  request.modelVersion ||= context.version;
  const encoded = encodeVectors(request, { ...inputs, context: context.id });
  return { ...encoded, request: clone(AttendRequestSchema, encoded.request), context };
}

/** Encodes the rows of a context. */
export function encodeRows({ key, value, mask }: ContextRows) {
  const rows = rowsOf("key", [key]);
  return {
    key: pack("key", [key], rows),
    ...(value && { value: packValues([value], rows) }),
    ...(mask && { mask: packMasks([mask], extentsOf(rows, rows)) }),
  };
}

/** The bytes of an array, without a copy. */
export function bytesOf(array: Float32Array): Uint8Array {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

function encodeVectors(request: AttendRequest, inputs: VectorInputs): EncodedCall {
  const many = Array.isArray(inputs.query);
  const queries = listOf<Sequence>(inputs.query);
  const keys = inputs.key === undefined ? undefined : listOf<Sequence>(inputs.key);
  const queryRows = rowsOf("query", queries, keys ? undefined : checkedLengths(inputs, many));
  const keyRows = keys ? rowsOf("key", keys, checkedLengths(inputs, many)) : queryRows;
  if (inputs.value !== undefined && !keys) throw invalid("value", "a key as well", "a value without a key");
  if (keyRows.length !== queryRows.length) {
    throw invalid("key", `as many sequences as the query, ${queryRows.length}`, keyRows.length);
  }
  request.queryInput = { case: "query", value: pack("query", queries, queryRows) };
  if (keys) request.key = pack("key", keys, keyRows);
  if (inputs.value !== undefined) request.value = packValues(listOf<Sequence>(inputs.value), keyRows);
  if (inputs.positions !== undefined) request.positions = packPositions(inputs.positions, queryRows);
  const { context, mask } = inputs;
  if (typeof context === "string") {
    request.contextId = context;
    if (keys ?? inputs.lengths) throw invalid("context", "no key and no lengths beside it", "one of them");
  }
  if (mask !== undefined) {
    const masks = listOf(mask);
    // Only the server knows how many rows a context has.
    const ofContext = masks.map(({ keyRows: given }) => ({ given, valid: given }));
    request.mask = packMasks(masks, extentsOf(queryRows, context === undefined ? keyRows : ofContext));
  }
  const given = (rows: readonly Rows[]) => rows.map((row) => row.given);
  return {
    request,
    shape: {
      many,
      count: queries.length,
      queryRows: given(queryRows),
      keyRows: context === undefined ? given(keyRows) : undefined,
    },
  };
}

function extentsOf(query: readonly Rows[], key: readonly Rows[]): Extent[] {
  return query.map((own, index) => ({ query: own, key: key[index] ?? own }));
}

function encodeTexts(request: AttendRequest, { text, mask }: TextInputs): EncodedCall {
  const texts = listOf<string>(text);
  request.queryInput = { case: "text", value: create(TextSequencesSchema, { texts: [...texts] }) };
  if (mask !== undefined)
    request.mask = packMasks(listOf(mask), Array<undefined>(texts.length).fill(undefined));
  return { request, shape: shapeOf(Array.isArray(text), texts.length) };
}

function encodeTokens(request: AttendRequest, { tokenIds, mask }: TokenInputs): EncodedCall {
  const many = Array.isArray(tokenIds) && typeof tokenIds[0] === "object";
  const sequences = (many ? tokenIds : [tokenIds]) as readonly Integers[];
  const lengths = sequences.map((ids) => ids.length);
  const ids = sequences.flatMap((own) => bigints("tokenIds", own));
  request.queryInput = { case: "tokenIds", value: create(TokenSequencesSchema, { lengths, ids }) };
  if (mask !== undefined) {
    const rows = lengths.map((length) => ({ given: length, valid: length }));
    request.mask = packMasks(listOf(mask), extentsOf(rows, rows));
  }
  return { request, shape: shapeOf(many, sequences.length) };
}

/** The shape of a response to sequences without padding. */
function shapeOf(many: boolean, count: number): ResponseShape {
  return { many, count, queryRows: undefined, keyRows: undefined };
}

/** The elements of a list, or a list of the only one. */
export function listOf<T extends object | string>(value: OneOrMany<T>): readonly T[] {
  return Array.isArray(value) ? (value as readonly T[]) : [value as T];
}

function checkedLengths({ lengths }: VectorInputs, many: boolean): readonly number[] | undefined {
  if (lengths !== undefined && !many) {
    throw invalid(
      "lengths",
      "none, because only a list of sequences has padding",
      "lengths for one sequence",
    );
  }
  return lengths;
}

function rowsOf(field: string, sequences: readonly Sequence[], lengths?: readonly number[]): Rows[] {
  if (sequences.length === 0) throw invalid(field, "at least one sequence", "an empty list");
  if (lengths && lengths.length !== sequences.length) {
    throw invalid("lengths", `${sequences.length} lengths, one per sequence`, lengths.length);
  }
  return sequences.map(({ rows, width, data }, index) => {
    if (data.length !== rows * width) {
      throw invalid(`${field}[${index}]`, `${rows} x ${width} elements`, data.length);
    }
    const valid = lengths?.[index] ?? rows;
    if (!Number.isInteger(valid) || valid < 1 || valid > rows) {
      const [name, expected] = lengths
        ? ["lengths", `integers from 1 to ${rows}, the rows given`]
        : [field, "at least one row"];
      throw invalid(`${name}[${index}]`, expected, valid);
    }
    return { given: rows, valid };
  });
}

/** Concatenates the valid rows of all sequences; a single sequence is not copied. */
function pack(field: string, sequences: readonly Sequence[], rows: readonly Rows[]): VectorSequences {
  const lengths = rows.map((row) => row.valid);
  const width = sequences[0]?.width ?? 0;
  const pieces = sequences.map((sequence, index) => {
    if (sequence.width !== width)
      throw invalid(`${field}[${index}]`, `width ${width}, as in ${field}[0]`, sequence.width);
    return sequence.data.subarray(0, (lengths[index] ?? 0) * width);
  });
  return create(VectorSequencesSchema, {
    dataType: DataType.FP32,
    width,
    lengths,
    data: bytesOf(concatenated(pieces)),
  });
}

function concatenated(pieces: readonly Float32Array[]): Float32Array {
  const [first] = pieces;
  if (first && pieces.length === 1) return first;
  const all = new Float32Array(pieces.reduce((size, piece) => size + piece.length, 0));
  let start = 0;
  for (const piece of pieces) {
    all.set(piece, start);
    start += piece.length;
  }
  return all;
}

function packValues(values: readonly Sequence[], keyRows: readonly Rows[]): VectorSequences {
  const rows = values.map((value) => value.rows);
  if (rows.length !== keyRows.length || rows.some((given, index) => given !== keyRows[index]?.given)) {
    throw invalid(
      "value",
      `as many rows as the key, ${keyRows.map((row) => row.given).join(", ")}`,
      rows.join(", "),
    );
  }
  rowsOf("value", values);
  return pack("value", values, keyRows);
}

function packPositions(
  positions: NonNullable<VectorInputs["positions"]>,
  queryRows: readonly Rows[],
): bigint[] {
  const many = Array.isArray(positions) && typeof positions[0] === "object";
  const sequences = (many ? positions : [positions]) as readonly Integers[];
  if (
    sequences.length !== queryRows.length ||
    sequences.some((own, index) => own.length !== queryRows[index]?.given)
  ) {
    throw invalid(
      "positions",
      "one position for each query row",
      sequences.map((own) => own.length).join(", "),
    );
  }
  return sequences.flatMap((own, index) => bigints("positions", own.slice(0, queryRows[index]?.valid)));
}

function bigints(field: string, numbers: Integers): bigint[] {
  return Array.from(numbers, (number) => {
    if (!Number.isSafeInteger(number)) throw invalid(field, "integers", number);
    return BigInt(number);
  });
}
