// The page in a real browser: colours of cells against weights, keyboard, errors, no requests elsewhere.
// tests/encoders/test_explorer.py starts the server, writes the files and sets the variables.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";
import { interpolateBlues } from "d3-scale-chromatic";
import puppeteer, { type Browser, type Page } from "puppeteer-core";

const { EXPLORER_BROWSER = "", EXPLORER_URL = "", EXPLORER_TOKEN = "", EXPLORER_FOLDER = "" } = process.env;
const options = { skip: EXPLORER_BROWSER === "" && "EXPLORER_BROWSER names no browser", timeout: 60_000 };
const TEXT = "dessert first";
/** A table of 256 colours and their rounding. */
const TOLERANCE = 3;
const [LIGHT_CANNOT, LIGHT_LINE] = [
  [210, 210, 210],
  [140, 140, 140],
];

type Rgb = number[];
interface Weights {
  shape: number[];
  data: number[];
  tokens: string[];
}

let browser: Browser;
let page: Page;
let requests: string[];
let problems: string[];

before(async () => {
  if (options.skip) return;
  // A container has neither the right to make a sandbox nor a shared memory that is large enough.
  const args = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-device-scale-factor=1"];
  browser = await puppeteer.launch({ executablePath: EXPLORER_BROWSER, args });
});
after(async () => {
  if (!options.skip) await browser.close();
});

async function open(url: string, scheme = "light"): Promise<void> {
  [requests, problems] = [[], []];
  page = await browser.newPage();
  await page.setViewport({ width: 1280, height: 1200 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  page.on("request", (request) => requests.push(request.url()));
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error" && !message.text().includes("status of 40")) problems.push(message.text());
  });
  await page.goto(url);
}

/** Fails if the page asked anyone else, or if the browser complained. */
async function close(origin: string): Promise<void> {
  assert.deepEqual(
    requests.filter((url) => !url.startsWith(origin)),
    [],
  );
  assert.deepEqual(problems, []);
  await page.close();
}

async function ask(model: string, text = TEXT, other = "no other model"): Promise<void> {
  const select = async (id: string, name: string): Promise<void> => {
    const value = await page.$$eval(
      `#${id} option`,
      (found, wanted) => found.find((each) => each.textContent === wanted)?.value,
      name,
    );
    await page.select(`#${id}`, value ?? assert.fail(`no option ${name}`));
  };
  await select("model", model);
  await select("other", other);
  await page.$eval("#text", (area, given) => ((area as HTMLTextAreaElement).value = given), text);
  await page.click("#submit");
  await page.waitForFunction(() => !(document.getElementById("submit") as HTMLButtonElement).disabled);
}

/** What the server computes, without the page. */
async function weightsOf(model: string): Promise<Weights> {
  const body = {
    inputs: [{ name: "text", shape: [1], datatype: "BYTES", data: [TEXT] }],
    outputs: [{ name: "attention_weights" }, { name: "tokens" }],
  };
  const headers = { authorization: `Bearer ${EXPLORER_TOKEN}` };
  const url = new URL(`/v2/models/${model}/infer`, EXPLORER_URL);
  const response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
  const { outputs } = (await response.json()) as { outputs: { shape: number[]; data: unknown[] }[] };
  const [weights, tokens] = outputs;
  return { shape: weights?.shape ?? [], data: weights?.data as number[], tokens: tokens?.data as string[] };
}

/** The colours of every pixel of the small pictures: a list for each head. */
function smallPictures(): Promise<Rgb[][]> {
  return page.$$eval("#heads canvas", (canvases) =>
    canvases.map((canvas) => {
      const { data } = canvas.getContext("2d")?.getImageData(0, 0, canvas.width, canvas.height) ?? {
        data: [],
      };
      return Array.from({ length: data.length / 4 }, (_, pixel) => [...data.slice(4 * pixel, 4 * pixel + 3)]);
    }),
  );
}

/** The colours at the centre of every cell of the large picture. */
function largePicture(rows: number, columns: number): Promise<Rgb[]> {
  return page.$eval(
    "#map canvas",
    (canvas, height, width) => {
      const context = canvas.getContext("2d");
      const side = canvas.width / width;
      return Array.from({ length: height * width }, (_, index) => {
        const [x, y] = [((index % width) + 0.5) * side, (Math.floor(index / width) + 0.5) * side];
        return [...(context?.getImageData(x, y, 1, 1).data ?? [])].slice(0, 3);
      });
    },
    rows,
    columns,
  );
}

