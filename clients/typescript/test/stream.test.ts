/** Streams, against a server in this process. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import { fromBinary } from "@bufbuild/protobuf";
import { status } from "@grpc/grpc-js";
import {
  AttentionClient,
  AttentionClientError,
  sequence,
  type ClientOptions,
  type Sequence,
} from "attention-client";

import { AttendStreamRequestSchema } from "../dist/generated/attention/v1/attention_pb.js";
import {
  answering,
  echoedItem,
  echoStream,
  failure,
  serving,
  signalled,
  streamResponse,
  type Stream,
} from "./server.js";

let stop = () => undefined as unknown;

afterEach(() => {
  stop();
});

async function connected(handler: Stream, options?: ClientOptions): Promise<AttentionClient> {
  const server = await serving({ AttendStream: handler });
  const client = new AttentionClient(server.target, options);
  stop = () => {
    client.close();
    server.stop();
  };
  return client;
}

/** Sequences of one row, numbered from 0. */
function* numbered(count: number): Generator<Sequence> {
  for (let index = 0; index < count; index++) yield sequence([[index]]);
}

/** The numbers of results that a server returned as it received them, and the codes of errors. */
async function collected(outcomes: AsyncIterable<{ contextVectors: Sequence } | AttentionClientError>) {
  const found: (number | string | undefined)[] = [];
  for await (const outcome of outcomes) {
    found.push(outcome instanceof AttentionClientError ? outcome.code : outcome.contextVectors.data[0]);
  }
  return found;
}

/** Refuses the request with this id and returns the others. */
function refusing(refused: string): Stream {
  return answering((bytes) => {
    const { id } = fromBinary(AttendStreamRequestSchema, bytes);
    if (id !== refused) return echoedItem(bytes);
    const error = { code: 8, reason: "OVERLOADED", message: "the queue is full", field: "" };
    const value = { $typeName: "attention.v1.StreamError", ...error } as const;
    return streamResponse({ id, result: { case: "error", value } });
  });
}

test("a stream ends with an error when another model of the same version answers", async () => {
  const digests = ["a", "a", "b"];
  const client = await connected(answering((bytes) => echoedItem(bytes, digests.shift())));
  const outcomes = client.attendStream("m", numbered(3));
  const answers = [await outcomes.next(), await outcomes.next()];
  assert.deepEqual(
    answers.map(({ value }) => value?.modelDigest),
    ["a", "a"],
  );
  await assert.rejects(outcomes.next(), { reason: "MODEL_CHANGED", message: /the digests a and b/ });
});

test("results come in the order of the requests", async () => {
  const client = await connected(echoStream);
  const results = await collected(client.attendStream("m", numbered(300)));
  assert.deepEqual(results, [...Array(300).keys()]);
  assert.deepEqual(await collected(client.attendStream("m", numbered(0))), []);
});

test("an error of the server or of the client takes the place of its result", async () => {
  const client = await connected(refusing("1"));
  const wrong = { data: new Float32Array(3), rows: 1, width: 1 };
  const requests = [...numbered(3), wrong, ...numbered(1)];
  const results = await collected(client.attendStream("m", requests, { returnErrors: true }));
  assert.deepEqual(results, [0, "RESOURCE_EXHAUSTED", 2, "INVALID_ARGUMENT", 0]);
});

test("without returnErrors, the first error is thrown", async () => {
  const client = await connected(refusing("1"));
  const results: unknown[] = [];
  await assert.rejects(
    async () => {
      for await (const result of client.attendStream("m", numbered(3))) results.push(result);
    },
    { code: "RESOURCE_EXHAUSTED", reason: "OVERLOADED" },
  );
  assert.equal(results.length, 1);
});

test("at most maxInFlight requests are read ahead of the results", async () => {
  const client = await connected(echoStream);
  let [read, answered, ahead] = [0, 0, 0];
  function* counted() {
    for (const item of numbered(50)) {
      read++;
      ahead = Math.max(ahead, read - answered);
      yield item;
    }
  }
  for await (const result of client.attendStream("m", counted(), { maxInFlight: 3 })) {
    assert.equal(result.contextVectors.data[0], answered);
    answered++;
  }
  assert.equal(answered, 50);
  // The result that the loop has and does not count yet makes room for one more.
  assert.ok(ahead <= 4, `${ahead} requests ahead`);
});

