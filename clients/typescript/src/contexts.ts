/** Stored contexts: key and value rows that the server has projected once, and that queries attend to. */

import { create } from "@bufbuild/protobuf";

import type { Connection } from "./connection.js";
import { encodeRows } from "./encoding.js";
import { AttentionClientError, unreadable } from "./errors.js";
import {
  AppendContextRequestSchema,
  AttentionService,
  DropContextRequestSchema,
  ListContextsRequestSchema,
  PutContextRequestSchema,
  type Context as Stored,
} from "./generated/attention/v1/attention_pb.js";
import { count } from "./settings.js";
import type {
  CallOptions,
  ContextOptions,
  ContextRows,
  RowOptions,
  Sequence,
  StoredContext,
} from "./values.js";

const { putContext, appendContext, dropContext, listContexts } = AttentionService.method;
// How many times each part is put before each repetition of a call. One is enough unless several servers stand behind
// one name: they are called in turn, so that n times in a row reach n of them.
const PUTS = [1, 2, 3];

/** What the requests of a context have in common. */
interface Named {
  readonly modelName: string;
  /** As the caller gave it; empty for the highest that is ready. */
  readonly modelVersion: string;
}

interface Lifetime {
  readonly ttlSeconds: number;
  readonly shared: boolean;
}

/**
 * Key and value rows that a server has projected and stored.
 *
 * The server removes a context that expires or whose memory it needs, and neither a restarted server nor another replica
 * has it. A call that finds so puts the rows again and is repeated, once, or until each of several servers has them. The
 * calls of contexts that `contexts` lists, whose rows are not here, fail with the reason CONTEXT_NOT_FOUND.
 */
export class Context implements StoredContext {
  readonly #connection: Connection;
  readonly #named: Named;
  readonly #lifetime: Lifetime;
  /** What was put and appended, in order. */
  #parts: readonly ContextRows[];
  #stored: Stored;
  #restoring: Promise<void> | undefined;

  private constructor(
    connection: Connection,
    named: Named,
    lifetime: Lifetime,
    parts: readonly ContextRows[],
    stored: Stored,
  ) {
    this.#connection = connection;
    this.#named = named;
    this.#lifetime = lifetime;
    this.#parts = parts;
    this.#stored = stored;
  }

  /** Puts rows; see `AttentionClient.context`. */
  static async put(
    connection: Connection,
    model: string,
    key: Sequence,
    options: ContextOptions,
  ): Promise<Context> {
    const named = { modelName: model, modelVersion: String(options.version ?? "") };
    const ttlSeconds = count("ttlSeconds", options.ttlSeconds ?? 0, 0);
    const lifetime = { ttlSeconds, shared: options.shared ?? false };
    const rows = copied(key, options);
    const stored = await put(connection, { ...named, ...lifetime }, rows, options);
    return new Context(connection, named, lifetime, [rows], stored);
  }

  /** Lists contexts; see `AttentionClient.contexts`. */
  static async list(
    connection: Connection,
    model: string,
    options: CallOptions & { version?: string | number },
  ): Promise<Context[]> {
    const named = { modelName: model, modelVersion: String(options.version ?? "") };
    const request = create(ListContextsRequestSchema, named);
    const listed: Context[] = [];
    do {
      const { contexts, nextPageToken } = await connection.unary(listContexts, request, options);
      for (const stored of contexts) {
        listed.push(new Context(connection, named, { ttlSeconds: 0, shared: stored.shared }, [], stored));
      }
      request.pageToken = nextPageToken;
    } while (request.pageToken !== "");
    return listed;
  }

  /** The same on every server for the same model, rows, mask and order of appends. */
  get id(): string {
    return this.#stored.id;
  }

  get modelName(): string {
    return this.#stored.modelName;
  }

  get modelVersion(): string {
    return this.#stored.modelVersion;
  }

  /** The version that the caller gave; empty for the highest that is ready. */
  get version(): string {
    return this.#named.modelVersion;
  }

  /** Number of rows that may be attended to, without those that a mask hides. */
  get rows(): number {
    return Number(this.#stored.rows);
  }

  /** Memory that it takes on the server. */
  get bytes(): number {
    return Number(this.#stored.bytes);
  }

  /** When the server removes it. */
  get expiresAt(): Date {
    return new Date(Number(this.#stored.expiresAt) * 1000);
  }

  /** Whether callers with other identities may use it. */
  get shared(): boolean {
    return this.#stored.shared;
  }

  /** Appends rows: this object then stands for the longer context, which has another id. */
  async append(key: Sequence, options: RowOptions = {}): Promise<void> {
    const further = copied(key, options);
    this.#stored = await this.use(() => this.#append(this.id, further, options));
    if (this.#parts.length) this.#parts = [...this.#parts, further]; // a listed context has none
  }

  /** Removes the context from the server, unless it is gone already. It is not put again. */
  async drop(options: CallOptions = {}): Promise<void> {
    this.#parts = [];
    const request = create(DropContextRequestSchema, { ...this.#named, id: this.id });
    try {
      await this.#connection.unary(dropContext, request, options);
    } catch (error) {
      if (!isMissing(error)) throw error;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.drop();
  }

  /** Makes a call that uses `id`; repeats it after putting the rows again if the server does not have them. */
  async use<Result>(call: () => Promise<Result>): Promise<Result> {
    for (const times of PUTS) {
      try {
        return await call();
      } catch (error) {
        if (!isMissing(error) || this.#parts.length === 0) throw error;
      }
      // Of several calls at the same time, one puts the rows.
      this.#restoring ??= this.#restore(times).finally(() => {
        this.#restoring = undefined;
      });
      await this.#restoring;
    }
    return call();
  }

  async #restore(times: number): Promise<void> {
    const fields = { ...this.#named, ...this.#lifetime };
    const [first, ...others] = this.#parts;
    const repeated = async (call: () => Promise<Stored>) => {
      for (let time = 1; time < times; time++) await call();
      return call();
    };
    if (!first) return; // it was dropped meanwhile
    try {
      let stored = await repeated(() => put(this.#connection, fields, first, {}));
      for (const further of others) {
        const { id } = stored;
        stored = await repeated(() => this.#append(id, further, {}));
      }
      this.#stored = stored;
    } catch (error) {
      if (!isMissing(error)) throw error; // an append reached another server than the put
    }
  }

  async #append(id: string, rows: ContextRows, options: CallOptions): Promise<Stored> {
    const { ttlSeconds } = this.#lifetime;
    const request = create(AppendContextRequestSchema, {
      ...this.#named,
      ...encodeRows(rows),
      ttlSeconds,
      id,
    });
    return found((await this.#connection.unary(appendContext, request, options)).context);
  }
}

/** Whether a call failed because the server does not have the context. */
export function isMissing(error: unknown): boolean {
  return error instanceof AttentionClientError && error.reason === "CONTEXT_NOT_FOUND";
}

async function put(
  connection: Connection,
  fields: Named & Lifetime,
  rows: ContextRows,
  options: CallOptions,
): Promise<Stored> {
  const request = create(PutContextRequestSchema, { ...fields, ...encodeRows(rows) });
  return found((await connection.unary(putContext, request, options)).context);
}

function found(context: Stored | undefined): Stored {
  if (!context) throw unreadable("context", "it is missing");
  return context;
}

/** Rows that belong to the client: they may be sent again much later. */
function copied(key: Sequence, { value, mask }: RowOptions): ContextRows {
  return {
    key: { ...key, data: key.data.slice() },
    ...(value && { value: { ...value, data: value.data.slice() } }),
    ...(mask && { mask: { ...mask, data: mask.data.slice() } }),
  };
}
