/** The attention weights of one text or sequence, and which keys its rows may attend to. */

/** The rule of one layer, as attention.v1 states it. */
export interface Pattern {
  /** Whether a query row attends only to keys up to its own position. */
  causal: boolean;
  /** A query row attends only to keys fewer than this many rows away; 0 if the distance does not matter. */
  window: number;
}

/** The mask of a request: one flag for each key, pair of rows, or pair of rows of a head. */
export interface Mask {
  /** (Tk), (Tq, Tk) or (H, Tq, Tk). */
  shape: number[];
  /** The flags in row-major order, eight to a byte, the first in the lowest bit. */
  bits: Uint8Array;
}

export interface Answer {
  model: string;
  version: string;
  /** The text, or what stands for it. */
  subject: string;
  queries: string[];
  keys: string[];
  layers: number;
  heads: number;
  /** One for each layer. */
  patterns: Pattern[];
  mask: Mask | null;
  /** (L, H, Tq, Tk), row-major. */
  weights: Float32Array;
}

/** Where a value stands. */
export interface Place {
  layer: number;
  head: number;
  query: number;
  key: number;
}

/** The (Tq, Tk) values of one head, as a view. */
export function ofHead(answer: Answer, values: Float32Array, layer: number, head: number): Float32Array {
  const pairs = answer.queries.length * answer.keys.length;
  const start = (layer * answer.heads + head) * pairs;
  return values.subarray(start, start + pairs);
}

/** For each pair of rows of a head, 1 if the query row may attend to the key. */
export function allowedPairs(answer: Answer, layer: number, head: number): Uint8Array {
  const [rows, columns] = [answer.queries.length, answer.keys.length];
  const pattern = answer.patterns[layer] ?? { causal: false, window: 0 };
  const allowed = new Uint8Array(rows * columns);
  for (let query = 0; query < rows; query++)
    for (let key = 0; key < columns; key++) {
      const near = pattern.window === 0 || Math.abs(query - key) < pattern.window;
      const past = !pattern.causal || key <= query;
      allowed[query * columns + key] = Number(near && past && isUnmasked(answer, head, query, key));
    }
  return allowed;
}

function isUnmasked(answer: Answer, head: number, query: number, key: number): boolean {
  if (answer.mask === null) return true;
  const columns = answer.keys.length;
  const at = [0, key, query * columns + key, (head * answer.queries.length + query) * columns + key];
  const bit = at[answer.mask.shape.length] ?? 0;
  return ((answer.mask.bits[bit >> 3] ?? 0) & (1 << (bit & 7))) !== 0;
}

/** The largest magnitude among values. */
export function largest(values: Float32Array): number {
  let found = 0;
  for (const value of values) if (Math.abs(value) > found) found = Math.abs(value);
  return found;
}

/** "model, version 2" */
export function title(answer: Answer): string {
  return `${answer.model}, version ${answer.version}`;
}
