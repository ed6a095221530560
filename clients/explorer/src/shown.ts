/** What the page shows at a time: the weights of one model, or the difference between two. */

import { type Answer, allowedPairs, largest, ofHead, type Place } from "./answer.js";

/** Which value has the strongest colour: the largest shown, the largest of each head, or 1. */
export type Range = "shown" | "head" | "one";

export class Shown {
  /** The (Tq, Tk) flags of each head, once they are needed. */
  readonly #allowed = new Map<string, Uint8Array>();
  readonly #largest: number;

  /**
   * @param answer - Labels and sizes.
   * @param values - The weights of `answer`, or the differences between `other` and it.
   * @param other - The second model of a difference.
   */
  constructor(
    readonly answer: Answer,
    readonly values: Float32Array,
    readonly other: Answer | null = null,
  ) {
    this.#largest = largest(values);
  }

  get isDifference(): boolean {
    return this.other !== null;
  }

  /** The (Tq, Tk) values of one head. */
  head(layer: number, head: number): Float32Array {
    return ofHead(this.answer, this.values, layer, head);
  }

  value(place: Place): number {
    return this.head(place.layer, place.head)[place.query * this.answer.keys.length + place.key] ?? 0;
  }

  /** For each pair of rows, 1 if it may have a value: of a difference, in either model. */
  allowed(layer: number, head: number): Uint8Array {
    const name = this.answer.mask?.shape.length === 3 ? `${layer} ${head}` : `${layer}`;
    let found = this.#allowed.get(name);
    if (found === undefined) {
      found = allowedPairs(this.answer, layer, head);
      if (this.other !== null) {
        const others = allowedPairs(this.other, layer, head);
        found = found.map((flag, index) => flag | (others[index] ?? 0));
      }
      this.#allowed.set(name, found);
    }
    return found;
  }

  mayAttend(place: Place): boolean {
    return this.allowed(place.layer, place.head)[place.query * this.answer.keys.length + place.key] === 1;
  }

  /** The magnitude with the strongest colour, above 0. */
  reach(range: Range, layer: number, head: number): number {
    const found = range === "one" ? 1 : range === "head" ? largest(this.head(layer, head)) : this.#largest;
    return found > 0 ? found : 1;
  }
}
