/** The error of a call, and its conversion from gRPC's and the stream's. */

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack, durationMs, type Any } from "@bufbuild/protobuf/wkt";
import { status, type Metadata, type ServiceError } from "@grpc/grpc-js";

import type { StreamError } from "./generated/attention/v1/attention_pb.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema, StatusSchema } from "./generated/status_pb.js";

const DOMAIN = "attention.v1";
const DETAILS_KEY = "grpc-status-details-bin";

/** Name of a gRPC status code, such as "NOT_FOUND". */
export type Code = keyof typeof status;

/** What programs read of an error. */
export interface ErrorDetails {
  reason?: string;
  field?: string;
  retryAfterMs?: number;
}

/** A call that has no result. */
export class AttentionClientError extends Error {
  override readonly name = "AttentionClientError";
  /** The gRPC status code; for an error that the client found, the one that the server would have used. */
  readonly code: Code;
  /** Short and stable, such as "LIMIT_EXCEEDED"; empty if the server gave none. */
  readonly reason: string;
  /** The argument or the field of the request at fault; empty if none is. */
  readonly field: string;
  /** Milliseconds after which the server suggests to repeat the call; undefined if it suggests nothing. */
  readonly retryAfterMs: number | undefined;

  constructor(code: Code, message: string, details: ErrorDetails = {}, options?: ErrorOptions) {
    super(message, options);
    this.code = code;
    this.reason = details.reason ?? "";
    this.field = details.field ?? "";
    this.retryAfterMs = details.retryAfterMs;
  }
}

/** The error of a wrong argument, thrown before anything is sent. */
export function invalid(field: string, expected: string, found: unknown): AttentionClientError {
  const message = `${field}: expected ${expected}; found ${String(found)}`;
  return new AttentionClientError("INVALID_ARGUMENT", message, { reason: "INVALID_FIELD", field });
}

/** The error of a response that contradicts itself. */
export function unreadable(field: string, why: string): AttentionClientError {
  return new AttentionClientError("INTERNAL", `the server's response cannot be read: ${field}: ${why}`, {
    field,
  });
}

export function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "metadata" in error;
}

export function fromServiceError(error: ServiceError): AttentionClientError {
  const details = readDetails(error.metadata);
  return new AttentionClientError(codeName(error.code), error.details, details, { cause: error });
}

/** Converts the error of one request of a stream. */
export function fromStreamError({ code, message, reason, field }: StreamError): AttentionClientError {
  return new AttentionClientError(codeName(code), message, { reason, field });
}

function codeName(code: number): Code {
  return (status[code] as Code | undefined) ?? "UNKNOWN";
}

/** Reads the google.rpc.Status in a call's trailing metadata; empty if there is none that can be read. */
function readDetails(metadata: Metadata): ErrorDetails {
  const [bytes] = metadata.get(DETAILS_KEY);
  if (!(bytes instanceof Uint8Array)) return {};
  try {
    return Object.assign({}, ...fromBinary(StatusSchema, bytes).details.map(readDetail)) as ErrorDetails;
  } catch {
    return {};
  }
}

function readDetail(detail: Any): ErrorDetails {
  const info = anyUnpack(detail, ErrorInfoSchema);
  if (info?.domain === DOMAIN) return { reason: info.reason };
  const violation = anyUnpack(detail, BadRequestSchema)?.fieldViolations[0];
  if (violation) return { field: violation.field };
  const delay = anyUnpack(detail, RetryInfoSchema)?.retryDelay;
  return delay ? { retryAfterMs: durationMs(delay) } : {};
}
