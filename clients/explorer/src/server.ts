/** Asks the server that the page comes from. Every failure is a sentence for people. */

import type { Answer, Pattern } from "./answer.js";

/** A model as /explore/models describes it: the message Model of attention.v1. */
export interface Model {
  name: string;
  version: string;
  state: string;
  accepts_text: boolean;
  num_heads?: number;
  /** The output with attention weights; empty if there is none. */
  attention_weights: string;
  attention_patterns: Pattern[];
}

/** A longer text would make pictures that nobody can read, and that take long. */
export const MAX_CHARACTERS = 4000;
export const MAX_TOKENS = 256;
export const MAX_WEIGHTS = 1 << 24;

/** A failure that is shown as it is. */
export class Refusal extends Error {}

interface Output {
  name: string;
  shape: number[];
  data?: string[];
  parameters?: { binary_data_size?: number };
}

interface Reply {
  model_name: string;
  model_version: string;
  outputs: Output[];
  parameters?: { truncated?: string };
}

/** Whether the page can draw a model. */
export function isDrawn(model: Model): boolean {
  return hasWeights(model) && model.accepts_text;
}

export function hasWeights(model: Model): boolean {
  return model.state === "STATE_READY" && model.attention_weights !== "";
}

/** The models that the token may read. */
export async function listModels(token: string): Promise<Model[]> {
  const response = await ask("explore/models", token);
  return ((await response.json()) as { models: Model[] }).models;
}

/** The attention weights of a text. */
export async function attend(model: Model, text: string, token: string): Promise<Answer> {
  if (text.length > MAX_CHARACTERS)
    throw new Refusal(
      `The text has ${text.length} characters. This page draws at most ${MAX_CHARACTERS}: shorten it.`,
    );
  const body = {
    inputs: [{ name: "text", shape: [1], datatype: "BYTES", data: [text] }],
    outputs: [{ name: "attention_weights", parameters: { binary_data: true } }, { name: "tokens" }],
  };
  const path = `v2/models/${encodeURIComponent(model.name)}/versions/${encodeURIComponent(model.version)}/infer`;
  const response = await ask(path, token, JSON.stringify(body));
  const size = Number(response.headers.get("inference-header-content-length"));
  return decode(await response.arrayBuffer(), size, model, text);
}

/** An answer from the body of a response: JSON of a size, and the weights after it. */
export function decode(body: ArrayBuffer, size: number, model: Model, text: string): Answer {
  const reply = JSON.parse(new TextDecoder().decode(body.slice(0, size))) as Reply;
  const tokens = reply.outputs.find(({ name }) => name === "tokens")?.data ?? [];
  // (1, H, T, T), or (1, L, H, T, T) of a text encoder.
  const shape = reply.outputs.find(({ name }) => name === "attention_weights")?.shape ?? [];
  const [layers = 1, heads = 0] = shape.length === 5 ? shape.slice(1) : [1, ...shape.slice(1)];
  const count = layers * heads * tokens.length ** 2;
  if (tokens.length > MAX_TOKENS || count > MAX_WEIGHTS)
    throw new Refusal(
      `The text has ${tokens.length} tokens, and ${model.name} has ${layers * heads} heads. This page draws at most ` +
        `${MAX_TOKENS} tokens and ${MAX_WEIGHTS.toLocaleString("en")} weights: shorten the text.`,
    );
  return {
    model: reply.model_name,
    version: reply.model_version,
    subject: reply.parameters?.truncated === undefined ? text : `${text} (cut to ${tokens.length} tokens)`,
    queries: tokens,
    keys: tokens,
    layers,
    heads,
    patterns: model.attention_patterns,
    mask: null,
    weights: new Float32Array(body.slice(size, size + 4 * count)),
  };
}

async function ask(path: string, token: string, body?: string): Promise<Response> {
  const headers: Record<string, string> = token ? { authorization: `Bearer ${token}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body ?? null,
    });
  } catch {
    throw new Refusal("The server cannot be reached. Check that it runs, and try again.");
  }
  if (response.ok) return response;
  throw new Refusal(sentence(response.status, await reason(response), response.headers.get("retry-after")));
}

/** What a status means, and what to do. */
export function sentence(status: number, said: string, retryAfter: string | null): string {
  const seconds = retryAfter === null ? "a moment" : `${retryAfter} s`;
  const meanings: Record<number, string> = {
    400: "The server refused the request",
    401: "The server needs a valid token: enter it in the field “Bearer token” and try again",
    403: "The token does not permit this",
    404: "The server does not have this model any more: list the models again",
    413: "The text or its answer is larger than the server takes: shorten the text",
    429: `The server is at a limit: try again in ${seconds}`,
    503: `The server is overloaded or restarting: try again in ${seconds}`,
    504: "The server did not answer in time: try again, or shorten the text",
  };
  const meaning = meanings[status] ?? `The server failed with status ${status}`;
  return said === "" ? `${meaning}.` : `${meaning}. It says: ${said}`;
}

async function reason(response: Response): Promise<string> {
  try {
    const { error } = (await response.json()) as { error?: unknown };
    return typeof error === "string" ? error : "";
  } catch {
    return "";
  }
}
