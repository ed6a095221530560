/** All heads as small multiples: a row for each layer, a column for each head, one of them chosen. */

import { largest } from "./answer.js";
import type { Colours } from "./colours.js";
import { element, moved } from "./elements.js";
import type { Range, Shown } from "./shown.js";
import { headName, number } from "./words.js";

const MANY = 8;
/** Side of the largest small picture, in pixels of the page: larger ones are reduced, with smoothing. */
const SIDE = 72;

export class Heads {
  readonly #buttons = new Map<string, HTMLButtonElement>();
  #chosen: [number, number] = [0, 0];

  /**
   * @param root - An element with the role grid.
   * @param choose - Called with layer and head when the user chooses one.
   */
  constructor(
    readonly root: HTMLElement,
    readonly choose: (layer: number, head: number) => void,
  ) {
    root.addEventListener("keydown", (event) => {
      this.#move(event);
    });
  }

  /** Draws every head. */
  draw(shown: Shown, colours: Colours, range: Range): void {
    const { layers, heads } = shown.answer;
    this.root.classList.toggle("many", heads > MANY);
    if (this.#buttons.size !== layers * heads || !this.#buttons.has(key(layers - 1, heads - 1)))
      this.#build(layers, heads);
    for (let layer = 0; layer < layers; layer++)
      for (let head = 0; head < heads; head++) this.#drawOne(shown, colours, range, layer, head);
  }

  /** Marks the head that is shown large. */
  mark(layer: number, head: number): void {
    this.#cell(...this.#chosen)?.setAttribute("aria-selected", "false");
    this.#button(...this.#chosen)?.setAttribute("tabindex", "-1");
    this.#chosen = [layer, head];
    this.#cell(layer, head)?.setAttribute("aria-selected", "true");
    this.#button(layer, head)?.setAttribute("tabindex", "0");
  }

  #build(layers: number, heads: number): void {
    this.#buttons.clear();
    this.root.replaceChildren();
    for (let layer = 0; layer < layers; layer++) {
      const row = element("div", { role: "row" });
      if (layers > 1) row.append(element("span", { role: "rowheader" }, `layer ${layer}`));
      for (let head = 0; head < heads; head++) {
        const canvas = element("canvas", { "aria-hidden": "true" });
        const button = element("button", { type: "button", tabindex: "-1" }, canvas);
        button.addEventListener("click", () => {
          this.choose(layer, head);
        });
        this.#buttons.set(key(layer, head), button);
        row.append(element("span", { role: "gridcell", "aria-selected": "false" }, button));
      }
      this.root.append(row);
    }
  }

  #drawOne(shown: Shown, colours: Colours, range: Range, layer: number, head: number): void {
    const button = this.#button(layer, head);
    const canvas = button?.querySelector("canvas");
    const [rows, columns] = [shown.answer.queries.length, shown.answer.keys.length];
    const reach = shown.reach(range, layer, head);
    const most = number(largest(shown.head(layer, head)), false);
    const name = `${headName(shown, layer, head)}: largest ${shown.isDifference ? "difference" : "weight"} ${most}`;
    button?.setAttribute("aria-label", name);
    button?.setAttribute("title", name);
    if (!canvas) return;
    [canvas.width, canvas.height] = [columns, rows];
    canvas.classList.toggle("pixels", Math.max(rows, columns) <= SIDE);
    const image = colours.image(shown.head(layer, head), shown.allowed(layer, head), columns, reach);
    canvas.getContext("2d")?.putImageData(image, 0, 0);
  }

  #move(event: KeyboardEvent): void {
    const layers = this.root.children.length;
    const to = moved(event, this.#chosen, [layers, this.#buttons.size / layers]);
    if (!to) return;
    this.choose(...to);
    this.#button(...to)?.focus();
  }

  #button(layer: number, head: number): HTMLButtonElement | undefined {
    return this.#buttons.get(key(layer, head));
  }

  #cell(layer: number, head: number): HTMLElement | null | undefined {
    return this.#button(layer, head)?.parentElement;
  }
}

function key(layer: number, head: number): string {
  return `${layer} ${head}`;
}
