/** Encodes calls for embeddings, and decodes their responses. */

import { create } from "@bufbuild/protobuf";

import { decodeResult } from "./decoding.js";
import { invalid, unreadable } from "./errors.js";
import {
  AttendRequestSchema,
  DataType,
  EmbeddingOptionsSchema,
  TextSequencesSchema,
  type AttendRequest,
  type AttendResponse,
} from "./generated/attention/v1/attention_pb.js";
import { count } from "./settings.js";
import type { EmbeddingResult, EmbedOptions, Sequence } from "./values.js";

/** Encodes one request; throws an AttentionClientError if an argument is wrong. */
export function encodeEmbeddings(
  model: string,
  texts: readonly string[],
  { version, prompt, dimensions, truncate }: EmbedOptions,
): AttendRequest {
  if (texts.length === 0) throw invalid("texts", "at least one text", "an empty list");
  return create(AttendRequestSchema, {
    modelName: model,
    modelVersion: String(version ?? ""),
    queryInput: { case: "text", value: create(TextSequencesSchema, { texts: [...texts], prompt, truncate }) },
    embedding: create(EmbeddingOptionsSchema, {
      dimensions: dimensions === undefined ? 0 : count("dimensions", dimensions, 1),
    }),
    outputDataType: DataType.FP32,
  });
}

/** Decodes the response to a list of texts, one row for each. */
export function decodeEmbeddings(
  response: AttendResponse,
  texts: number,
): EmbeddingResult<readonly string[]> {
  const shape = { many: true, count: texts, queryRows: undefined, keyRows: undefined };
  const { contextVectors, modelName, modelVersion, modelDigest } = decodeResult(response, shape);
  const rows = contextVectors as readonly Sequence[];
  const [first] = rows;
  if (!first || rows.some((row) => row.rows !== 1)) {
    throw unreadable("context_vectors", "it does not have one vector for each text");
  }
  const { width } = first;
  const data = new Float32Array(rows.length * width);
  rows.forEach((row, index) => {
    data.set(row.data, index * width);
  });
  const truncated = [...response.truncated];
  const embeddings = { data, rows: rows.length, width };
  return { embeddings, truncated, modelName, modelVersion, modelDigest };
}
