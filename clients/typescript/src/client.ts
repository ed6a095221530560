/** The client: its public methods. */

import { create } from "@bufbuild/protobuf";

import { Connection } from "./connection.js";
import { Context } from "./contexts.js";
import { decodeResult } from "./decoding.js";
import { decodeEmbeddings, encodeEmbeddings } from "./embeddings.js";
import { encodeRequest, listOf, type EncodedCall } from "./encoding.js";
import { AttentionClientError } from "./errors.js";
import {
  AttentionService,
  GetModelRequestSchema,
  ListModelsRequestSchema,
} from "./generated/attention/v1/attention_pb.js";
import { modelInfo, type ModelInfo } from "./models.js";
import { decodeInfer, encodeInfer } from "./named.js";
import { count, type ClientOptions } from "./settings.js";
import { attendStream, type Outcome } from "./stream.js";
import type {
  AttendOptions,
  AttendTextOptions,
  AttentionResult,
  AttentionResults,
  CallOptions,
  ComputeOptions,
  ContextOptions,
  EmbeddingResult,
  EmbedOptions,
  InferOptions,
  InferResult,
  InKind,
  Inputs,
  Integers,
  OneOrMany,
  ResultOf,
  Sequence,
  StreamItem,
  StreamOptions,
  Tensor,
} from "./values.js";

const { attend, attendStream: stream, listModels, getModel } = AttentionService.method;
const DEFAULT_MAX_IN_FLIGHT = 64;

/**
 * Computes context vectors on an attention server.
 *
 * Every error is an AttentionClientError. A call that fails with UNAVAILABLE is repeated with exponential backoff; one
 * that fails with RESOURCE_EXHAUSTED is repeated after the delay that the server states (google.rpc.RetryInfo). Both end
 * after `maxRetries` repetitions, or if the next would begin after the call's deadline.
 */
export class AttentionClient {
  readonly #connection: Connection;

  /** `target` is HOST:PORT or another target of gRPC's, such as `unix:PATH` or `dns:///HOST:PORT`. */
  constructor(target = "127.0.0.1:8001", options: ClientOptions = {}) {
    this.#connection = new Connection(target, options);
  }

