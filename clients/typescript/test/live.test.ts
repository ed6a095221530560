/**
 * Answers of a live server: those to two forms of the same request are equal.
 *
 * tests/clients/test_typescript.py starts the server and compares answers with those that the Python client receives.
 */

import assert from "node:assert/strict";
import { test } from "node:test";

import { AttentionClient, type Mask, type Sequence, type Tensor } from "attention-client";

const [SELF, CROSS, TEXT] = ["tiny-self", "tiny-cross", "sentence-self-attention"] as const;
const ENCODER = "sentence";
const HEADS = 2;
const ATOL = 1e-5;
const { ATTENTION_TEST_SERVER: server } = process.env;

function live(name: string, check: (client: AttentionClient) => Promise<void>) {
  test(name, { skip: server ? false : "run by tests/clients/test_typescript.py" }, async () => {
    using client = new AttentionClient(server ?? "");
    await check(client);
  });
}

function rows(count: number, width: number): Sequence {
  const data = Float32Array.from({ length: count * width }, (_, index) => Math.sin(index + count));
  return { data, rows: count, width };
}

function tensor({ data, rows, width }: Sequence): Tensor {
  return { data: Float32Array.from(data), shape: [rows, width] };
}

function flags(count: number): boolean[] {
  return Array.from({ length: count }, (_, index) => index % 3 !== 1);
}

function assertClose(found: ArrayLike<unknown> | undefined, expected: ArrayLike<unknown> | undefined) {
  const [own, others] = [Array.from(found ?? [], Number), Array.from(expected ?? [], Number)];
  assert.ok(own.length > 0);
  assert.equal(own.length, others.length);
  own.forEach((value, index) => {
    assert.ok(Math.abs(value - (others[index] ?? NaN)) <= ATOL);
  });
}

live("padded sequences with lengths are those without padding", async (client) => {
  const [padded, lengths] = [
    [rows(6, 4), rows(6, 4), rows(6, 4)],
    [6, 1, 3],
  ];
  const { contextVectors } = await client.attend(SELF, padded, { lengths });
  for (const [index, length] of lengths.entries()) {
    const alone = { data: rows(6, 4).data.slice(0, length * 4), rows: length, width: 4 };
    const own = await client.attend(SELF, alone);
    assertClose(contextVectors[index]?.data.slice(0, length * 4), own.contextVectors.data);
  }
});

for (const [name, shape] of Object.entries({ keys: [5], pairs: [3, 5], heads: [HEADS, 3, 5] })) {
  live(`inputs by name are those of attend, with a mask of ${name}`, async (client) => {
    const [query, key, value] = [rows(3, 4), rows(5, 6), rows(5, 5)];
    const data = flags(shape.reduce((product, size) => product * size));
    const [keyRows = 0, queryRows, heads] = shape.toReversed();
    const mask = { data, keyRows, ...(queryRows && { queryRows }), ...(heads && { heads }) } satisfies Mask;
    const found = await client.attend(CROSS, query, { key, value, mask, returnWeights: true });
    const outputs = ["context_vectors", "attention_weights"];
    const inputs = { query: tensor(query), key: tensor(key), value: tensor(value) };
    const named = await client.infer(CROSS, { ...inputs, attention_mask: { data, shape } }, { outputs });
    assertClose(named.outputs["context_vectors"]?.data, found.contextVectors.data);
    assertClose(named.outputs["attention_weights"]?.data, found.attentionWeights?.data);
  });
}

live("a text is its token ids, by name and in a list", async (client) => {
  const text = await client.attendText(TEXT, "eat dessert first", { returnWeights: true });
  assert.equal(text.attentionWeights?.keyRows, 3);
  const ids = [3, 4, 5];
  const lists = {
    token_ids: [ids, [0]].map((own) => ({ data: BigInt64Array.from(own, BigInt), shape: [own.length] })),
  };
  const named = await client.infer(TEXT, lists, { outputs: ["context_vectors"] });
  const tokens = await client.attendTokens(TEXT, [ids, [0]]);
  for (const [index, { data }] of tokens.contextVectors.entries())
    assertClose(named.outputs["context_vectors"]?.[index]?.data, data);
  assertClose(tokens.contextVectors[0]?.data, (await client.attendTokens(TEXT, ids)).contextVectors.data);
});

