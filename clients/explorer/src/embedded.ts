/** Answers that a file contains, as `attention-client weights --html` writes them. */

import type { Answer, Mask } from "./answer.js";

/** An answer whose numbers are in base64: little-endian float32 (L, H, Tq, Tk), and packed flags of the mask. */
export interface Embedded extends Omit<Answer, "weights" | "mask"> {
  weights: string;
  mask: { shape: number[]; bits: string } | null;
}

/** The answers of a file; empty for the page of a server. */
export function embedded(text: string): Answer[] {
  if (text.trim() === "") return [];
  return (JSON.parse(text) as Embedded[]).map((given) => ({
    ...given,
    mask: given.mask && maskOf(given.mask),
    weights: new Float32Array(bytes(given.weights).buffer),
  }));
}

function maskOf(given: { shape: number[]; bits: string }): Mask {
  return { shape: given.shape, bits: bytes(given.bits) };
}

function bytes(base64: string): Uint8Array<ArrayBuffer> {
  const text = atob(base64);
  const found = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) found[index] = text.charCodeAt(index);
  return found;
}
