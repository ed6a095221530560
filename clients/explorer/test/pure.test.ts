// What the page computes and says, without a browser.
import assert from "node:assert/strict";
import { test } from "node:test";
import { type Answer, allowedPairs, type Mask, type Pattern } from "../src/answer.js";
import { difference, whyIncomparable } from "../src/difference.js";
import { moved } from "../src/elements.js";
import { embedded } from "../src/embedded.js";
import { decode, type Model, Refusal, sentence } from "../src/server.js";
import { Shown } from "../src/shown.js";
import { label, number, ofCell, ofRow } from "../src/words.js";

const TOKENS = ["[CLS]", " eat", "dessert"];

function answer(given: Partial<Answer> = {}): Answer {
  const weights = Float32Array.from({ length: 2 * 2 * 9 }, (_, index) => index / 100);
  const patterns: Pattern[] = [
    { causal: false, window: 0 },
    { causal: true, window: 2 },
  ];
  const sizes = { layers: 2, heads: 2, queries: TOKENS, keys: TOKENS };
  return {
    model: "m",
    version: "1",
    subject: "eat dessert",
    ...sizes,
    patterns,
    mask: null,
    weights,
    ...given,
  };
}

test("a layer's own rule decides which keys a row may attend to", () => {
  assert.deepEqual([...allowedPairs(answer(), 0, 0)], [1, 1, 1, 1, 1, 1, 1, 1, 1]);
  assert.deepEqual([...allowedPairs(answer(), 1, 0)], [1, 0, 0, 1, 1, 0, 0, 1, 1]);
  const both = answer({ patterns: [{ causal: false, window: 1 }] });
  assert.deepEqual([...allowedPairs(both, 0, 0)], [1, 0, 0, 0, 1, 0, 0, 0, 1]);
});

for (const [shape, bits, expected] of [
  [[3], [0b101], [1, 0, 1, 1, 0, 1, 1, 0, 1]],
  [
    [3, 3],
    [0b10001101, 1],
    [1, 0, 1, 1, 0, 0, 0, 1, 1],
  ],
  [
    [2, 3, 3],
    [0, 0b10, 0],
    [1, 0, 0, 0, 0, 0, 0, 0, 0],
  ],
] as const)
  test(`the mask ${shape.join(" x ")} applies in addition`, () => {
    const mask: Mask = { shape: [...shape], bits: Uint8Array.from(bits) };
    assert.deepEqual([...allowedPairs(answer({ mask }), 0, shape.length === 3 ? 1 : 0)], expected);
  });

test("the largest difference and its place", () => {
  const second = answer({ model: "n" });
  second.weights = second.weights.slice();
  const at = 1 * 18 + 0 * 9 + 2 * 3 + 1;
  second.weights[at] = (second.weights[at] ?? 0) - 0.5;
  const found = difference(answer(), second);
  assert.ok(Math.abs(found.largest - 0.5) < 1e-6);
  assert.deepEqual(found.place, { layer: 1, head: 0, query: 2, key: 1 });
});

test("what cannot be compared is said", () => {
  assert.equal(whyIncomparable(answer(), answer()), "");
  const fewer = whyIncomparable(answer(), answer({ model: "n", heads: 1 }));
  assert.equal(
    fewer,
    "m, version 1 has 2 layers of 2 heads, and n, version 1 has 2 layers of 1 heads: they cannot be compared.",
  );
  assert.match(whyIncomparable(answer(), answer({ keys: ["a", "b", "c"] })), /different tokens/);
});

test("rows and cells in words", () => {
  const shown = new Shown(answer(), answer().weights);
  const row = ofRow(shown, { layer: 1, head: 0, query: 2 });
  assert.equal(
    row,
    "In layer 1, head 0, “dessert” attends most to “dessert” 0.260, “eat” 0.250. It cannot attend to 1 of 3 tokens.",
  );
  assert.equal(ofCell(shown, { layer: 1, head: 0, query: 0, key: 1 }), "“[CLS]” cannot attend to “eat”.");
  assert.equal(ofCell(shown, { layer: 0, head: 1, query: 0, key: 1 }), "“[CLS]” attends to “eat”: 0.100.");
  const differences = new Shown(answer(), answer().weights, answer());
  assert.equal(
    ofCell(differences, { layer: 0, head: 1, query: 0, key: 1 }),
    "“[CLS]” to “eat”: difference +0.100.",
  );
});

