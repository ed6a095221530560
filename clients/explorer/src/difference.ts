/** The difference between the weights of two models for the same text. */

import { type Answer, type Place, title } from "./answer.js";

export interface Difference {
  /** Second minus first, (L, H, Tq, Tk). */
  values: Float32Array;
  /** The largest absolute difference. */
  largest: number;
  /** Where it is. */
  place: Place;
}

/** Why two answers cannot be compared; empty if they can. */
export function whyIncomparable(first: Answer, second: Answer): string {
  if (first.layers !== second.layers || first.heads !== second.heads)
    return `${title(first)} has ${counted(first)}, and ${title(second)} has ${counted(second)}: they cannot be compared.`;
  if (!sameTexts(first.queries, second.queries) || !sameTexts(first.keys, second.keys))
    return `${title(first)} and ${title(second)} split the text into different tokens: they cannot be compared.`;
  return "";
}

export function difference(first: Answer, second: Answer): Difference {
  const values = new Float32Array(first.weights.length);
  let [largest, at] = [0, 0];
  for (let index = 0; index < values.length; index++) {
    const value = (second.weights[index] ?? 0) - (first.weights[index] ?? 0);
    values[index] = value;
    if (Math.abs(value) > largest) [largest, at] = [Math.abs(value), index];
  }
  return { values, largest, place: placeOf(first, at) };
}

function placeOf(answer: Answer, index: number): Place {
  const [rows, columns] = [answer.queries.length, answer.keys.length];
  const key = index % columns;
  const query = Math.floor(index / columns) % rows;
  const head = Math.floor(index / (columns * rows)) % answer.heads;
  return { layer: Math.floor(index / (columns * rows * answer.heads)), head, query, key };
}

function sameTexts(first: string[], second: string[]): boolean {
  return first.length === second.length && first.every((text, index) => text === second[index]);
}

function counted(answer: Answer): string {
  return `${answer.layers} ${answer.layers === 1 ? "layer" : "layers"} of ${answer.heads} heads`;
}
