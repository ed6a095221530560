/** The tokens: buttons for those that attend, and what the chosen one attends to, as colours and as a table. */

import type { Place } from "./answer.js";
import type { Colours } from "./colours.js";
import { element } from "./elements.js";
import type { Shown } from "./shown.js";
import { label, number, ranked } from "./words.js";

export class Tokens {
  #buttons: HTMLButtonElement[] = [];
  #chosen = 0;

  /**
   * @param queries - A toolbar for the tokens that attend.
   * @param keys - Shows what the chosen token attends to.
   * @param table - Shows the same as a table.
   * @param choose - Called when the user points at a token or moves to it.
   */
  constructor(
    readonly queries: HTMLElement,
    readonly keys: HTMLElement,
    readonly table: HTMLElement,
    readonly choose: (query: number) => void,
  ) {
    queries.addEventListener("keydown", (event) => {
      this.#move(event);
    });
  }

  /** Writes the tokens that attend. */
  build(tokens: string[]): void {
    this.#buttons = tokens.map((token, query) => {
      const button = element(
        "button",
        { type: "button", tabindex: "-1", "aria-pressed": "false" },
        label(token),
      );
      for (const kind of ["pointerenter", "click", "focus"] as const)
        button.addEventListener(kind, () => {
          this.choose(query);
        });
      return button;
    });
    this.queries.replaceChildren(...this.#buttons);
    this.#chosen = 0;
  }

  /** Shows what a token attends to. */
  show(shown: Shown, colours: Colours, reach: number, place: Place): void {
    const { layer, head, query } = place;
    this.#buttons[this.#chosen]?.setAttribute("aria-pressed", "false");
    this.#buttons[this.#chosen]?.setAttribute("tabindex", "-1");
    this.#chosen = query;
    this.#buttons[query]?.setAttribute("aria-pressed", "true");
    this.#buttons[query]?.setAttribute("tabindex", "0");
    const spans = shown.answer.keys.map((token, key) => {
      const at = { layer, head, query, key };
      if (!shown.mayAttend(at)) return element("span", { class: "cannot" }, label(token));
      const value = shown.value(at);
      const span = element("span", { title: number(value, shown.isDifference) }, label(token));
      span.style.backgroundColor = colours.name(value, reach);
      span.style.color = colours.isDark(value, reach) ? "#ffffff" : "#10151d";
      return span;
    });
    this.keys.replaceChildren(...spans);
    this.table.replaceChildren(rows(shown, place));
  }

  #move(event: KeyboardEvent): void {
    const steps: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.#buttons[Math.min(Math.max(this.#chosen + step, 0), this.#buttons.length - 1)]?.focus();
  }
}

/** The keys by falling magnitude, then those that cannot be attended to. */
function rows(shown: Shown, { layer, head, query }: Place): HTMLTableElement {
  const named = ranked(shown, layer, head, query);
  const others = shown.answer.keys.map((_, key) => key).filter((key) => !named.includes(key));
  const title = shown.isDifference ? "difference" : "weight";
  const header = element(
    "tr",
    {},
    ...["position", "token", title].map((text) => element("th", { scope: "col" }, text)),
  );
  const body = [...named, ...others].map((key) => {
    const at = { layer, head, query, key };
    const value = shown.mayAttend(at) ? number(shown.value(at), shown.isDifference) : "cannot be attended to";
    const cells = [String(key), label(shown.answer.keys[key] ?? ""), value];
    return element("tr", {}, ...cells.map((text) => element("td", {}, text)));
  });
  return element("table", {}, element("thead", {}, header), element("tbody", {}, ...body));
}
