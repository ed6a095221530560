/** Encodes inputs by name, of any type and number of axes, and decodes outputs by name. */

import { create } from "@bufbuild/protobuf";

import { listOf } from "./encoding.js";
import { invalid, unreadable } from "./errors.js";
import {
  AttendRequestSchema,
  DataType,
  NamedTensorsSchema,
  type AttendRequest,
  type AttendResponse,
  type NamedTensors,
} from "./generated/attention/v1/attention_pb.js";
import { DATA_TYPES } from "./models.js";
import type { InferOptions, InferResult, OneOrMany, Sequence, Tensor } from "./values.js";

export type NamedInputs = Readonly<Record<string, OneOrMany<Tensor | Sequence>>>;

/** A request, and the number of sequences of its lists; undefined if no input is a list. */
export interface EncodedInfer {
  readonly request: AttendRequest;
  readonly count: number | undefined;
}

/** Encodes one request; throws an AttentionClientError that names the input if one is wrong. */
export function encodeInfer(model: string, inputs: NamedInputs, options: InferOptions): EncodedInfer {
  const entries = Object.entries(inputs);
  if (entries.length === 0) throw invalid("inputs", "an object of names and tensors", "none");
  const lists = entries.filter(([, value]) => Array.isArray(value));
  const [first] = lists;
  const count = first && listOf(first[1]).length;
  for (const [name, value] of lists) {
    const found = listOf(value).length;
    if (found !== count)
      throw invalid(name, `as many sequences as ${first?.[0] ?? ""}, ${count ?? 0}`, found);
  }
  const request = create(AttendRequestSchema, {
    modelName: model,
    modelVersion: String(options.version ?? ""),
    outputDataType: DataType.FP32,
    inputs: entries.map(([name, value]) => encodeTensors(name, listOf(value))),
    outputNames: [...(options.outputs ?? [])],
  });
  return { request, count };
}

function encodeTensors(name: string, tensors: readonly (Tensor | Sequence)[]): NamedTensors {
  const [first] = tensors;
  if (!first) throw invalid(name, "at least one sequence", "an empty list");
  const rank = shapeOf(first).length;
  const dataType = typeOf(first);
  const pieces = tensors.map((tensor, index) => {
    const shape = shapeOf(tensor);
    const where = tensors.length > 1 ? `${name}[${index}]` : name;
    if (shape.length !== rank || typeOf(tensor) !== dataType) {
      throw invalid(
        where,
        `${rank} axes of ${DATA_TYPES[dataType] ?? ""}, as ${name}[0]`,
        `${shape.length} axes of ${DATA_TYPES[typeOf(tensor)] ?? ""}`,
      );
    }
    if (tensor.data.length !== sizeOf(shape))
      throw invalid(where, `${sizeOf(shape)} elements, as its shape states`, tensor.data.length);
    return bytesOf(tensor.data);
  });
  return create(NamedTensorsSchema, {
    name,
    dataType,
    numTensors: tensors.length,
    shapes: tensors.flatMap(shapeOf),
    data: new Uint8Array(Buffer.concat(pieces)),
  });
}

function shapeOf(tensor: Tensor | Sequence): readonly number[] {
  return "shape" in tensor ? tensor.shape : [tensor.rows, tensor.width];
}

function sizeOf(shape: readonly number[]): number {
  return shape.reduce((size, axis) => size * axis, 1);
}

function typeOf({ data }: Tensor | Sequence): DataType {
  if (Array.isArray(data)) return DataType.BOOL;
  return data instanceof Float32Array ? DataType.FP32 : DataType.INT64;
}

function bytesOf(data: Tensor["data"]): Uint8Array {
  if (Array.isArray(data)) return Uint8Array.from(data as readonly boolean[], Number);
  const wide =
    data instanceof Int32Array || data instanceof Uint32Array
      ? BigInt64Array.from(data, BigInt)
      : (data as Float32Array | BigInt64Array);
  return new Uint8Array(wide.buffer, wide.byteOffset, wide.byteLength);
}

/** Decodes a response; throws an AttentionClientError if it contradicts itself or the request. */
export function decodeInfer(
  { outputs, modelName, modelVersion, modelDigest }: AttendResponse,
  count: number | undefined,
): InferResult<OneOrMany<Tensor>> {
  if (outputs.length === 0) throw unreadable("outputs", "it has none");
  const named = outputs.map((output) => [output.name, decodeTensors(output, count)] as const);
  return { outputs: Object.fromEntries(named), modelName, modelVersion, modelDigest };
}

function decodeTensors(message: NamedTensors, count: number | undefined): OneOrMany<Tensor> {
  const { name, numTensors, shapes } = message;
  if (numTensors !== (count ?? 1))
    throw unreadable(name, `it contains ${numTensors} tensors; the request has ${count ?? 1}`);
  const rank = shapes.length / numTensors;
  const all = elementsOf(message);
  let end = 0;
  const tensors = Array.from({ length: numTensors }, (_, index): Tensor => {
    const shape = shapes.slice(index * rank, (index + 1) * rank);
    return { data: all.slice(end, (end += sizeOf(shape))), shape };
  });
  if (!Number.isInteger(rank) || end !== all.length)
    throw unreadable(name, `its ${all.length} elements are not the ${end} of its shapes`);
  const [only] = tensors;
  return count === undefined && only ? only : tensors;
}

/** A copy of the elements: the bytes of a message lie at any offset of their buffer. */
function elementsOf({ name, dataType, data }: NamedTensors): Float32Array | BigInt64Array | boolean[] {
  if (dataType === DataType.BOOL) return Array.from(data, Boolean);
  const type = dataType === DataType.FP32 ? Float32Array : BigInt64Array;
  if (dataType !== DataType.FP32 && dataType !== DataType.INT64)
    throw unreadable(name, `its data type is ${dataType}; expected FP32, INT64 or BOOL`);
  if (data.byteLength % type.BYTES_PER_ELEMENT)
    throw unreadable(name, `${data.byteLength} bytes are not a whole number of elements`);
  return new type(new Uint8Array(data).buffer);
}