test("an error of the input is thrown after the results before it", async () => {
  const client = await connected(echoStream);
  function* broken() {
    yield* numbered(2);
    throw new RangeError("the caller's own");
  }
  const results: unknown[] = [];
  await assert.rejects(async () => {
    for await (const result of client.attendStream("m", broken())) results.push(result);
  }, RangeError);
  assert.equal(results.length, 2);
});

test("leaving the loop cancels the call and ends the input", async () => {
  const cancelled = signalled();
  const ended = signalled();
  const client = await connected((call) => {
    call.on("cancelled", () => {
      cancelled.resolve();
    });
    echoStream(call);
  });
  async function* endless() {
    try {
      for (;;) yield await Promise.resolve(sequence([[1]]));
    } finally {
      ended.resolve();
    }
  }
  for await (const { contextVectors } of client.attendStream("m", endless(), { maxInFlight: 2 })) {
    assert.equal(contextVectors.rows, 1);
    break;
  }
  await Promise.all([cancelled.done, ended.done]);
});

test("a stream is repeated until its first response", async () => {
  let attempts = 0;
  const client = await connected((call) => {
    if (++attempts > 2) echoStream(call);
    else call.emit("error", failure(status.UNAVAILABLE, {}));
  });
  assert.deepEqual(await collected(client.attendStream("m", numbered(3))), [0, 1, 2]);
  assert.equal(attempts, 3);
});

test("a server that ends the stream early", async () => {
  const client = await connected((call) => {
    call.once("data", (bytes: Buffer) => {
      call.write(echoedItem(bytes));
      call.end();
    });
  });
  await assert.rejects(collected(client.attendStream("m", numbered(3))), { code: "UNAVAILABLE" });
});

test("the error of the call is thrown, also while the input is idle", async () => {
  const client = await connected((call) => {
    call.once("data", (bytes: Buffer) => {
      call.write(echoedItem(bytes));
      call.emit("error", failure(status.UNAVAILABLE, { reason: "STREAM_IDLE" }));
    });
  });
  async function* idle() {
    yield sequence([[1]]);
    await new Promise(() => undefined);
  }
  await assert.rejects(collected(client.attendStream("m", idle())), {
    code: "UNAVAILABLE",
    reason: "STREAM_IDLE",
  });
});

for (const [name, message, options] of [
  ["the client's timeout bounds the wait for each result", /no response arrived within 200 ms/, {}],
  ["a timeout of the stream bounds all of it", /did not answer within 200 ms/, { timeoutMs: 200 }],
] as const) {
  test(name, async () => {
    const client = await connected(() => undefined, "timeoutMs" in options ? {} : { timeoutMs: 200 });
    const expected = { code: "DEADLINE_EXCEEDED", message };
    await assert.rejects(collected(client.attendStream("m", numbered(1), options)), expected);
  });
}

test("a refused stream has the server's error, also before the first request", async () => {
  const refused = signalled();
  const client = await connected((call) => {
    call.emit("error", failure(status.UNAUTHENTICATED, { reason: "NO_TOKEN" }));
    refused.resolve();
  });
  async function* late() {
    await refused.done;
    await new Promise(() => undefined);
    yield sequence([[1]]);
  }
  const expected = { code: "UNAUTHENTICATED", reason: "NO_TOKEN" };
  await assert.rejects(collected(client.attendStream("m", late())), expected);
});

test("closing the client ends a stream", async () => {
  const client = await connected(echoStream);
  async function* idle() {
    yield sequence([[1]]);
    client.close();
    await new Promise(() => undefined);
  }
  await assert.rejects(collected(client.attendStream("m", idle())), {
    code: "CANCELLED",
    reason: "CLIENT_CLOSED",
  });
});
