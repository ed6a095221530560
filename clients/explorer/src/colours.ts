/** Colours of weights (one hue) and of differences (two hues around a neutral one), for light and dark pages. */

import { scaleDiverging, scaleSequential } from "d3-scale";
import { interpolateBlues } from "d3-scale-chromatic";

const STEPS = 256;
/** Less than none, none, more. */
const DIVERGING = { light: ["#2166ac", "#f7f7f7", "#b2182b"], dark: ["#7cc0ff", "#20242c", "#ff9a7c"] };
/** A pair of rows that may not attend: the ground and the lines of its hatching. */
const CANNOT = { light: ["#d2d2d2", "#8c8c8c"], dark: ["#4a4a4a", "#7a7a7a"] };
/** Below it, white has more contrast than black: WCAG 2, relative luminance. */
const DARK_LUMINANCE = 0.18;

export class Colours {
  readonly cannot: string;
  readonly cannotLine: string;
  readonly #names: string[] = [];
  /** The same as pixels of a canvas. */
  readonly #pixels = new Uint32Array(STEPS);
  readonly #cannotPixel: number;

  constructor(
    readonly isDifference: boolean,
    isDark: boolean,
  ) {
    const theme = isDark ? "dark" : "light";
    [this.cannot = "", this.cannotLine = ""] = CANNOT[theme];
    const weights = scaleSequential((t: number) => interpolateBlues(isDark ? 1 - t : t));
    const differences = scaleDiverging([0, 0.5, 1], DIVERGING[theme]);
    for (let step = 0; step < STEPS; step++) {
      const at = step / (STEPS - 1);
      const name = isDifference ? differences(at) : weights(at);
      this.#names.push(name);
      this.#pixels[step] = pixel(channels(name));
    }
    this.#cannotPixel = pixel(channels(this.cannot));
  }

  /** The colour of a value as CSS writes it. */
  name(value: number, reach: number): string {
    return this.#names[this.#step(value, reach)] ?? "";
  }

  /** Whether text on the colour of a value should be light. */
  isDark(value: number, reach: number): boolean {
    const [red, green, blue] = channels(this.name(value, reach)).map((channel) => (channel / 255) ** 2.2);
    return 0.2126 * (red ?? 0) + 0.7152 * (green ?? 0) + 0.0722 * (blue ?? 0) < DARK_LUMINANCE;
  }

  /** An image with one pixel for each value. */
  image(values: Float32Array, allowed: Uint8Array, columns: number, reach: number): ImageData {
    const image = new ImageData(columns, values.length / columns);
    const pixels = new Uint32Array(image.data.buffer);
    for (let index = 0; index < values.length; index++)
      pixels[index] =
        allowed[index] === 1 ? (this.#pixels[this.#step(values[index] ?? 0, reach)] ?? 0) : this.#cannotPixel;
    return image;
  }

  #step(value: number, reach: number): number {
    const at = this.isDifference ? (value / reach + 1) / 2 : value / reach;
    return Math.round(Math.min(Math.max(at, 0), 1) * (STEPS - 1));
  }
}

/** Red, green and blue, 0 to 255, of "rgb(1, 2, 3)" or "#010203". */
export function channels(name: string): number[] {
  if (name.startsWith("#")) return [1, 3, 5].map((at) => parseInt(name.slice(at, at + 2), 16));
  return (name.match(/\d+/g) ?? []).slice(0, 3).map(Number);
}

/** Opaque, in the order of bytes of a little-endian machine, which all browsers run on. */
function pixel([red = 0, green = 0, blue = 0]: number[]): number {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
