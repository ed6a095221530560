/**
 * A bidirectional stream.
 *
 * One task reads the caller's iterable and sends its requests; the caller's task receives the responses. A queue in the
 * order of the requests connects them.
 */

import { create, fromBinary } from "@bufbuild/protobuf";

import { BoundedQueue } from "./bounded_queue.js";
import { serialized, type DuplexCall } from "./connection.js";
import { decodeResult } from "./decoding.js";
import { isMissing } from "./contexts.js";
import { encodeRequest, type EncodedCall, type ResponseShape } from "./encoding.js";
import { AttentionClientError, fromStreamError, unreadable } from "./errors.js";
import {
  AttendStreamRequestSchema,
  AttendStreamResponseSchema,
} from "./generated/attention/v1/attention_pb.js";
import type { AttentionResult, AttentionResults, ComputeOptions, Inputs, StreamItem } from "./values.js";

export interface StreamSettings {
  readonly model: string;
  readonly options: ComputeOptions;
  readonly maxInFlight: number;
  /** Milliseconds to wait for one response; undefined means no limit. */
  readonly idleTimeoutMs: number | undefined;
  /** Answers a request whose context the server did not have, after putting that again. */
  again(sent: EncodedCall): Promise<Outcome>;
}

export type StreamItems = Iterable<StreamItem> | AsyncIterable<StreamItem>;
export type Outcome = AttentionResult | AttentionResults | AttentionClientError;

/** A request that was sent, the error of one that was refused before, or the end of the input or of the call. */
type QueueItem =
  | {
      readonly kind: "sent";
      readonly id: string;
      readonly shape: ResponseShape;
      /** The request, if it has a context, which may have to be put again. */
      readonly again?: EncodedCall;
    }
  | { readonly kind: "refused"; readonly error: AttentionClientError }
  | { readonly kind: "inputEnd"; readonly failure?: unknown }
  | { readonly kind: "callEnd" };

/** Yields the outcome of each request in order. When it is closed, the call is cancelled and reading stops. */
export async function* attendStream(
  call: DuplexCall,
  items: StreamItems,
  settings: StreamSettings,
): AsyncGenerator<Outcome, void, undefined> {
  const queue = new BoundedQueue<QueueItem>(settings.maxInFlight);
  const responses = new Responses(call, settings.idleTimeoutMs);
  call.once("status", () => {
    queue.push({ kind: "callEnd" });
  });
  void send(call, items, queue, settings);
  const digests = new Map<string, string>();
  try {
    for (;;) {
      const item = await queue.first();
      if (item.kind === "inputEnd") {
        if ("failure" in item) throw item.failure;
        await responses.end();
        return;
      }
      let outcome = item.kind === "refused" ? item.error : decode(await responses.next(), item);
      if (item.kind === "sent" && item.again && isMissing(outcome)) {
        outcome = await settings.again(item.again).catch(refused);
      }
      queue.removeFirst();
      if (!(outcome instanceof AttentionClientError)) checkDigest(digests, outcome);
      yield outcome;
    }
  } finally {
    queue.close();
    call.cancel(); // without effect if the call has ended
  }
}

/** Throws an AttentionClientError if another model of the same version has answered before. */
function checkDigest(
  digests: Map<string, string>,
  { modelName, modelVersion, modelDigest }: AttentionResult | AttentionResults,
): void {
  const first = digests.get(modelVersion) ?? modelDigest;
  digests.set(modelVersion, first);
  if (modelDigest === first) return;
  const found = `there are answers with the digests ${first || "unknown"} and ${modelDigest || "unknown"}`;
  throw new AttentionClientError(
    "FAILED_PRECONDITION",
    `model ${modelName} version ${modelVersion} has changed: ${found}. Serve one artifact everywhere, and repeat the stream`,
    { reason: "MODEL_CHANGED" },
  );
}

