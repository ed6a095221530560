/** The picture: which answers, which view of them, which head, row and cell are chosen. */

import { type Answer, type Place, title } from "./answer.js";
import { Colours } from "./colours.js";
import { type Difference, difference, whyIncomparable } from "./difference.js";
import { byId, element } from "./elements.js";
import { Heads } from "./heads.js";
import { drawLegend } from "./legend.js";
import { HeadMap } from "./map.js";
import { type Range, Shown } from "./shown.js";
import { Tokens } from "./tokens.js";
import { headName, ofCell, ofRow, quoted } from "./words.js";

interface View {
  name: string;
  shown: Shown;
}

export class Explorer {
  readonly #dark = matchMedia("(prefers-color-scheme: dark)");
  readonly #range = byId("range", HTMLSelectElement);
  readonly #heads: Heads;
  readonly #map: HeadMap;
  readonly #tokens: Tokens;
  #colours = new Colours(false, false);
  #views: View[] = [];
  #view = 0;
  #place: Place = { layer: 0, head: 0, query: 0, key: 0 };

  constructor() {
    this.#heads = new Heads(byId("heads", HTMLElement), (layer, head) => {
      this.#chooseHead(layer, head);
    });
    this.#map = new HeadMap(byId("map", HTMLElement), (query, key) => {
      this.#chooseCell(query, key);
    });
    const parts = ["queries", "keys", "table"].map((id) => byId(id, HTMLElement));
    const [queries, keys, table] = parts as [HTMLElement, HTMLElement, HTMLElement];
    this.#tokens = new Tokens(queries, keys, table, (query) => {
      this.#chooseRow(query);
    });
    for (const source of [this.#range, this.#dark])
      source.addEventListener("change", () => {
        this.#draw();
      });
  }

  /** Shows the answer of one model, or those of two models and their difference. */
  show(answers: Answer[]): void {
    const [first, second] = answers;
    if (!first) return;
    this.#views = answers.map((answer) => ({
      name: title(answer),
      shown: new Shown(answer, answer.weights),
    }));
    const why = second ? whyIncomparable(first, second) : "";
    const found = second && why === "" ? difference(first, second) : null;
    if (second && found)
      this.#views.push({ name: "Difference", shown: new Shown(first, found.values, second) });
    byId("compared", HTMLElement).textContent = found && second ? compared(first, second, found) : why;
    byId("subject", HTMLElement).textContent = `${answers.map(title).join(" and ")}: ${first.subject}`;
    byId("picture", HTMLElement).hidden = false;
    this.#place = found ? found.place : { layer: first.layers - 1, head: 0, query: 0, key: 0 };
    this.#chooseView(found ? this.#views.length - 1 : 0);
  }

  get #shown(): Shown {
    const view = this.#views[this.#view];
    if (!view) throw new Error("nothing is shown");
    return view.shown;
  }

  get #reach(): number {
    return this.#shown.reach(this.#range.value as Range, this.#place.layer, this.#place.head);
  }

  #chooseView(view: number): void {
    this.#view = view;
    const legend = element("legend", {}, "Show");
    const choices = this.#views.map(({ name }, index) => {
      const input = element("input", { type: "radio", name: "view", value: String(index) });
      input.checked = index === view;
      input.addEventListener("change", () => {
        this.#view = index;
        this.#adopt();
      });
      return element("label", {}, input, name);
    });
    const views = byId("views", HTMLElement);
    views.replaceChildren(legend, ...choices);
    views.hidden = this.#views.length === 1;
    this.#adopt();
  }

  /** Takes the sizes and tokens of the view, which may be those of another model. */
  #adopt(): void {
    const { layers, heads, queries, keys } = this.#shown.answer;
    this.#place = {
      layer: Math.min(this.#place.layer, layers - 1),
      head: Math.min(this.#place.head, heads - 1),
      query: Math.min(this.#place.query, queries.length - 1),
      key: Math.min(this.#place.key, keys.length - 1),
    };
    this.#tokens.build(queries);
    this.#draw();
  }

  #draw(): void {
    if (this.#views.length === 0) return;
    this.#colours = new Colours(this.#shown.isDifference, this.#dark.matches);
    this.#heads.draw(this.#shown, this.#colours, this.#range.value as Range);
    this.#chooseHead(this.#place.layer, this.#place.head);
  }

  #chooseHead(layer: number, head: number): void {
    this.#place = { ...this.#place, layer, head };
    this.#heads.mark(layer, head);
    const name = headName(this.#shown, layer, head);
    byId("head-title", HTMLElement).textContent = `${name.charAt(0).toUpperCase()}${name.slice(1)}`;
    this.#map.draw(this.#shown, this.#colours, this.#range.value as Range, layer, head);
    drawLegend(byId("legend", HTMLElement), this.#colours, this.#reach);
    this.#chooseRow(this.#place.query);
  }

  #chooseRow(query: number): void {
    this.#mark({ ...this.#place, query });
    this.#read(ofRow(this.#shown, this.#place));
  }

  #chooseCell(query: number, key: number): void {
    if (query === this.#place.query && key === this.#place.key) return;
    const place = { ...this.#place, query, key };
    if (query !== this.#place.query) this.#mark(place);
    else this.#map.mark((this.#place = place));
    this.#read(ofCell(this.#shown, this.#place));
  }

  #mark(place: Place): void {
    this.#place = place;
    this.#map.mark(place);
    this.#tokens.show(this.#shown, this.#colours, this.#reach, place);
  }

  #read(text: string): void {
    byId("reading", HTMLElement).textContent = text;
  }
}

/** States the largest difference and where it is. */
function compared(first: Answer, second: Answer, { largest, place }: Difference): string {
  const names = `${title(second)} minus ${title(first)}`;
  if (largest === 0) return `${names}: no difference.`;
  const layer = first.layers > 1 ? `layer ${place.layer}, ` : "";
  const where = `${layer}head ${place.head}, ${quoted(first.queries[place.query])} to ${quoted(first.keys[place.key])}`;
  return `${names}: the largest absolute difference is ${largest.toPrecision(3)} (${where}).`;
}