live("a stream gives what calls give, and an error in its place", async (client) => {
  const requests = [rows(5, 4), rows(2, 3), rows(2, 4)];
  const widths: (number | string)[] = [];
  for await (const result of client.attendStream(SELF, requests, { returnErrors: true }))
    widths.push("code" in result ? `${result.code} ${result.field}` : result.contextVectors.data.length);
  assert.deepEqual(widths, [20, "INVALID_ARGUMENT query", 8]);
});

live("a context of two parts is its rows, which are put again if they are gone", async (client) => {
  const [query, key, value] = [rows(3, 4), rows(5, 6), rows(5, 5)];
  const mask = { data: flags(5), keyRows: 5 };
  const part = ({ data, width }: Sequence, start: number, end: number): Sequence => {
    return { data: data.slice(start * width, end * width), rows: end - start, width };
  };
  const { contextVectors: expected } = await client.attend(CROSS, query, { key, value, mask });
  const first = part(key, 0, 3);
  const allowed = { data: flags(3), keyRows: 3 };
  await using context = await client.context(CROSS, first, { value: part(value, 0, 3), mask: allowed });
  first.data.fill(0); // the context has a copy
  const last = { value: part(value, 3, 5), mask: { data: flags(5).slice(3), keyRows: 2 } };
  await context.append(part(key, 3, 5), last);
  const { id: whole } = context;
  assert.ok(context.rows === 3 && context.bytes > 0 && context.expiresAt > new Date() && !context.shared);
  const lose = async () => {
    const listed = (await client.contexts(CROSS)).find(({ id }) => id === context.id);
    assert.ok(listed);
    const byId = await client.attend(CROSS, query, { context: listed.id });
    assertClose(byId.contextVectors.data, expected.data);
    await listed.drop();
    for (const each of [listed, listed.id])
      await assert.rejects(client.attend(CROSS, query, { context: each }), { reason: "CONTEXT_NOT_FOUND" });
  };
  await lose();
  const calls = [1, 2].map(() => client.attend(CROSS, [query, query], { context }));
  for (const { contextVectors } of await Promise.all(calls))
    for (const { data } of contextVectors) assertClose(data, expected.data);
  assert.equal(context.id, whole);
  await lose();
  const requests = [1, 2, 3].map(() => ({ query, context }));
  for await (const { contextVectors } of client.attendStream(CROSS, requests))
    assertClose(contextVectors.data, expected.data);
  await lose();
  await context.append(part(key, 0, 3), { value: part(value, 0, 3) });
  assert.equal(context.rows, 6);
  await context.drop();
  await assert.rejects(client.attend(CROSS, query, { context }), { reason: "CONTEXT_NOT_FOUND" });
});

live("models are described, and an absent one is an error", async (client) => {
  const found = await client.model(CROSS);
  assert.deepEqual(
    found.inputs.slice(0, 3).map(({ name }) => name),
    ["query", "key", "value"],
  );
  assert.deepEqual([found.state, found.numHeads, found.parity?.absoluteTolerance], ["ready", HEADS, 1e-5]);
  await assert.rejects(client.attend("absent", rows(1, 4)), { code: "NOT_FOUND" });
});

live("an embedding has a prompt, a width and a bound of its tokens", async (client) => {
  const whole = await client.embed(ENCODER, "Life", { prompt: "query" });
  const short = await client.embed(ENCODER, "Life", { prompt: "query", dimensions: 8 });
  const scale = Math.hypot(...whole.embeddings.subarray(0, 8));
  assertClose(
    short.embeddings,
    whole.embeddings.subarray(0, 8).map((value) => value / scale),
  );
  const without = await client.embed(ENCODER, "Life");
  assert.notDeepEqual(without.embeddings, whole.embeddings);
  const cut = await client.embed(ENCODER, ["a", "dessert ".repeat(200)], { truncate: true });
  assert.deepEqual([cut.embeddings.rows, cut.truncated], [2, [1]]);
});