/** Sends until the items end or the stream is closed; an error of the caller's iterable passes through the queue. */
async function send(
  call: DuplexCall,
  items: StreamItems,
  queue: BoundedQueue<QueueItem>,
  settings: StreamSettings,
): Promise<void> {
  let index = 0;
  try {
    if (!(await queue.room())) return;
    for await (const item of items) {
      const { queueItem, message } = encodeItem(String(index++), item, settings);
      queue.push(queueItem);
      if (message) await written(call, message);
      if (!(await queue.room())) return;
    }
    call.end();
    queue.push({ kind: "inputEnd" });
  } catch (failure) {
    queue.push({ kind: "inputEnd", failure });
  }
}

function encodeItem(
  id: string,
  item: StreamItem,
  { model, options }: StreamSettings,
): { queueItem: QueueItem; message?: Buffer } {
  try {
    const sent = encodeRequest(model, inputsOf(item), options);
    const message = create(AttendStreamRequestSchema, { id, request: sent.request });
    return {
      queueItem: { kind: "sent", id, shape: sent.shape, ...(sent.context && { again: sent }) },
      message: serialized(AttendStreamRequestSchema, message),
    };
  } catch (error) {
    return { queueItem: { kind: "refused", error: refused(error) } };
  }
}

/** The error of a request, which the stream survives; throws others. */
function refused(error: unknown): AttentionClientError {
  if (error instanceof AttentionClientError) return error;
  throw error;
}

function inputsOf(item: StreamItem): Inputs {
  if ("query" in item || "text" in item || "tokenIds" in item) return item;
  return { query: item };
}

function written(call: DuplexCall, message: Buffer): Promise<void> {
  return new Promise((resolve) => {
    call.write(message, () => {
      resolve();
    });
  });
}

function decode(bytes: Buffer | undefined, item: QueueItem): Outcome {
  if (!bytes || item.kind !== "sent") {
    throw new AttentionClientError(
      "UNAVAILABLE",
      "the server ended the stream before all requests were answered",
    );
  }
  const { id, result } = fromBinary(AttendStreamResponseSchema, bytes);
  if (id !== item.id) throw unreadable("id", `it is ${id}; expected ${item.id}`); // the following ones cannot be trusted
  if (result.case === "error") return fromStreamError(result.value);
  if (!result.value) throw unreadable("result", "it is missing");
  try {
    return decodeResult(result.value, item.shape);
  } catch (error) {
    return refused(error);
  }
}

/** The timer of one response, and the error once it has expired. */
interface IdleTimer {
  timer?: NodeJS.Timeout;
  error?: AttentionClientError;
}

/** The responses of a call, each within the idle timeout. */
class Responses {
  readonly #call: DuplexCall;
  readonly #iterator: AsyncIterator<Buffer>;
  readonly #idleTimeoutMs: number | undefined;
  #failure: Error | undefined;

  constructor(call: DuplexCall, idleTimeoutMs: number | undefined) {
    this.#call = call;
    this.#iterator = (call as AsyncIterable<Buffer>)[Symbol.asyncIterator]();
    this.#idleTimeoutMs = idleTimeoutMs;
    // The iterator throws only those errors that are emitted while it waits.
    call.on("error", (error: Error) => {
      this.#failure ??= error;
    });
  }

  /** The next response; undefined if the call has ended without an error, which otherwise is thrown. */
  async next(): Promise<Buffer | undefined> {
    const idle = this.#idleTimer();
    try {
      const found = await this.#iterator.next();
      if (!found.done) return found.value;
    } catch (error) {
      this.#failure ??= error as Error;
    } finally {
      clearTimeout(idle.timer);
    }
    const failure = idle.error ?? this.#failure;
    if (failure) throw failure;
    return undefined;
  }

  /** Lets the server end the call; all responses have arrived, so that a failure changes nothing. */
  async end(): Promise<void> {
    await this.next().catch(() => undefined);
  }

  /** Cancels the call when the idle timeout is over. */
  #idleTimer(): IdleTimer {
    const idle: IdleTimer = {};
    const limit = this.#idleTimeoutMs;
    if (limit === undefined) return idle;
    idle.timer = setTimeout(() => {
      const message = `no response arrived within ${limit} ms while requests were in flight`;
      idle.error = new AttentionClientError("DEADLINE_EXCEEDED", message);
      this.#call.cancel();
    }, limit);
    return idle;
  }
}