  /** Closes the connection. Calls in progress and later calls fail with CANCELLED. */
  close(): void {
    this.#connection.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /** Computes context vectors of one sequence, or of a list of sequences of any lengths; the result has the query's form. */
  async attend<Form extends OneOrMany<Sequence>>(
    model: string,
    query: Form,
    options: AttendOptions<Form> = {},
  ): Promise<ResultOf<Form>> {
    return (await this.#attend(model, { ...options, query }, options)) as ResultOf<Form>;
  }

  /** Computes self-attention over the tokens of one text or of a list of texts. */
  async attendText<Form extends OneOrMany<string>>(
    model: string,
    text: Form,
    options: AttendTextOptions<Form> = {},
  ): Promise<ResultOf<Form>> {
    return (await this.#attend(model, { text, mask: options.mask }, options)) as ResultOf<Form>;
  }

  /** Computes self-attention over the token ids of one sequence or of a list of sequences. */
  async attendTokens<Form extends OneOrMany<Integers>>(
    model: string,
    tokenIds: Form,
    options: AttendTextOptions<Form> = {},
  ): Promise<ResultOf<Form>> {
    return (await this.#attend(model, { tokenIds, mask: options.mask }, options)) as ResultOf<Form>;
  }

  /** Computes one embedding for one text or for each of a list of texts, with a text encoder. */
  async embed<Form extends OneOrMany<string>>(
    model: string,
    text: Form,
    options: EmbedOptions = {},
  ): Promise<EmbeddingResult<Form>> {
    const texts = listOf<string>(text);
    const request = encodeEmbeddings(model, texts, options);
    const result = decodeEmbeddings(await this.#connection.unary(attend, request, options), texts.length);
    const embeddings = Array.isArray(text) ? result.embeddings : result.embeddings.data;
    return { ...result, embeddings } as EmbeddingResult<Form>;
  }

  /**
   * Computes any model's outputs from its inputs, by the names that `model()` lists.
   *
   * An input is one sequence without the batch axis, a batch with it, or a list of sequences of any lengths; the outputs
   * have the same form.
   */
  async infer<Input extends OneOrMany<Tensor | Sequence>>(
    model: string,
    inputs: Readonly<Record<string, Input>>,
    options: InferOptions = {},
  ): Promise<InferResult<InKind<Input, Tensor>>> {
    const { request, count: sequences } = encodeInfer(model, inputs, options);
    const response = await this.#connection.unary(attend, request, options);
    return decodeInfer(response, sequences) as InferResult<InKind<Input, Tensor>>;
  }

  /** Stores key rows, and value rows for models that take them apart, as a context for the option `context` of calls. */
  async context(model: string, key: Sequence, options: ContextOptions = {}): Promise<Context> {
    return Context.put(this.#connection, model, key, options);
  }

  /** Lists the caller's contexts of a model and those that others share, the most recently used ones first. */
  async contexts(
    model: string,
    options: CallOptions & { version?: string | number } = {},
  ): Promise<Context[]> {
    return Context.list(this.#connection, model, options);
  }

  /**
   * Computes context vectors for many requests on one stream; yields their results in order.
   *
   * At most `maxInFlight` requests are read ahead of the results, so the input may be endless. An error that it throws is
   * thrown here, after the results of the requests before it. Leaving the loop cancels the call. `timeoutMs` bounds the
   * whole stream; without it, the client's bounds the wait for each result. The stream is repeated only until its first
   * response.
   */
  attendStream<Item extends StreamItem>(
    model: string,
    requests: Iterable<Item> | AsyncIterable<Item>,
    options: StreamOptions & { returnErrors: true },
  ): AsyncGenerator<ResultOf<Item> | AttentionClientError, void, undefined>;
  attendStream<Item extends StreamItem>(
    model: string,
    requests: Iterable<Item> | AsyncIterable<Item>,
    options?: StreamOptions,
  ): AsyncGenerator<ResultOf<Item>, void, undefined>;
  async *attendStream(
    model: string,
    requests: Iterable<StreamItem> | AsyncIterable<StreamItem>,
    options: StreamOptions = {},
  ): AsyncGenerator<Outcome, void, undefined> {
    const maxInFlight = count("maxInFlight", options.maxInFlight ?? DEFAULT_MAX_IN_FLIGHT, 1);
    const { call, idleTimeoutMs } = this.#connection.open(stream, options);
    try {
      for await (const outcome of attendStream(call, requests, {
        model,
        options,
        maxInFlight,
        idleTimeoutMs,
        again: (sent) => this.#answer(sent, { signal: options.signal }),
      })) {
        if (outcome instanceof AttentionClientError && !options.returnErrors) throw outcome;
        yield outcome;
      }
    } catch (error) {
      throw this.#connection.refined(error, options.timeoutMs);
    }
  }

  /** Lists all models, including those that failed to load, sorted by name and then by version. */
  async models(options: CallOptions = {}): Promise<ModelInfo[]> {
    const { models } = await this.#connection.unary(listModels, create(ListModelsRequestSchema), options);
    return models.map(modelInfo);
  }

  /** Describes one model; without a version, the highest that is ready. */
  async model(name: string, options: CallOptions & { version?: string | number } = {}): Promise<ModelInfo> {
    const request = create(GetModelRequestSchema, { name, version: String(options.version ?? "") });
    const { model } = await this.#connection.unary(getModel, request, options);
    if (!model) throw new AttentionClientError("INTERNAL", "the server's response does not describe a model");
    return modelInfo(model);
  }

  async #attend(
    model: string,
    inputs: Inputs,
    options: ComputeOptions,
  ): Promise<AttentionResult | AttentionResults> {
    return this.#answer(encodeRequest(model, inputs, options), options);
  }

  async #answer(
    { request, shape, context }: EncodedCall,
    options: CallOptions,
  ): Promise<AttentionResult | AttentionResults> {
    const call = () => this.#connection.unary(attend, request, options);
    if (!context) return decodeResult(await call(), shape);
    const response = await context.use(() => {
      request.contextId = context.id; // another one if the model has been loaded again
      return call();
    });
    return decodeResult(response, shape);
  }
}
