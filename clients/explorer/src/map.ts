/** One head, large: cells with axes, the chosen row and cell, numbers where they fit. */

import { axisLeft, axisTop } from "d3-axis";
import { scaleBand } from "d3-scale";
import { select } from "d3-selection";
import type { Place } from "./answer.js";
import type { Colours } from "./colours.js";
import { moved } from "./elements.js";
import type { Range, Shown } from "./shown.js";
import { label } from "./words.js";

/** Sides of a cell in pixels, and the side that the map is to have. */
const [SMALLEST, LARGEST, SIDE] = [4, 44, 640];
/** Cells at least this large have numbers, hatching and lines between them; labels need room too. */
const [WITH_NUMBER, WITH_HATCHING, WITH_LINES, WITH_LABEL] = [36, 6, 10, 13];
const [LEFT, TOP] = [104, 96];
const HATCH = 5;

export class HeadMap {
  readonly #canvas = document.createElement("canvas");
  readonly #svg = select(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
  #shown: Shown | null = null;
  #cell = LARGEST;
  #place: Place = { layer: 0, head: 0, query: 0, key: 0 };

  /**
   * @param root - A focusable element.
   * @param choose - Called when the user points at a cell or moves to it.
   */
  constructor(
    readonly root: HTMLElement,
    readonly choose: (query: number, key: number) => void,
  ) {
    this.#canvas.setAttribute("aria-hidden", "true");
    const svg = this.#svg.attr("aria-hidden", "true").node();
    root.replaceChildren(this.#canvas, ...(svg ? [svg] : []));
    for (const kind of ["pointermove", "pointerdown"] as const)
      root.addEventListener(kind, (event) => {
        this.#point(event);
      });
    root.addEventListener("keydown", (event) => {
      this.#move(event);
    });
  }

  /** Draws a head. */
  draw(shown: Shown, colours: Colours, range: Range, layer: number, head: number): void {
    this.#shown = shown;
    const [rows, columns] = [shown.answer.queries.length, shown.answer.keys.length];
    this.#cell = Math.min(Math.max(Math.floor(SIDE / Math.max(rows, columns)), SMALLEST), LARGEST);
    this.#drawCells(shown, colours, shown.reach(range, layer, head), layer, head);
    this.#drawFrame(shown);
    if (this.#cell >= WITH_NUMBER)
      this.#drawNumbers(shown, colours, shown.reach(range, layer, head), layer, head);
  }

  /** Marks the chosen row and cell. */
  mark(place: Place): void {
    this.#place = place;
    const [cell, columns] = [this.#cell, this.#shown?.answer.keys.length ?? 0];
    const y = TOP + place.query * cell;
    const box = (name: string, x: number, width: number): void => {
      this.#svg
        .selectAll<SVGRectElement, number>(`rect.${name}`)
        .data([0])
        .join("rect")
        .attr("class", name)
        .attr("x", x)
        .attr("y", y)
        .attr("width", width)
        .attr("height", cell)
        .raise();
    };
    box("row", LEFT, columns * cell);
    box("cell", LEFT + place.key * cell, cell);
    this.#svg
      .selectAll<SVGGElement, number>(".queries .tick")
      .classed("chosen", (row) => row === place.query);
    this.#svg
      .selectAll<SVGGElement, number>(".keys .tick")
      .classed("chosen", (column) => column === place.key);
  }

  #drawCells(shown: Shown, colours: Colours, reach: number, layer: number, head: number): void {
    const [rows, columns, cell] = [shown.answer.queries.length, shown.answer.keys.length, this.#cell];
    const [values, allowed] = [shown.head(layer, head), shown.allowed(layer, head)];
    [this.#canvas.width, this.#canvas.height] = [columns * cell, rows * cell];
    this.#canvas.style.left = `${LEFT}px`;
    this.#canvas.style.top = `${TOP}px`;
    const context = this.#canvas.getContext("2d");
    if (!context) return;
    const gap = cell >= WITH_LINES ? 1 : 0;
    context.strokeStyle = colours.cannotLine;
    for (let index = 0; index < values.length; index++) {
      const [x, y] = [(index % columns) * cell, Math.floor(index / columns) * cell];
      const can = allowed[index] === 1;
      context.fillStyle = can ? colours.name(values[index] ?? 0, reach) : colours.cannot;
      context.fillRect(x, y, cell - gap, cell - gap);
      if (!can && cell >= WITH_HATCHING) hatch(context, x, y, cell - gap);
    }
  }

  #drawFrame(shown: Shown): void {
    const [cell, { queries, keys }] = [this.#cell, shown.answer];
    this.#svg
      .attr("width", LEFT + keys.length * cell + TOP / 2)
      .attr("height", TOP + queries.length * cell + 4);
    const side = (name: string): typeof group => {
      const group = this.#svg
        .selectAll<SVGGElement, number>(`g.${name}`)
        .data([0])
        .join("g")
        .attr("class", name);
      return group;
    };
    const group = side("queries");
    const left = axisLeft(band(queries.length, cell)).tickValues(ticks(queries.length, cell));
    group
      .attr("transform", `translate(${LEFT},${TOP})`)
      .call(left.tickFormat((row) => label(queries[row] ?? "")));
    const top = axisTop(band(keys.length, cell)).tickValues(ticks(keys.length, cell));
    side("keys")
      .attr("transform", `translate(${LEFT},${TOP})`)
      .call(top.tickFormat((column) => label(keys[column] ?? "")))
      .selectAll("text")
      .attr("text-anchor", "start")
      .attr("transform", "rotate(-45) translate(6,4)");
    this.#svg.selectAll("text.number").remove();
  }

  #drawNumbers(shown: Shown, colours: Colours, reach: number, layer: number, head: number): void {
    const [cell, columns] = [this.#cell, shown.answer.keys.length];
    const allowed = shown.allowed(layer, head);
    const values = [...shown.head(layer, head)].map((value, index) => ({ value, index }));
    this.#svg
      .selectAll("text.number")
      .data(values.filter(({ index }) => allowed[index] === 1))
      .join("text")
      .attr("class", ({ value }) => `number ${colours.isDark(value, reach) ? "light" : "dark"}`)
      .attr("x", ({ index }) => LEFT + ((index % columns) + 0.5) * cell)
      .attr("y", ({ index }) => TOP + (Math.floor(index / columns) + 0.5) * cell)
      .text(({ value }) => (shown.isDifference ? value.toExponential(0) : value.toFixed(2)));
  }

  #point(event: PointerEvent): void {
    const box = this.#canvas.getBoundingClientRect();
    const key = Math.floor((event.clientX - box.left) / this.#cell);
    const query = Math.floor((event.clientY - box.top) / this.#cell);
    const answer = this.#shown?.answer;
    if (answer && key >= 0 && query >= 0 && key < answer.keys.length && query < answer.queries.length)
      this.choose(query, key);
  }

  #move(event: KeyboardEvent): void {
    const { query, key } = this.#place;
    const answer = this.#shown?.answer;
    const to = answer && moved(event, [query, key], [answer.queries.length, answer.keys.length]);
    if (to) this.choose(...to);
  }
}

function band(count: number, cell: number): ReturnType<typeof scaleBand<number>> {
  return scaleBand<number>()
    .domain(Array.from({ length: count }, (_, index) => index))
    .range([0, count * cell]);
}

/** The rows that have room for a label. */
function ticks(count: number, cell: number): number[] {
  const step = Math.ceil(WITH_LABEL / cell);
  return Array.from({ length: count }, (_, index) => index).filter((index) => index % step === 0);
}

/** Lines from the lower left to the upper right. */
function hatch(context: CanvasRenderingContext2D, x: number, y: number, side: number): void {
  context.beginPath();
  for (let at = HATCH; at < 2 * side; at += HATCH) {
    const [from, to] = [Math.max(0, at - side), Math.min(at, side)];
    context.moveTo(x + from, y + at - from);
    context.lineTo(x + to, y + at - to);
  }
  context.stroke();
}
