/** The values that calls take and return. Every array is row-major. */

/** One sequence of vectors: `rows * width` elements. */
export interface Sequence {
  readonly data: Float32Array;
  readonly rows: number;
  readonly width: number;
}

/** A tensor of any number of axes: float32, int64 or bool. Integers may be given with 32 bits; outputs have 64. */
export interface Tensor {
  readonly data: Float32Array | BigInt64Array | Int32Array | Uint32Array | readonly boolean[];
  readonly shape: readonly number[];
}

/** Attention weights of one sequence: `heads * queryRows * keyRows` elements. */
export interface AttentionWeights {
  readonly data: Float32Array;
  readonly heads: number;
  readonly queryRows: number;
  readonly keyRows: number;
}

/**
 * Which keys may be attended to: 1 or true means that the query row may attend to the key.
 *
 * `data` has `keyRows` elements, which hold for every query row and head; with `queryRows`, one such row for each
 * query row; with `heads` as well, one such matrix for each head.
 */
export interface Mask {
  readonly data: Uint8Array | readonly boolean[];
  readonly keyRows: number;
  readonly queryRows?: number;
  readonly heads?: number;
}

/** Integers of one sequence: token ids or positions. */
export type Integers = readonly number[] | Int32Array | Uint32Array;

export type OneOrMany<T> = T | readonly T[];

type Many = readonly object[] | readonly string[];

/** A list of T if `Form` is a list, otherwise one T. */
export type InKind<Form, T> = Form extends Many ? readonly T[] : T;

/** A stored context, as calls need it: a `Context` of the client. */
export interface StoredContext {
  readonly id: string;
  readonly modelName: string;
  /** The version that its caller gave; empty for the highest that is ready. */
  readonly version: string;
  /** Makes a call that uses `id`, and repeats it after putting the rows again if the server does not have them. */
  use<Result>(call: () => Promise<Result>): Promise<Result>;
}

/** The options of `attend` that belong to its inputs. */
export interface VectorOptions<Form> {
  /** For cross-attention: one sequence or as many sequences as the query has. */
  key?: InKind<Form, Sequence> | undefined;
  /** For models that separate it from the key: as many rows as the key. */
  value?: InKind<Form, Sequence> | undefined;
  /** Which keys may be attended to; by default all. Masks of a list have the same axes. */
  mask?: InKind<Form, Mask> | undefined;
  /**
   * For a list of padded sequences: valid rows of each key sequence; in self-attention, of each sequence. The other rows
   * are not sent, and their results are zeros.
   */
  lengths?: readonly number[] | undefined;
  /**
   * For models with rotary position embedding, and with a context: the position of each query row. By default they count
   * from 0; in self-attention with a context, the query rows are its last rows.
   */
  positions?: InKind<Form, Integers> | undefined;
  /** A stored context, or the id of one, in place of key and value. */
  context?: StoredContext | string | undefined;
}

/** One request of a stream: the inputs of `attend`. */
export interface VectorInputs<
  Form extends OneOrMany<Sequence> = OneOrMany<Sequence>,
> extends VectorOptions<Form> {
  query: Form;
}

/** One request of a stream: the inputs of `attendText`. */
export interface TextInputs<Form extends OneOrMany<string> = OneOrMany<string>> {
  text: Form;
  mask?: InKind<Form, Mask> | undefined;
}

/** One request of a stream: the inputs of `attendTokens`. */
export interface TokenInputs<Form extends OneOrMany<Integers> = OneOrMany<Integers>> {
  tokenIds: Form;
  mask?: InKind<Form, Mask> | undefined;
}

export type Inputs = VectorInputs | TextInputs | TokenInputs;

/** One request of a stream; a query alone stands for `{ query }`. */
export type StreamItem = Inputs | OneOrMany<Sequence>;

/** The result for one sequence. */
export interface AttentionResult {
  /** One row for each query row. */
  readonly contextVectors: Sequence;
  /** Undefined unless the call set `returnWeights`. */
  readonly attentionWeights: AttentionWeights | undefined;
  readonly modelName: string;
  readonly modelVersion: string;
  /** Digest of the model that computed the result; see `ModelInfo`. */
  readonly modelDigest: string;
}

/** The result for a list of sequences, in their order. The arrays are views of one buffer. */
export interface AttentionResults {
  readonly contextVectors: readonly Sequence[];
  /** Undefined unless the call set `returnWeights`. */
  readonly attentionWeights: readonly AttentionWeights[] | undefined;
  readonly modelName: string;
  readonly modelVersion: string;
  /** Digest of the model that computed the result; see `ModelInfo`. */
  readonly modelDigest: string;
}