test("the reach of the colours", () => {
  const shown = new Shown(answer(), answer().weights);
  const reaches = (["shown", "head", "one"] as const).map((range) => shown.reach(range, 0, 1).toFixed(2));
  assert.deepEqual(reaches, ["0.35", "0.17", "1.00"]);
  assert.equal(new Shown(answer(), new Float32Array(36)).reach("shown", 0, 0), 1);
});

test("keys move within a grid", () => {
  const press = (key: string): unknown =>
    moved({ key, preventDefault: () => undefined } as KeyboardEvent, [1, 1], [2, 3]);
  const found = ["ArrowUp", "ArrowDown", "ArrowRight", "Home", "End", "a"].map(press);
  assert.deepEqual(found, [[0, 1], [1, 1], [1, 2], [1, 0], [1, 2], null]);
});

test("labels and numbers", () => {
  assert.deepEqual(
    [label(" the"), label("\n"), label("  "), label("a".repeat(20))],
    ["the", "↵", "␣␣", `${"a".repeat(13)}…`],
  );
  assert.deepEqual(
    [number(0, true), number(-0.00012, true), number(0.25, false), number(0.00001, false)],
    ["0", "−0.000120", "0.250", "0.0000100"],
  );
});

test("answers that a file contains", () => {
  const weights = Float32Array.from([0, 0.25, 0.5, 1]);
  const base64 = (array: Uint8Array): string => Buffer.from(array).toString("base64");
  const given = {
    ...answer(),
    weights: base64(new Uint8Array(weights.buffer)),
    mask: { shape: [2], bits: base64(Uint8Array.of(1)) },
  };
  const [found] = embedded(JSON.stringify([given]));
  assert.deepEqual([...(found?.weights ?? [])], [...weights]);
  assert.deepEqual([...(found?.mask?.bits ?? [])], [1]);
  assert.deepEqual(embedded(" "), []);
});

const MODEL: Model = {
  name: "m",
  version: "1",
  state: "STATE_READY",
  accepts_text: true,
  attention_weights: "attention_weights",
  attention_patterns: [],
};

function body(shape: number[], tokens: string[], weights: Float32Array): [ArrayBuffer, number] {
  const outputs = [
    { name: "attention_weights", shape },
    { name: "tokens", shape: [1, tokens.length], data: tokens },
  ];
  const json = Buffer.from(JSON.stringify({ model_name: "m", model_version: "1", outputs }));
  const whole = new Uint8Array([...json, ...new Uint8Array(weights.buffer)]);
  return [whole.buffer, json.length];
}

for (const [name, shape, layers] of [
  ["a module", [1, 2, 2, 2], 1],
  ["an encoder", [1, 3, 2, 2, 2], 3],
] as const)
  test(`the reply of ${name}`, () => {
    const weights = Float32Array.from({ length: layers * 8 }, (_, index) => index);
    const found = decode(...body([...shape], ["a", "b"], weights), MODEL, "a b");
    assert.deepEqual([found.layers, found.heads, found.keys], [layers, 2, ["a", "b"]]);
    assert.deepEqual([...found.weights], [...weights]);
  });

test("a text with too many tokens is refused with the numbers", () => {
  const tokens = Array.from({ length: 257 }, () => "a");
  assert.throws(
    () => decode(...body([1, 1, 257, 257], tokens, new Float32Array(1)), MODEL, "a"),
    (error: Error) => {
      assert.ok(error instanceof Refusal);
      assert.match(error.message, /^The text has 257 tokens, .* at most 256 tokens/);
      return true;
    },
  );
});

test("each status is a sentence", () => {
  for (const [status, said, retry, expected] of [
    [401, "", null, "The server needs a valid token: enter it in the field “Bearer token” and try again."],
    [403, "no right", null, "The token does not permit this. It says: no right"],
    [404, "gone", null, "The server does not have this model any more: list the models again. It says: gone"],
    [429, "queue", "3", "The server is at a limit: try again in 3 s. It says: queue"],
    [503, "", null, "The server is overloaded or restarting: try again in a moment."],
    [418, "", null, "The server failed with status 418."],
  ] as const)
    assert.equal(sentence(status, said, retry), expected);
});
