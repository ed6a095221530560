/** The legend: which colour stands for which value, and how a pair that cannot attend is drawn. */

import { axisBottom } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import type { Colours } from "./colours.js";
import { element } from "./elements.js";

const [WIDTH, HEIGHT, MARGIN, STEPS] = [260, 14, 18, 65];

export function drawLegend(root: HTMLElement, colours: Colours, reach: number): void {
  const least = colours.isDifference ? -reach : 0;
  const svg = select(document.createElementNS("http://www.w3.org/2000/svg", "svg"))
    .attr("width", WIDTH + 2 * MARGIN)
    .attr("height", 40)
    .attr("role", "img")
    .attr("aria-label", `Colours from ${least} to ${reach}`);
  const scale = scaleLinear([least, reach], [MARGIN, MARGIN + WIDTH]);
  svg
    .selectAll("rect")
    .data(Array.from({ length: STEPS }, (_, step) => least + ((reach - least) * step) / (STEPS - 1)))
    .join("rect")
    .attr("x", (_, step) => MARGIN + (WIDTH * step) / STEPS)
    .attr("width", WIDTH / STEPS + 0.5)
    .attr("height", HEIGHT)
    .attr("fill", (value) => colours.name(value, reach));
  const format = reach < 0.001 ? ".0e" : "~g";
  svg.append("g").attr("transform", `translate(0,${HEIGHT})`).call(axisBottom(scale).ticks(4, format));
  const what = colours.isDifference ? "Second model minus first" : "Attention weight";
  const node = svg.node();
  const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
  const cannot = element(
    "p",
    { class: "quiet" },
    swatch,
    "cannot be attended to: causal order, window or mask",
  );
  root.replaceChildren(element("p", { class: "quiet" }, what), ...(node ? [node] : []), cannot);
}
