/** Retries, deadlines, errors and cancellation, against a server in this process. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { AttentionClient, AttentionClientError, sequence, type ClientOptions } from "attention-client";
import { status } from "@grpc/grpc-js";

import {
  AttendRequestSchema,
  AttendResponseSchema,
  DataType,
} from "../dist/generated/attention/v1/attention_pb.js";
import { echo, failure, serving, signalled, type RunningServer, type Unary } from "./server.js";

const QUERY = sequence([
  [1, 2],
  [3, 4],
]);
const opened: (() => void)[] = [];

afterEach(() => {
  for (const close of opened.splice(0)) close();
});

async function connected(attend: Unary, options?: ClientOptions): Promise<AttentionClient> {
  const server = await serving({ Attend: attend });
  return clientOf(server, options);
}

function clientOf(server: RunningServer, options?: ClientOptions): AttentionClient {
  const client = new AttentionClient(server.target, options);
  opened.push(() => {
    client.close();
    server.stop();
  });
  return client;
}

/** Fails the first attempts; counts all of them. */
function failing(times: number, error: ReturnType<typeof failure>) {
  const attempts: number[] = [];
  const attend: Unary = (call, reply) => {
    attempts.push(performance.now());
    if (attempts.length > times) echo(call, reply);
    else reply(error);
  };
  return { attempts, attend };
}

/** Checks the properties of the error that a call is expected to fail with. */
function failsWith(expected: Partial<AttentionClientError>) {
  return (error: unknown) => {
    assert.ok(error instanceof AttentionClientError, String(error));
    const found = Object.fromEntries(
      Object.keys(expected).map((key) => [key, error[key as keyof typeof error]]),
    );
    assert.deepEqual(found, expected);
    return true;
  };
}

test("a call that is unavailable is repeated", async () => {
  const { attempts, attend } = failing(2, failure(status.UNAVAILABLE, { reason: "SHUTTING_DOWN" }));
  const client = await connected(attend);
  const { contextVectors } = await client.attend("m", QUERY);
  assert.deepEqual(contextVectors, QUERY);
  assert.equal(attempts.length, 3);
});

test("a refused call is repeated after the delay that the server states", async () => {
  const { attempts, attend } = failing(1, failure(status.RESOURCE_EXHAUSTED, { retryAfterMs: 250 }));
  const client = await connected(attend);
  await client.attend("m", QUERY);
  const [first = 0, second = 0] = attempts;
  assert.ok(second - first >= 249, `${second - first} ms`); // a timer may fire a millisecond early
});

const unreadable = failure(status.NOT_FOUND, {});
unreadable.metadata.set("grpc-status-details-bin", Buffer.from([0xff, 0xff]));
const refused = { reason: "INVALID_FIELD", field: "query" };
const delayed = { reason: "OVERLOADED", retryAfterMs: 60_000 };

for (const [name, error, expected] of [
  ["the server's code, message, reason and field", failure(status.INVALID_ARGUMENT, refused), refused],
  ["no delay", failure(status.RESOURCE_EXHAUSTED, {}), { code: "RESOURCE_EXHAUSTED" }],
  ["a delay beyond the deadline", failure(status.RESOURCE_EXHAUSTED, delayed), delayed],
  ["details that cannot be read", unreadable, { code: "NOT_FOUND", reason: "" }],
] as const) {
  test(`a refused call is not repeated; its error has ${name}`, async () => {
    const { attempts, attend } = failing(1, error);
    const client = await connected(attend);
    const message = "the server's message";
    await assert.rejects(
      client.attend("m", QUERY, { timeoutMs: 30_000 }),
      failsWith({ code: status[error.code] as "NOT_FOUND", ...expected, message }),
    );
    assert.equal(attempts.length, 1);
  });
}

for (const maxRetries of [0, 2]) {
  test(`a call is repeated at most ${maxRetries} times`, async () => {
    const { attempts, attend } = failing(100, failure(status.UNAVAILABLE, {}));
    const client = await connected(attend, { maxRetries });
    await assert.rejects(client.attend("m", QUERY), failsWith({ code: "UNAVAILABLE" }));
    assert.equal(attempts.length, maxRetries + 1);
  });
}

test("a server that does not answer in time", async () => {
  const client = await connected(() => undefined);
  const message = /did not answer within 200 ms/;
  await assert.rejects(client.attend("m", QUERY, { timeoutMs: 200 }), (error: AttentionClientError) => {
    assert.match(error.message, message);
    return failsWith({ code: "DEADLINE_EXCEEDED", reason: "DEADLINE_EXCEEDED" })(error);
  });
});

for (const waitForReady of [true, false]) {
  test(`a server that cannot be reached, with waitForReady=${waitForReady}`, async () => {
    const server = await serving({ Attend: echo });
    server.stop();
    const client = clientOf(server, { waitForReady, timeoutMs: 400 });
    await assert.rejects(client.attend("m", QUERY), failsWith({ code: "UNAVAILABLE" }));
  });
}

