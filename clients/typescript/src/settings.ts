/** Validates the options of a client and translates them into gRPC's: channel options and metadata. */

import { endianness } from "node:os";

import { credentials, Metadata, type ChannelCredentials, type ChannelOptions } from "@grpc/grpc-js";

import { invalid } from "./errors.js";

/** Options of the client. */
export interface ClientOptions {
  /** Credentials of the connection, such as `credentials.createSsl()` of @grpc/grpc-js; by default unencrypted. */
  credentials?: ChannelCredentials;
  /** Sent as `authorization: Bearer TOKEN`. Without credentials it is accepted only for targets on this machine. */
  token?: string;
  /** Keys and values sent with every call; values are text, or bytes for keys that end with "-bin". */
  metadata?: Readonly<Record<string, string | Uint8Array>>;
  /** Milliseconds that a call with its retries may take unless it states its own; 30,000 by default. */
  timeoutMs?: number;
  /** Largest number of times a refused call is repeated; 4 by default, 0 means never. */
  maxRetries?: number;
  /** Whether a call waits for a connection until its timeout, rather than fail at once; true by default. */
  waitForReady?: boolean;
  /** Options of gRPC's channel, which take precedence over the client's own. */
  channelOptions?: ChannelOptions;
}

/** The options of a client, validated and in gRPC's terms. */
export interface ConnectionSettings {
  readonly target: string;
  readonly credentials: ChannelCredentials;
  readonly metadata: Metadata;
  readonly timeoutMs: number;
  readonly maxRetries: number;
  readonly channelOptions: ChannelOptions;
}

const DEFAULT_TIMEOUT_MS = 30_000;
const DEFAULT_MAX_RETRIES = 4;
export const FIRST_BACKOFF_MS = 100;
export const MAX_BACKOFF_MS = 2_000;
// Attempts of a stream before its first response; gRPC allows at most five of any call.
const STREAM_ATTEMPTS = 5;
const CHANNEL_OPTIONS: ChannelOptions = {
  // No limit here: the server's own limit applies, and its error states it.
  "grpc.max_send_message_length": -1,
  "grpc.max_receive_message_length": -1,
  // By default gRPC waits up to two minutes before it reconnects; a server restarts much faster.
  "grpc.initial_reconnect_backoff_ms": FIRST_BACKOFF_MS,
  "grpc.max_reconnect_backoff_ms": MAX_BACKOFF_MS,
};

/** Throws an AttentionClientError if an option has a value outside its range. */
export function connectionSettings(target: string, options: ClientOptions): ConnectionSettings {
  if (endianness() !== "LE") {
    throw new Error(
      "attention-client sends numbers in the machine's byte order, which must be little-endian",
    );
  }
  const maxRetries = count("maxRetries", options.maxRetries ?? DEFAULT_MAX_RETRIES, 0);
  const serviceConfig = { "grpc.service_config": serviceConfigOf(maxRetries) };
  return {
    target,
    credentials: options.credentials ?? credentials.createInsecure(),
    metadata: metadataOf(target, options),
    timeoutMs: milliseconds(options.timeoutMs, DEFAULT_TIMEOUT_MS),
    maxRetries,
    channelOptions: { ...CHANNEL_OPTIONS, ...serviceConfig, ...options.channelOptions },
  };
}

/** A number of milliseconds, positive and finite. */
export function milliseconds(value: number | undefined, fallback: number): number {
  if (value === undefined) return fallback;
  if (!(value > 0 && Number.isFinite(value))) throw invalid("timeoutMs", "a positive, finite number", value);
  return value;
}

/** An integer that is not below the smallest. */
export function count(field: string, value: number, smallest: number): number {
  if (Number.isSafeInteger(value) && value >= smallest) return value;
  throw invalid(field, `an integer of at least ${smallest}`, value);
}

/** Retries of a stream are gRPC's own, which end with the first response. */
function serviceConfigOf(maxRetries: number): string {
  const retryPolicy = {
    maxAttempts: Math.min(maxRetries + 1, STREAM_ATTEMPTS),
    initialBackoff: `${FIRST_BACKOFF_MS / 1000}s`,
    maxBackoff: `${MAX_BACKOFF_MS / 1000}s`,
    backoffMultiplier: 2,
    retryableStatusCodes: ["UNAVAILABLE"],
  };
  const name = [{ service: "attention.v1.AttentionService", method: "AttendStream" }];
  return JSON.stringify({
    loadBalancingConfig: [{ round_robin: {} }],
    methodConfig: maxRetries > 0 ? [{ name, retryPolicy }] : [],
  });
}

function metadataOf(
  target: string,
  { token, metadata = {}, credentials, waitForReady = true }: ClientOptions,
): Metadata {
  const found = new Metadata({ waitForReady });
  for (const [key, value] of Object.entries(metadata)) {
    found.set(key, typeof value === "string" ? value : Buffer.from(value));
  }
  if (token === undefined) return found;
  if (!credentials && !isLocal(target)) {
    throw invalid(
      "token",
      `credentials as well, because the connection to ${target} is not encrypted`,
      "none",
    );
  }
  found.set("authorization", `Bearer ${token}`);
  return found;
}

function isLocal(target: string): boolean {
  if (target.startsWith("unix:")) return true;
  const host = target.replace(/^(ipv4|ipv6|dns):(.*\/)?/, "").replace(/:\d+$/, "");
  return host === "localhost" || host === "[::1]" || /^127\.\d+\.\d+\.\d+$/.test(host);
}
