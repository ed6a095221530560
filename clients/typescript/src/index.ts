/**
 * A client of the attention inference service. The names exported here are its public interface.
 *
 * ```ts
 * import { AttentionClient, sequence } from "attention-client";
 *
 * const client = new AttentionClient("127.0.0.1:8001");
 * const { contextVectors } = await client.attend("self-attention", sequence([[0.1, 0.2], [0.3, 0.4]]));
 * client.close();
 * ```
 */

export { AttentionClient } from "./client.js";
export type { Context } from "./contexts.js";
export { AttentionClientError, type Code, type ErrorDetails } from "./errors.js";
export type { CostInfo, ModelInfo, ParityInfo, PatternInfo, TensorInfo } from "./models.js";
export type { ClientOptions } from "./settings.js";
export {
  sequence,
  type AttendOptions,
  type AttendTextOptions,
  type AttentionResult,
  type AttentionResults,
  type AttentionWeights,
  type CallOptions,
  type ComputeOptions,
  type ContextOptions,
  type EmbeddingResult,
  type EmbedOptions,
  type InferOptions,
  type InferResult,
  type Integers,
  type Mask,
  type ResultOf,
  type RowOptions,
  type Sequence,
  type StoredContext,
  type StreamItem,
  type StreamOptions,
  type Tensor,
  type TextInputs,
  type TokenInputs,
  type VectorInputs,
} from "./values.js";
