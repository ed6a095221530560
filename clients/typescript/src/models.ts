/** Descriptions of models, as plain values. */

import {
  DataType,
  Model_State as State,
  type Model,
  type Tensor,
} from "./generated/attention/v1/attention_pb.js";

/** Names of element types, as NumPy has them. */
export const DATA_TYPES: Partial<Record<DataType, string>> = {
  [DataType.FP32]: "float32",
  [DataType.FP16]: "float16",
  [DataType.BF16]: "bfloat16",
  [DataType.INT64]: "int64",
  [DataType.BOOL]: "bool",
  [DataType.STRING]: "string",
};

/** A named input or output of a model. */
export interface TensorInfo {
  /** Name, as in the ONNX graph. */
  readonly name: string;
  /** Element type, such as "float32"; "unknown" if the client is older than the server. */
  readonly dataType: string;
  /** Outermost first: the size of a fixed axis, or the name of an axis whose size varies. */
  readonly axes: readonly (string | number)[];
  /** For an input, whether a request may omit it; for an output, whether it is returned on request only. */
  readonly optional: boolean;
  /** Largest sizes that the model accepts, by the name of the axis. */
  readonly maxLengths: Readonly<Record<string, number>>;
  /** Smallest sizes that the model accepts, by the name of the axis. */
  readonly minLengths: Readonly<Record<string, number>>;
  /** What sizes must be a multiple of, by the name of the axis. */
  readonly lengthMultiples: Readonly<Record<string, number>>;
  /** Ids are from 0 to below this number, or to below one number for each column; empty if any integer is accepted. */
  readonly exclusiveUpperBounds: readonly number[];
}

/** The tolerance to the judge's results: |served - judge's| <= absolute + relative * |judge's|. */
export interface ParityInfo {
  readonly relativeTolerance: number;
  readonly absoluteTolerance: number;
  /** Largest |served - judge's| that the server measured on its own hardware. */
  readonly measuredMaxAbsError: number;
  /** What computed the golden vectors, such as eager PyTorch; empty if the server does not say it. */
  readonly judge: string;
}

/** Floating-point operations of a model; a multiply-add counts as two. */
export interface CostInfo {
  readonly flopsPerQuery: number;
  readonly flopsPerKey: number;
  readonly flopsPerPair: number;
}

/** Which keys a query row may attend to, by the rule of the model itself. */
export interface PatternInfo {
  /** Whether a query row attends only to keys up to its own position. */
  readonly causal: boolean;
  /** A query row attends only to keys fewer than this many rows away; 0 if the distance does not matter. */
  readonly window: number;
}

/** One version of one model. */
export interface ModelInfo {
  readonly name: string;
  readonly version: string;
  readonly state: "ready" | "failed" | "unknown";
  /** Why the model is not ready; empty if it is. */
  readonly stateReason: string;
  readonly description: string;
  readonly inputs: readonly TensorInfo[];
  readonly outputs: readonly TensorInfo[];
  /** Undefined for a module without attention weights. */
  readonly numHeads: number | undefined;
  /** Whether a query row cannot attend to keys after its own position. */
  readonly causal: boolean;
  readonly acceptsText: boolean;
  readonly parity: ParityInfo | undefined;
  /** Number of trainable parameters. */
  readonly parameters: number;
  readonly cost: CostInfo | undefined;
  /** Execution provider of ONNX Runtime. */
  readonly provider: string;
  /** The rule of each layer of a text encoder, or that of a single attention module. */
  readonly attentionPatterns: readonly PatternInfo[];
  /**
   * Identifies what the server has loaded: SHA-256 of the artifact's manifest, in hexadecimal digits; empty if the
   * model is not ready.
   */
  readonly digest: string;
  /** Name of the output with attention weights, which `returnWeights` returns; empty if there is none. */
  readonly attentionWeights: string;
}

export function modelInfo(model: Model): ModelInfo {
  const { parity, cost } = model;
  return {
    name: model.name,
    version: model.version,
    state: stateName(model.state),
    stateReason: model.stateReason,
    description: model.description,
    inputs: model.inputs.map(tensorInfo),
    outputs: model.outputs.map(tensorInfo),
    numHeads: model.numHeads || undefined,
    causal: model.causal,
    acceptsText: model.acceptsText,
    parity: parity && {
      relativeTolerance: parity.relativeTolerance,
      absoluteTolerance: parity.absoluteTolerance,
      measuredMaxAbsError: parity.measuredMaxAbsError,
      judge: parity.judge,
    },
    parameters: Number(model.parameters),
    cost: cost && {
      flopsPerQuery: Number(cost.flopsPerQuery),
      flopsPerKey: Number(cost.flopsPerKey),
      flopsPerPair: Number(cost.flopsPerPair),
    },
    provider: model.provider,
    attentionPatterns: model.attentionPatterns.map(({ causal, window }) => ({ causal, window })),
    digest: model.digest,
    attentionWeights: model.attentionWeights,
  };
}

function stateName(state: State): ModelInfo["state"] {
  if (state === State.READY) return "ready";
  return state === State.FAILED ? "failed" : "unknown";
}

function tensorInfo({ name, dataType, axes, optional, exclusiveUpperBounds }: Tensor): TensorInfo {
  const limits = (limit: "maxLength" | "minLength" | "lengthMultiple") =>
    Object.fromEntries(
      axes.filter((axis) => axis[limit] > 0n).map((axis) => [axis.name, Number(axis[limit])]),
    );
  return {
    name,
    dataType: DATA_TYPES[dataType] ?? "unknown",
    axes: axes.map((axis) => axis.name || Number(axis.size)),
    optional,
    maxLengths: limits("maxLength"),
    minLengths: limits("minLength"),
    lengthMultiples: limits("lengthMultiple"),
    exclusiveUpperBounds: exclusiveUpperBounds.map(Number),
  };
}