for (const [name, error] of [
  ["a call in progress", null],
  ["the pause before a retry", failure(status.RESOURCE_EXHAUSTED, { retryAfterMs: 20_000 })],
] as const) {
  test(`closing ends ${name} and refuses later calls`, async () => {
    const arrived = signalled();
    const client = await connected((_, reply) => {
      if (error) reply(error);
      arrived.resolve();
    });
    const call = client.attend("m", QUERY);
    await arrived.done;
    client.close();
    const closed = failsWith({ code: "CANCELLED", reason: "CLIENT_CLOSED" });
    await assert.rejects(call, closed);
    await assert.rejects(client.attend("m", QUERY), closed);
  });
}

test("a signal cancels its call only", async () => {
  const waiting: (() => void)[] = [];
  const controller = new AbortController();
  const client = await connected((call, reply) => {
    waiting.push(() => {
      echo(call, reply);
    });
    if (waiting.length === 2) controller.abort();
  });
  const [cancelled, other] = [
    client.attend("m", QUERY, { signal: controller.signal }),
    client.attend("m", QUERY),
  ];
  await assert.rejects(cancelled, failsWith({ code: "CANCELLED", reason: "" }));
  for (const answer of waiting) answer();
  assert.deepEqual((await other).contextVectors, QUERY);
});

test("messages larger than gRPC's default limit, from an array that is reused at once", async () => {
  const data = Float32Array.from({ length: 3_000_001 }, (_, index) => index).subarray(1);
  const expected = data.slice();
  const client = await connected(echo);
  const call = client.attend("m", { data, rows: 1000, width: 3000 });
  data.fill(0);
  assert.deepEqual((await call).contextVectors, { data: expected, rows: 1000, width: 3000 });
});

test("metadata, token and model version are sent", async () => {
  let [seen, version] = [{}, ""];
  const client = await connected(
    (call, reply) => {
      seen = call.metadata.getMap();
      version = fromBinary(AttendRequestSchema, call.request).modelVersion;
      echo(call, reply);
    },
    { token: "secret", metadata: { "x-tenant": "example", "x-trace-bin": Uint8Array.of(1, 2) } },
  );
  await client.attend("m", QUERY, { version: 3 });
  const expected = { authorization: "Bearer secret", "x-tenant": "example", "x-trace-bin": Buffer.of(1, 2) };
  assert.deepEqual({ ...seen, ...expected }, seen);
  assert.equal(version, "3");
});

test("rows of different widths are not a sequence", () => {
  assert.throws(() => sequence([[1, 2], [3]]), RangeError);
});

for (const target of ["attention.example:443", "ipv4:127.0.0.1:1,10.0.0.1:1"]) {
  test(`a token is not sent unencrypted to ${target}`, () => {
    assert.throws(() => new AttentionClient(target, { token: "secret" }), failsWith({ field: "token" }));
  });
}

const REFUSED: Record<string, (client: AttentionClient) => Promise<unknown>> = {
  "data of another size": (client) => client.attend("m", { ...QUERY, rows: 3 }),
  "rows of different widths": (client) => client.attend("m", [QUERY, sequence([[1]])]),
  "an empty list": (client) => client.attend("m", []),
  "more keys than queries": (client) => client.attend("m", [QUERY], { key: [QUERY, QUERY] }),
  "fewer values than keys": (client) => client.attend("m", QUERY, { key: QUERY, value: sequence([[1]]) }),
  "a value without a key": (client) => client.attend("m", QUERY, { value: QUERY }),
  "a mask of another size": (client) => client.attend("m", QUERY, { mask: { data: [true], keyRows: 1 } }),
  "a length above the rows": (client) => client.attend("m", [QUERY], { lengths: [3] }),
  "lengths for one sequence": (client) => client.attend("m", QUERY, { lengths: [1] }),
  "positions that are not integers": (client) => client.attend("m", QUERY, { positions: [0, 0.5] }),
  "a timeout that is not positive": (client) => client.attend("m", QUERY, { timeoutMs: 0 }),
};

for (const [name, call] of Object.entries(REFUSED)) {
  test(`the client refuses ${name}`, async () => {
    const client = await connected(() => assert.fail("the request was sent"));
    await assert.rejects(call(client), failsWith({ code: "INVALID_ARGUMENT", reason: "INVALID_FIELD" }));
  });
}

test("a response that contradicts the request is an error", async () => {
  const contextVectors = { dataType: DataType.FP32, width: 2, lengths: [5], data: new Uint8Array(8) };
  const response = toBinary(AttendResponseSchema, create(AttendResponseSchema, { contextVectors }));
  const client = await connected((_, reply) => {
    reply(null, Buffer.from(response));
  });
  await assert.rejects(client.attend("m", QUERY), failsWith({ code: "INTERNAL", field: "context_vectors" }));
});
