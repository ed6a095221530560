/** Makes elements of the page. */

export function element<K extends keyof HTMLElementTagNameMap>(
  name: K,
  attributes: Record<string, string> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** An element of the page by its id, which the page has. */
export function byId<T extends HTMLElement>(id: string, kind: new () => T): T {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no ${kind.name} ${id}`);
  return found;
}

const STEPS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  Home: [0, -Infinity],
  End: [0, Infinity],
};

/** The row and column of a grid that a key moves to; null if it is not such a key. */
export function moved(
  event: KeyboardEvent,
  [row, column]: [number, number],
  [rows, columns]: [number, number],
): [number, number] | null {
  const step = STEPS[event.key];
  if (step === undefined) return null;
  event.preventDefault();
  const within = (at: number, count: number): number => Math.min(Math.max(at, 0), count - 1);
  return [within(row + step[0], rows), within(column + step[1], columns)];
}
