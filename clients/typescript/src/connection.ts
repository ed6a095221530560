/** A channel to a server, and what every call on it has in common: metadata, deadline, retries, cancellation. */

import { setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";

import {
  fromBinary,
  toBinary,
  type DescMessage,
  type DescMethodBiDiStreaming,
  type DescMethodUnary,
  type MessageShape,
} from "@bufbuild/protobuf";
import { Client, connectivityState, type ClientDuplexStream } from "@grpc/grpc-js";

import { AttentionClientError, fromServiceError, isServiceError } from "./errors.js";
import {
  connectionSettings,
  FIRST_BACKOFF_MS,
  MAX_BACKOFF_MS,
  milliseconds,
  type ClientOptions,
  type ConnectionSettings,
} from "./settings.js";
import type { CallOptions } from "./values.js";

export type DuplexCall = ClientDuplexStream<Buffer, Buffer>;

export class Connection {
  readonly #settings: ConnectionSettings;
  readonly #client: Client;
  readonly #closed = new AbortController();

  constructor(target: string, options: ClientOptions) {
    this.#settings = connectionSettings(target, options);
    const { credentials, channelOptions } = this.#settings;
    this.#client = new Client(target, credentials, channelOptions);
    setMaxListeners(0, this.#closed.signal); // one for each call in progress
  }

  close(): void {
    this.#closed.abort();
    this.#client.close();
  }

  /**
   * Makes a call. It is repeated if the server is unavailable, or refuses it and says when to repeat it, until the
   * retries are used up or the next would begin after the deadline.
   */
  async unary<Request extends DescMethodUnary["input"], Response extends DescMethodUnary["output"]>(
    method: DescMethodUnary<Request, Response>,
    request: MessageShape<Request>,
    options: CallOptions,
  ): Promise<MessageShape<Response>> {
    const timeoutMs = milliseconds(options.timeoutMs, this.#settings.timeoutMs);
    const deadline = Date.now() + timeoutMs;
    const signal = this.#signal(options.signal);
    const bytes = serialized(method.input, request); // now, so that the caller may reuse its arrays
    for (let attempt = 0; ; attempt++) {
      try {
        return fromBinary(method.output, await this.#attempt(pathOf(method), bytes, deadline, signal));
      } catch (error) {
        const delay = retryDelay(error, attempt);
        if (delay === undefined || attempt >= this.#settings.maxRetries || Date.now() + delay >= deadline) {
          throw this.refined(error, timeoutMs);
        }
        await this.#pause(delay, signal);
      }
    }
  }

  /** Opens a stream; without a timeout, its responses have `idleTimeoutMs` each. */
  open(
    method: DescMethodBiDiStreaming,
    options: CallOptions,
  ): { call: DuplexCall; idleTimeoutMs: number | undefined } {
    const signal = this.#signal(options.signal);
    this.#refuseAborted();
    const timeoutMs =
      options.timeoutMs === undefined ? undefined : milliseconds(options.timeoutMs, this.#settings.timeoutMs);
    const deadline = timeoutMs === undefined ? Infinity : Date.now() + timeoutMs;
    const call = this.#client.makeBidiStreamRequest<Buffer, Buffer>(
      pathOf(method),
      same,
      same,
      this.#settings.metadata,
      { deadline },
    );
    const stop = cancelOnAbort(call, signal);
    call.once("status", stop);
    return { call, idleTimeoutMs: timeoutMs === undefined ? this.#settings.timeoutMs : undefined };
  }

  /** The error to throw, with what the connection knows and the call's status does not. */
  refined(error: unknown, timeoutMs?: number): unknown {
    const found = isServiceError(error) ? fromServiceError(error) : error;
    if (!(found instanceof AttentionClientError)) return found;
    if (found.code === "CANCELLED" && this.#closed.signal.aborted) return clientClosed();
    if (found.code !== "DEADLINE_EXCEEDED" || found.reason || timeoutMs === undefined) return found;
    if (this.#client.getChannel().getConnectivityState(false) !== connectivityState.READY) {
      return new AttentionClientError(
        "UNAVAILABLE",
        `no connection to ${this.#settings.target} within ${timeoutMs} ms`,
        {},
        { cause: error },
      );
    }
    const message = `${this.#settings.target} did not answer within ${timeoutMs} ms`;
    return new AttentionClientError(
      "DEADLINE_EXCEEDED",
      message,
      { reason: "DEADLINE_EXCEEDED" },
      { cause: error },
    );
  }

  #attempt(path: string, bytes: Buffer, deadline: number, signal: AbortSignal): Promise<Buffer> {
    this.#refuseAborted();
    return new Promise((resolve, reject) => {
      const call = this.#client.makeUnaryRequest<Buffer, Buffer>(
        path,
        same,
        same,
        bytes,
        this.#settings.metadata,
        { deadline },
        (error, response) => {
          stop();
          if (response) resolve(response);
          else reject(error ?? new Error("gRPC ended the call without a result"));
        },
      );
      const stop = cancelOnAbort(call, signal);
    });
  }

  async #pause(delay: number, signal: AbortSignal): Promise<void> {
    try {
      await sleep(delay, undefined, { signal });
    } catch (error) {
      throw this.#closed.signal.aborted ? clientClosed() : cancelled(error);
    }
  }

  #signal(own: AbortSignal | undefined): AbortSignal {
    return own ? AbortSignal.any([own, this.#closed.signal]) : this.#closed.signal;
  }

  #refuseAborted(): void {
    if (this.#closed.signal.aborted) throw clientClosed();
  }
}

/** Milliseconds until a call is repeated; undefined if repeating it does not help. */
function retryDelay(error: unknown, attempt: number): number | undefined {
  if (!isServiceError(error)) return undefined;
  const { code, retryAfterMs } = fromServiceError(error);
  // RESOURCE_EXHAUSTED without RetryInfo is final, such as for a message that is too large.
  if (code !== "UNAVAILABLE" && (code !== "RESOURCE_EXHAUSTED" || retryAfterMs === undefined))
    return undefined;
  const backoff = Math.min(FIRST_BACKOFF_MS * 2 ** attempt, MAX_BACKOFF_MS);
  return Math.max(retryAfterMs ?? 0, backoff) * (1 + 0.2 * Math.random()); // so that clients do not retry in step
}

function cancelOnAbort(call: { cancel(): void }, signal: AbortSignal): () => void {
  const cancel = () => {
    call.cancel();
  };
  if (signal.aborted) cancel();
  signal.addEventListener("abort", cancel, { once: true });
  return () => {
    signal.removeEventListener("abort", cancel);
  };
}

function clientClosed(): AttentionClientError {
  return new AttentionClientError("CANCELLED", "the client is closed; create another to make further calls", {
    reason: "CLIENT_CLOSED",
  });
}

function cancelled(cause: unknown): AttentionClientError {
  return new AttentionClientError("CANCELLED", "the call was cancelled", {}, { cause });
}

function pathOf(method: DescMethodUnary | DescMethodBiDiStreaming): string {
  return `/${method.parent.typeName}/${method.name}`;
}

/** The bytes of a message, as gRPC takes them. */
export function serialized<Desc extends DescMessage>(schema: Desc, message: MessageShape<Desc>): Buffer {
  const { buffer, byteOffset, byteLength } = toBinary(schema, message);
  return Buffer.from(buffer, byteOffset, byteLength);
}

/** Messages are encoded and decoded by protobuf-es, outside gRPC. */
function same(bytes: Buffer): Buffer {
  return bytes;
}