/** The result of a query, a text or token ids, or of a stream's request with them: it has the form of its input. */
export type ResultOf<Item> = Item extends
  { query: infer Form } | { text: infer Form } | { tokenIds: infer Form }
  ? ResultOf<Form>
  : Item extends Many
    ? AttentionResults
    : AttentionResult;

/** Options of every call. */
export interface CallOptions {
  /** Milliseconds that the call with its retries may take; by default the client's. */
  timeoutMs?: number | undefined;
  /** Cancels the call. */
  signal?: AbortSignal | undefined;
}

/** Options of calls that compute. */
export interface ComputeOptions extends CallOptions {
  /** Whether to return the attention weights as well. */
  returnWeights?: boolean | undefined;
  /** Version of the model; by default the highest that is ready. */
  version?: string | number | undefined;
}

export interface AttendOptions<Form> extends VectorOptions<Form>, ComputeOptions {}

export interface AttendTextOptions<Form> extends ComputeOptions {
  /** Which tokens may be attended to; `keyRows` and `queryRows` are the number of tokens. */
  mask?: InKind<Form, Mask> | undefined;
}

export interface RowOptions extends CallOptions {
  /** For models that separate it from the key: as many rows as the key. */
  value?: Sequence | undefined;
  /** Which rows may be attended to: one element for each; a row that is false is hidden from every query. */
  mask?: Mask | undefined;
}

/** Rows of a context. */
export type ContextRows = Pick<RowOptions, "value" | "mask"> & { readonly key: Sequence };

export interface ContextOptions extends RowOptions {
  /** Seconds until it expires; by default the server's, an hour. */
  ttlSeconds?: number | undefined;
  /** Whether callers with other identities may use it. */
  shared?: boolean | undefined;
  /** Version of the model; by default the highest that is ready. */
  version?: string | number | undefined;
}

export interface EmbedOptions extends CallOptions {
  /** Name of the prompt that is put before each text, "" for none; by default the model's own. */
  prompt?: string | undefined;
  /** Number of leading elements that are returned; by default all. The model lists what it allows. */
  dimensions?: number | undefined;
  /** Whether long texts are cut rather than refused; by default the model's setting. */
  truncate?: boolean | undefined;
  /** Version of the model; by default the highest that is ready. */
  version?: string | number | undefined;
}

export interface InferOptions extends CallOptions {
  /** Names of the outputs to return; by default those that are not optional. */
  outputs?: readonly string[] | undefined;
  /** Version of the model; by default the highest that is ready. */
  version?: string | number | undefined;
}

/** The outputs of one call by name. */
export interface InferResult<Output = Tensor> {
  /** A tensor with the axes of the inputs' form; if an input is a list, one tensor for each sequence. */
  readonly outputs: Readonly<Record<string, Output>>;
  readonly modelName: string;
  readonly modelVersion: string;
  /** Digest of the model that computed the result; see `ModelInfo`. */
  readonly modelDigest: string;
}

/** Embeddings of one text, or of a list of texts with one row for each. */
export interface EmbeddingResult<Form> {
  readonly embeddings: Form extends readonly string[] ? Sequence : Float32Array;
  /** Indices of the texts that were cut to the tokens that the model takes. */
  readonly truncated: readonly number[];
  readonly modelName: string;
  readonly modelVersion: string;
  /** Digest of the model that computed the result; see `ModelInfo`. */
  readonly modelDigest: string;
}

export interface StreamOptions extends ComputeOptions {
  /** Largest number of requests that are read and not yet answered; 64 by default. */
  maxInFlight?: number | undefined;
  /** Whether to yield the error of a refused request in place of its result, rather than throw it. */
  returnErrors?: boolean | undefined;
}

/** A sequence from nested numbers, `rows[i][j]`; all rows have the same width. */
export function sequence(rows: readonly ArrayLike<number>[]): Sequence {
  const width = rows[0]?.length ?? 0;
  const data = new Float32Array(rows.length * width);
  rows.forEach((row, index) => {
    if (row.length !== width) {
      throw new RangeError(`row ${index} has ${row.length} elements; expected ${width}, as in row 0`);
    }
    data.set(row, index * width);
  });
  return { data, rows: rows.length, width };
}
