/** What the page says: numbers, tokens, and sentences about a place. */

import type { Place } from "./answer.js";
import type { Shown } from "./shown.js";

const LONGEST = 14;
const NAMED = 3;

/** A token as a label: visible if it is white space, and short. */
export function label(token: string): string {
  const shown = token.trim() || token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown;
}

/** A weight with three decimals; a smaller number, or a difference, with three digits. */
export function number(value: number, isDifference: boolean): string {
  if (value === 0) return "0";
  if (isDifference) return `${value > 0 ? "+" : "−"}${Math.abs(value).toPrecision(3)}`;
  return value >= 0.0005 ? value.toFixed(3) : value.toPrecision(3);
}

/** "layer 2, head 0"; a model of one layer has heads only. */
export function headName(shown: Shown, layer: number, head: number): string {
  return shown.answer.layers > 1 ? `layer ${layer}, head ${head}` : `head ${head}`;
}

/** The keys of a row by falling magnitude, without those that may not be attended to. */
export function ranked(shown: Shown, layer: number, head: number, query: number): number[] {
  const keys = shown.answer.keys.map((_, key) => key);
  const size = (key: number): number => Math.abs(shown.value({ layer, head, query, key }));
  return keys
    .filter((key) => shown.mayAttend({ layer, head, query, key }))
    .sort((a, b) => size(b) - size(a) || a - b);
}

/** What one cell says. */
export function ofCell(shown: Shown, place: Place): string {
  const [query, key] = [quoted(shown.answer.queries[place.query]), quoted(shown.answer.keys[place.key])];
  if (!shown.mayAttend(place)) return `${query} cannot attend to ${key}.`;
  const value = number(shown.value(place), shown.isDifference);
  return shown.isDifference
    ? `${query} to ${key}: difference ${value}.`
    : `${query} attends to ${key}: ${value}.`;
}

/** What one row says: its largest values, and how many keys it cannot attend to. */
export function ofRow(shown: Shown, { layer, head, query }: Omit<Place, "key">): string {
  const keys = ranked(shown, layer, head, query);
  const named = keys.slice(0, NAMED).map((key) => {
    const value = number(shown.value({ layer, head, query, key }), shown.isDifference);
    return `${quoted(shown.answer.keys[key])} ${value}`;
  });
  const cannot = shown.answer.keys.length - keys.length;
  const start = `In ${headName(shown, layer, head)}, ${quoted(shown.answer.queries[query])}`;
  const end = cannot > 0 ? ` It cannot attend to ${cannot} of ${shown.answer.keys.length} tokens.` : "";
  if (named.length === 0) return `${start} cannot attend to any token.`;
  const verb = shown.isDifference ? "differs most for" : "attends most to";
  return `${start} ${verb} ${named.join(", ")}.${end}`;
}

export function quoted(token = ""): string {
  return `“${label(token)}”`;
}