function near(found: Rgb | undefined, expected: Rgb): boolean {
  return expected.every((channel, index) => Math.abs(channel - (found?.[index] ?? -99)) <= TOLERANCE);
}

function blue(at: number): Rgb {
  return (interpolateBlues(at).match(/\d+/g) ?? []).map(Number);
}

/** Compares the pictures of all heads, and the large one of the chosen head, with weights. */
async function checkColours(
  weights: Weights,
  mayAttend: (layer: number, query: number, key: number) => boolean,
): Promise<void> {
  const count = weights.tokens.length;
  const [layers = 1, heads = 0] =
    weights.shape.length === 5 ? weights.shape.slice(1) : [1, ...weights.shape.slice(1)];
  const pictures = await smallPictures();
  assert.equal(pictures.length, layers * heads);
  const reach = Math.max(...weights.data);
  const expected = pictures.map((_, picture) =>
    Array.from({ length: count * count }, (__, pair) => {
      const [layer, query, key] = [Math.floor(picture / heads), Math.floor(pair / count), pair % count];
      return mayAttend(layer, query, key)
        ? blue((weights.data[picture * count * count + pair] ?? 0) / reach)
        : LIGHT_CANNOT;
    }),
  );
  for (const [picture, colours] of expected.entries())
    for (const [pair, colour] of colours.entries())
      assert.ok(
        near(pictures[picture]?.[pair], colour),
        `head ${picture}, pair ${pair}: ${String(pictures[picture]?.[pair])}, not ${String(colour)}`,
      );
  const chosen = await page.$$eval("#heads [role=gridcell]", (cells) =>
    cells.findIndex((cell) => cell.ariaSelected === "true"),
  );
  for (const [pair, found] of (await largePicture(count, count)).entries()) {
    const colour = expected[chosen]?.[pair] ?? [];
    assert.ok(
      near(found, colour) || (colour === LIGHT_CANNOT && near(found, LIGHT_LINE)),
      `pair ${pair}: ${String(found)}, not ${String(colour)}`,
    );
  }
}

const text = (selector: string): Promise<string> => page.$eval(selector, (found) => found.textContent);

test("without a token the page says what to do, and with it the models are listed", options, async () => {
  await open(EXPLORER_URL);
  await page.waitForFunction(() => document.getElementById("error")?.textContent !== "");
  assert.match(await text("#error"), /^The server needs a valid token: enter it/);
  await page.type("#token", EXPLORER_TOKEN);
  await page.click("#reload");
  await page.waitForFunction(() => document.querySelectorAll("#model option").length > 0);
  assert.equal(await text("#error"), "");
  assert.deepEqual(await page.evaluate(() => [document.cookie, localStorage.length, sessionStorage.length]), [
    "",
    0,
    0,
  ]);
});

test("the colours of all heads of an encoder are its weights", options, async () => {
  await ask("bert, version 1");
  const weights = await weightsOf("bert");
  await checkColours(weights, () => true);
  const tokens = await page.$$eval("#queries button", (found) => found.map((each) => each.textContent));
  assert.deepEqual(
    tokens,
    weights.tokens.map((token) => token.trim() || "␣".repeat(token.length)),
  );
});

test("the keyboard chooses heads, cells and tokens, and the page says what they mean", options, async () => {
  await page.focus('#heads [tabindex="0"]');
  for (const key of ["Home", "ArrowUp", "ArrowUp", "ArrowRight"] as const) await page.keyboard.press(key);
  assert.equal(await text("#head-title"), "Layer 0, head 1");
  await page.focus("#map");
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("ArrowRight");
  const { data, tokens } = await weightsOf("bert");
  const count = tokens.length;
  const weight = data[count * count + count + 1] ?? 0;
  assert.equal(
    await text("#reading"),
    `“${tokens[1] ?? ""}” attends to “${tokens[1] ?? ""}”: ${weight.toFixed(3)}.`,
  );
  await page.focus('#queries [tabindex="0"]');
  await page.keyboard.press("ArrowRight");
  const row = data.slice(count * count + 2 * count, count * count + 3 * count);
  const most = row.indexOf(Math.max(...row));
  assert.match(
    await text("#reading"),
    new RegExp(`^In layer 0, head 1, “${tokens[2] ?? ""}” attends most to “`),
  );
  const cells = await page.$$eval("#table tbody tr:first-child td", (found) =>
    found.map((each) => each.textContent),
  );
  assert.deepEqual([cells[0], cells[2]], [String(most), Math.max(...row).toFixed(3)]);
});

