/**
 * Embeds texts on an attention server, and prints the cosine of the first text and each other.
 *
 *     cd clients/typescript && npm ci && npm run build
 *     cd ../../examples/typescript && npm install && npm start -- --model my-bert "eat dessert" "a sweet" "a river"
 *
 * Exit status: 0 if all texts were embedded, 1 if the call failed, 2 for wrong usage.
 */

import { parseArgs } from "node:util";

import { AttentionClient, AttentionClientError, type Sequence } from "attention-client";

const USAGE = "usage: npm start -- --model NAME [--server HOST:PORT] [--timeout-ms MS] TEXT TEXT...";
const OPTIONS = {
  server: { type: "string", default: "127.0.0.1:8001" },
  model: { type: "string" },
  "timeout-ms": { type: "string", default: "10000" },
} as const;

/** The cosine of the first row and each row. */
function cosines({ data, rows, width }: Sequence): number[] {
  const row = (index: number) => data.subarray(index * width, (index + 1) * width);
  const dot = (one: Float32Array, other: Float32Array) =>
    one.reduce((sum, value, index) => sum + value * (other[index] ?? NaN), 0);
  const first = row(0);
  return Array.from({ length: rows }, (_, index) => {
    const own = row(index);
    return dot(first, own) / Math.sqrt(dot(first, first) * dot(own, own));
  });
}

function parse() {
  try {
    return parseArgs({ options: OPTIONS, allowPositionals: true });
  } catch (error) {
    console.error(String(error));
    return undefined;
  }
}

async function main(): Promise<number> {
  const { values, positionals: texts } = parse() ?? { values: {}, positionals: [] };
  if (!values.model || texts.length === 0) {
    console.error(USAGE);
    return 2;
  }
  using client = new AttentionClient(values.server, { timeoutMs: Number(values["timeout-ms"]) });
  try {
    const { embeddings } = await client.embed(values.model, texts);
    console.log(`${embeddings.rows} embeddings of width ${embeddings.width}`);
    cosines(embeddings).forEach((cosine, index) => {
      console.log(`${cosine.toFixed(4)}  ${texts[index] ?? ""}`);
    });
    return 0;
  } catch (error) {
    if (!(error instanceof AttentionClientError)) throw error;
    console.error(`error: ${error.code}: ${error.message}`);
    return 1;
  }
}

process.exitCode = await main();
