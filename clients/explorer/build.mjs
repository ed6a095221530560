// Builds the page: one HTML file without any other file, written to the Python package that owns it.
// `--tests` builds the tests in place of it, and `--check` compares the page with what is committed.
import { createHash } from "node:crypto";
import { mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build, transform } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const TARGET = join(here, "../python/src/attention_client/_explorer.html");
// What the page is made of. tests/clients/test_explorer_package.py computes the same hash.
const SOURCES = ["build.mjs", "package.json", "package-lock.json"];

const read = (path) => readFile(join(here, path), "utf8");
const sha256 = (text, encoding) => createHash("sha256").update(text).digest(encoding);

async function sourceHash() {
  const files = [...SOURCES, ...(await readdir(join(here, "src"))).map((name) => `src/${name}`)].sort();
  const lines = await Promise.all(files.map(async (file) => `${sha256(await read(file), "hex")}  ${file}\n`));
  return sha256(lines.join(""), "hex");
}

/** The licences of the packages whose code the page contains. */
async function licences(inputs) {
  const names = Object.keys(inputs).flatMap((path) => /node_modules\/([^/]+)\//.exec(path)?.[1] ?? []);
  const texts = [...new Set(names)].sort().map(async (name) => {
    const text = await read(`node_modules/${name}/LICENSE`);
    return `${name}\n\n${text.trim()}`;
  });
  return (await Promise.all(texts)).join("\n\n").replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

async function page() {
  const options = { bundle: true, minify: true, write: false, metafile: true, target: "es2022" };
  const bundle = await build({ ...options, entryPoints: [join(here, "src/main.ts")], absWorkingDir: here });
  const script = bundle.outputFiles[0].text.trim();
  const style = (await transform(await read("src/style.css"), { loader: "css", minify: true })).code.trim();
  const policy = [
    "default-src 'none'",
    `script-src 'sha256-${sha256(script, "base64")}'`,
    `style-src 'sha256-${sha256(style, "base64")}'`,
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
  ].join("; ");
  const values = {
    POLICY: policy,
    SOURCE: await sourceHash(),
    STYLE: style,
    SCRIPT: script,
    LICENCES: await licences(bundle.metafile.inputs),
  };
  return (await read("src/page.html")).replace(/\{\{(\w+)\}\}/g, (_, name) => values[name]);
}

if (process.argv.includes("--tests")) {
  const names = (await readdir(join(here, "test"))).filter((name) => name.endsWith(".test.ts"));
  const entryPoints = names.map((name) => join(here, "test", name));
  const outdir = join(here, "build");
  await mkdir(outdir, { recursive: true });
  const external = ["puppeteer-core"];
  await build({
    entryPoints,
    outdir,
    bundle: true,
    format: "esm",
    platform: "node",
    external,
    outExtension: { ".js": ".mjs" },
  });
} else {
  const built = await page();
  if (!process.argv.includes("--check")) await writeFile(TARGET, built);
  else if ((await readFile(TARGET, "utf8")) !== built) throw new Error("the page is old: run npm run build");
  console.log(`${Buffer.byteLength(built)} bytes`);
}