test("pointing at a cell says its weight", options, async () => {
  const box = (await (await page.$("#map canvas"))?.boundingBox()) ?? assert.fail();
  const { data, tokens } = await weightsOf("bert");
  const side = box.width / tokens.length;
  await page.mouse.move(box.x + 3.5 * side, box.y + 1.5 * side);
  const weight = data[tokens.length ** 2 + tokens.length + 3] ?? 0;
  assert.equal(
    await text("#reading"),
    `“${tokens[1] ?? ""}” attends to “${tokens[3] ?? ""}”: ${weight.toFixed(3)}.`,
  );
});

test("causal order and windows are drawn apart from small weights", options, async () => {
  await ask("qwen3, version 1");
  await checkColours(await weightsOf("qwen3"), (_, query, key) => key <= query);
  assert.match(await text("#reading"), /cannot attend to \d+ of \d+ tokens/);
  await ask("modernbert, version 1");
  // Every third layer is global; the others see half of 8 tokens on either side.
  await checkColours(
    await weightsOf("modernbert"),
    (layer, query, key) => layer % 3 === 0 || Math.abs(query - key) <= 4,
  );
});

test("the difference of two precisions states its largest value", options, async () => {
  await ask("sentence, version 1", TEXT, "sentence-int8, version 1");
  const [first, second] = [await weightsOf("sentence"), await weightsOf("sentence-int8")];
  const differences = first.data.map((value, index) => (second.data[index] ?? 0) - value);
  const largest = Math.max(...differences.map(Math.abs));
  assert.ok(largest > 0);
  const said = / is ([\d.e-]+) \(layer \d, head \d, /.exec(await text("#compared"))?.[1];
  assert.ok(Math.abs(Number(said) / largest - 1) < 0.01, `${String(said)}, not ${largest}`);
  const pictures = (await smallPictures()).flat();
  const at = differences.findIndex((value) => Math.abs(value) === largest);
  assert.ok(near(pictures[at], (differences[at] ?? 0) > 0 ? [178, 24, 43] : [33, 102, 172]));
  const least = differences.findIndex((value) => Math.abs(value) < largest / 1000);
  assert.ok(near(pictures[least], [247, 247, 247]), String(pictures[least]));
  await page.click('#views input[value="0"]');
  await checkColours(first, () => true);
});

test("what the server refuses is a sentence", options, async () => {
  await ask("bert, version 1", "   ");
  assert.equal(await text("#error"), "Enter a text.");
  await ask("bert, version 1", "a".repeat(200));
  assert.match(await text("#error"), /^The server refused the request. It says: text: .*the limit is 160/);
  await ask("bert, version 1", "a".repeat(4001));
  assert.match(await text("#error"), /^The text has 4001 characters. This page draws at most 4000/);
  await close(new URL("/", EXPLORER_URL).href);
});

test("a file shows its answers without any request", options, async () => {
  const url = pathToFileURL(`${EXPLORER_FOLDER}/masked.html`).href;
  await open(url);
  assert.equal(await page.$eval("#request", (form) => (form as HTMLElement).hidden), true);
  assert.equal(await text("#subject"), "masked, version 7: query (2, 3), mask (2, 3)");
  const small = await smallPictures();
  const cannot = small.map((picture) => picture.map((colour) => Number(near(colour, LIGHT_CANNOT))));
  assert.deepEqual(cannot, [[0, 0, 1, 0, 1, 1]]);
  assert.ok(near(small[0]?.[0], blue(0)), "a weight of 0 that may be attended to is not drawn as masked");
  assert.deepEqual(requests, [url]);
  await close("file:");
  await open(url, "dark");
  assert.ok(near((await smallPictures())[0]?.[0], blue(1)), "in the dark, a weight of 0 is dark");
  await close("file:");
});

test("twelve layers of twelve heads with 128 tokens", options, async () => {
  await open(pathToFileURL(`${EXPLORER_FOLDER}/large.html`).href);
  const sizes = await page.$$eval("#heads canvas", (found) =>
    found.map(({ width, height }) => width * height),
  );
  assert.deepEqual(
    sizes,
    Array.from({ length: 144 }, () => 128 * 128),
  );
  await page.focus('#heads [tabindex="0"]');
  for (const key of ["Home", "ArrowUp", "ArrowRight"] as const) await page.keyboard.press(key);
  assert.equal(await text("#head-title"), "Layer 10, head 1");
  assert.equal((await largePicture(128, 128)).length, 128 * 128);
  await close("file:");
});
