/**
 * The answers of a live server are, bit by bit, those that the Python client receives.
 *
 * tests/clients/test_typescript.py starts the servers and makes the file of calls and their results.
 */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import {
  AttentionClient,
  AttentionClientError,
  type AttentionResult,
  type AttentionResults,
  type ComputeOptions,
  type InferResult,
  type ModelInfo,
  type Sequence,
  type StreamItem,
} from "attention-client";

interface Case {
  method: "attend" | "attendText" | "attendTokens" | "infer";
  model: string;
  given: Sequence; // or texts or token ids; one type stands for all, so that one line can make all calls
  options: ComputeOptions;
  result?: AttentionResult | AttentionResults | InferResult;
  error?: Pick<AttentionClientError, "code" | "reason" | "field" | "message">;
}

interface Expected {
  cases: Record<string, Case>;
  models: ModelInfo[];
}

const { ATTENTION_TEST_SERVER, ATTENTION_TEST_RECORDER, ATTENTION_TEST_EXPECTED } = process.env;

if (!ATTENTION_TEST_SERVER || !ATTENTION_TEST_RECORDER || !ATTENTION_TEST_EXPECTED) {
  test("answers of a live server", { skip: "run by tests/clients/test_typescript.py" });
} else {
  const expected = JSON.parse(readFileSync(ATTENTION_TEST_EXPECTED, "utf8"), numbers) as Expected;
  testAnswers(ATTENTION_TEST_SERVER, expected);
  testRequests(ATTENTION_TEST_RECORDER, expected);
}

function testAnswers(target: string, { cases, models }: Expected) {
  for (const [name, expected] of Object.entries(cases)) {
    test(`answer: ${name}`, async () => {
      using client = new AttentionClient(target);
      assert.deepEqual(await outcomeOf(client, expected), expected.result ?? expected.error);
    });
  }

  test("models", async () => {
    using client = new AttentionClient(target);
    assert.deepEqual(defined(await client.models()), models);
    for (const model of models) {
      assert.deepEqual(defined(await client.model(model.name, { version: model.version })), model);
    }
    await assert.rejects(client.model("absent"), { code: "NOT_FOUND" });
  });

  for (const maxInFlight of [1, 64]) {
    test(`a stream of all calls to one model, ${maxInFlight} in flight`, async () => {
      using client = new AttentionClient(target);
      const all = Object.values(cases).filter(
        ({ method, model, options }) => method === "attend" && model === "tiny-self" && !options.version,
      );
      const requests = all.map(({ given, options }): StreamItem => ({
        ...options,
        query: given,
      }));
      const options = { maxInFlight, returnErrors: true, returnWeights: true } as const;
      let index = 0;
      for await (const outcome of client.attendStream("tiny-self", requests, options)) {
        const { result, error } = all[index++] ?? {};
        if (outcome instanceof AttentionClientError) assert.deepEqual(detailsOf(outcome), error);
        else assertClose(outcome, result as typeof outcome | undefined);
      }
      assert.equal(index, all.length);
    });
  }
}

function testRequests(target: string, { cases }: Expected) {
  test("requests are sent to the recorder", async () => {
    using client = new AttentionClient(target);
    for (const each of Object.values(cases)) {
      const outcome = await outcomeOf(client, each);
      assert.equal("code" in outcome && outcome.code, "UNIMPLEMENTED");
    }
  });
}

async function outcomeOf(client: AttentionClient, { method, model, given, options }: Case) {
  try {
    return await (client[method] as AttentionClient["attend"]).call(client, model, given, options);
  } catch (error) {
    if (error instanceof AttentionClientError) return detailsOf(error);
    throw error;
  }
}

function detailsOf({ code, reason, field, message }: AttentionClientError) {
  return { code, reason, field, message };
}

/** Requests of a stream may share a run with others, which changes the last bits of their results. */
function assertClose(
  found: AttentionResult | AttentionResults,
  expected?: AttentionResult | AttentionResults,
) {
  const [own, others] = [sequencesOf(found), expected ? sequencesOf(expected) : []];
  assert.equal(own.length, others.length);
  own.forEach(({ data }, index) => {
    const other = others[index]?.data ?? [];
    assert.equal(data.length, other.length);
    data.forEach((value, element) => {
      assert.ok(Math.abs(value - (other[element] ?? NaN)) <= 1e-5);
    });
  });
}

function sequencesOf({ contextVectors }: AttentionResult | AttentionResults): readonly Sequence[] {
  return "data" in contextVectors ? [contextVectors] : contextVectors;
}

/** Without properties that are undefined. */
function defined<T>(value: T): T {
  return JSON.parse(JSON.stringify(value)) as T;
}

/** Restores arrays of floats and of integers, and the weights of results that have none. */
function numbers(_: string, value: unknown): unknown {
  if (typeof value !== "object" || value === null) return value;
  if ("float32" in value) return new Float32Array(bufferOf(value.float32));
  if ("int64" in value) return new BigInt64Array(bufferOf(value.int64));
  return "contextVectors" in value ? { attentionWeights: undefined, ...value } : value;
}

function bufferOf(base64: unknown): ArrayBuffer {
  return Uint8Array.from(Buffer.from(String(base64), "base64")).buffer;
}
