/** Stored contexts: key and value rows that the server has projected once, and that queries attend to. */

import { clone, create } from "@bufbuild/protobuf";

import type { Connection } from "./connection.js";
import { encodeRows } from "./encoding.js";
import { AttentionClientError, unreadable } from "./errors.js";
import {
  AppendContextRequestSchema,
  AttentionService,
  DropContextRequestSchema,
  PutContextRequestSchema,
  type AppendContextRequest,
  type Context as Message,
  type PutContextRequest,
} from "./generated/attention/v1/attention_pb.js";
import { count } from "./settings.js";
import type { CallOptions, ContextInfo, ContextOptions, RowOptions, Sequence } from "./values.js";

const { putContext, appendContext, dropContext } = AttentionService.method;

/**
 * A stored context. It keeps its rows: if the server does not have it any more, a call with it puts them again, once, and
 * goes on.
 */
export class Context {
  readonly #connection: Connection;
  readonly #put: PutContextRequest;
  #appended: readonly AppendContextRequest[] = [];
  #info: ContextInfo;
  #restoring: Promise<void> | undefined;
  #isDropped = false;

  private constructor(connection: Connection, put: PutContextRequest, info: ContextInfo) {
    this.#connection = connection;
    this.#put = put;
    this.#info = info;
  }

  /** Puts rows; `client.context` calls it. */
  static async put(
    connection: Connection,
    model: string,
    key: Sequence,
    options: ContextOptions,
  ): Promise<Context> {
    const { version, ttlSeconds = 0, shared = false } = options;
    const request = create(PutContextRequestSchema, {
      ...encodeRows(key, options),
      modelName: model,
      modelVersion: String(version ?? ""),
      ttlSeconds: count("ttlSeconds", ttlSeconds, 0),
      shared,
    });
    const kept = clone(PutContextRequestSchema, request); // the caller may reuse its arrays
    const { context } = await connection.unary(putContext, kept, options);
    return new Context(connection, kept, contextInfo(context));
  }

  get id(): string {
    return this.#info.id;
  }

  /** Number of rows that may be attended to. */
  get rows(): number {
    return this.#info.rows;
  }

  /** Memory that it takes on the server. */
  get bytes(): number {
    return this.#info.bytes;
  }

  /** When the server removes it; earlier if it needs the memory. */
  get expiresAt(): Date {
    return this.#info.expiresAt;
  }

  /** Whether callers with other identities may use it. */
  get shared(): boolean {
    return this.#info.shared;
  }

  /** The version of the model that was asked for; empty for the highest that is ready. */
  get version(): string {
    return this.#put.modelVersion;
  }

  /** Appends rows. The object stands for the longer context from then on. */
  async append(key: Sequence, options: RowOptions = {}): Promise<void> {
    const { modelName, modelVersion, ttlSeconds } = this.#put;
    const rows = encodeRows(key, options);
    const request = create(AppendContextRequestSchema, { ...rows, modelName, modelVersion, ttlSeconds });
    const kept = clone(AppendContextRequestSchema, request);
    this.#info = await this.use(() => this.#append(kept, options));
    this.#appended = [...this.#appended, kept];
  }

  /** Removes it from the server, if it is there, and forgets the rows. */
  async drop(options: CallOptions = {}): Promise<void> {
    const { modelName, modelVersion } = this.#put;
    const request = create(DropContextRequestSchema, { modelName, modelVersion, id: this.id });
    this.#isDropped = true;
    try {
      await this.#connection.unary(dropContext, request, options);
    } catch (error) {
      if (!isMissing(error)) throw error;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.drop();
  }

  /** Makes a call that uses `id`; if the server does not have it, puts the rows again and repeats the call, once. */
  async use<Result>(call: () => Promise<Result>): Promise<Result> {
    try {
      return await call();
    } catch (error) {
      if (!isMissing(error) || this.#isDropped) throw error;
    }
    this.#restoring ??= this.#restore().finally(() => {
      this.#restoring = undefined;
    });
    await this.#restoring; // of several calls at the same time, one puts the rows
    return call();
  }

  async #restore(): Promise<void> {
    const { context } = await this.#connection.unary(putContext, this.#put, {});
    this.#info = contextInfo(context);
    for (const request of this.#appended) this.#info = await this.#append(request, {});
  }

  async #append(request: AppendContextRequest, options: CallOptions): Promise<ContextInfo> {
    request.id = this.id;
    const { context } = await this.#connection.unary(appendContext, request, options);
    return contextInfo(context);
  }
}

/** Whether a call failed because the server does not have the context. */
export function isMissing(error: unknown): boolean {
  return error instanceof AttentionClientError && error.reason === "CONTEXT_NOT_FOUND";
}

export function contextInfo(context: Message | undefined): ContextInfo {
  if (!context) throw unreadable("context", "it is missing");
  const { id, modelName, modelVersion, shared } = context;
  return {
    id,
    modelName,
    modelVersion,
    rows: Number(context.rows),
    bytes: Number(context.bytes),
    expiresAt: new Date(Number(context.expiresAt) * 1000),
    shared,
  };
}
