/** A gRPC server in this process, whose answers a test chooses. */

import { create, fromBinary, toBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { anyPack, durationFromMs } from "@bufbuild/protobuf/wkt";
import {
  Metadata,
  Server,
  ServerCredentials,
  status,
  type handleBidiStreamingCall,
  type handleUnaryCall,
  type MethodDefinition,
} from "@grpc/grpc-js";

import {
  AttendRequestSchema,
  AttendResponseSchema,
  AttendStreamRequestSchema,
  AttendStreamResponseSchema,
  type AttendRequest,
  type AttendStreamResponse,
} from "../dist/generated/attention/v1/attention_pb.js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  RetryInfoSchema,
  StatusSchema,
} from "../dist/generated/status_pb.js";

export type Unary = handleUnaryCall<Buffer, Buffer>;
export type Stream = handleBidiStreamingCall<Buffer, Buffer>;

export interface RunningServer {
  readonly target: string;
  stop(): void;
}

const SERVICE = {
  Attend: method("Attend", false),
  AttendStream: method("AttendStream", true),
};

/** Serves on a port that the system chooses. */
export async function serving(handlers: { Attend?: Unary; AttendStream?: Stream }): Promise<RunningServer> {
  const server = new Server({ "grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1 });
  server.addService(SERVICE, handlers);
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) => {
      if (error) reject(error);
      else resolve(bound);
    });
  });
  return {
    target: `127.0.0.1:${port}`,
    stop: () => {
      server.forceShutdown();
    },
  };
}

/** Returns the query as the context vectors. */
export const echo: Unary = (call, reply) => {
  reply(null, encoded(AttendResponseSchema, echoOf(fromBinary(AttendRequestSchema, call.request))));
};

/** Answers each request of a stream with the bytes that a function makes of it. */
export function answering(answer: (request: Buffer) => Buffer): Stream {
  return (call) => {
    call.on("data", (bytes: Buffer) => call.write(answer(bytes)));
    call.on("end", () => {
      call.end();
    });
  };
}

export function echoedItem(bytes: Buffer, modelDigest = ""): Buffer {
  const { id, request } = fromBinary(AttendStreamRequestSchema, bytes);
  if (!request) throw new Error("a stream's item has no request");
  return streamResponse({ id, result: { case: "response", value: echoOf(request, modelDigest) } });
}

/** Returns each query of a stream as its context vectors. */
export const echoStream = answering((bytes) => echoedItem(bytes));

export function streamResponse(response: Omit<AttendStreamResponse, "$typeName" | "$unknown">): Buffer {
  return encoded(AttendStreamResponseSchema, create(AttendStreamResponseSchema, response));
}

/** The error of a call, with the details that the service sends. */
export function failure(code: status, details: { reason?: string; field?: string; retryAfterMs?: number }) {
  const { reason, field, retryAfterMs } = details;
  const packed = [];
  if (reason)
    packed.push(anyPack(ErrorInfoSchema, create(ErrorInfoSchema, { reason, domain: "attention.v1" })));
  if (field)
    packed.push(anyPack(BadRequestSchema, create(BadRequestSchema, { fieldViolations: [{ field }] })));
  if (retryAfterMs !== undefined) {
    const retryDelay = durationFromMs(retryAfterMs);
    packed.push(anyPack(RetryInfoSchema, create(RetryInfoSchema, { retryDelay })));
  }
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", encoded(StatusSchema, create(StatusSchema, { details: packed })));
  return { code, details: "the server's message", metadata };
}

function echoOf(request: AttendRequest, modelDigest = "") {
  const { case: kind, value } = request.queryInput;
  if (kind !== "query") throw new Error("only a query can be returned");
  return create(AttendResponseSchema, {
    modelName: request.modelName,
    modelVersion: "1",
    modelDigest,
    contextVectors: value,
  });
}

function encoded<Desc extends DescMessage>(schema: Desc, message: MessageShape<Desc>): Buffer {
  return Buffer.from(toBinary(schema, message));
}

function method(name: string, stream: boolean): MethodDefinition<Buffer, Buffer> {
  const same = (bytes: Buffer) => bytes;
  return {
    path: `/attention.v1.AttentionService/${name}`,
    requestStream: stream,
    responseStream: stream,
    requestSerialize: same,
    requestDeserialize: same,
    responseSerialize: same,
    responseDeserialize: same,
  };
}

/** A promise that a handler resolves. */
export function signalled(): { readonly done: Promise<void>; readonly resolve: () => void } {
  let resolve: () => void = () => undefined;
  const done = new Promise<void>((resolveDone) => {
    resolve = resolveDone;
  });
  return { done, resolve };
}
