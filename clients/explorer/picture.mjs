// Takes the picture of docs/explorer.png: node picture.mjs BROWSER URL OUT MODEL [OTHER]
import puppeteer from "puppeteer-core";

const [executablePath, url, path, model, other = ""] = process.argv.slice(2);
const args = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"];
const browser = await puppeteer.launch({ executablePath, args });
const page = await browser.newPage();
await page.setViewport({ width: 1240, height: 900 });
await page.goto(url);
await page.waitForFunction(() => document.querySelectorAll("#model option").length > 0);
const choose = async (id, name) => {
  const value = await page.$$eval(
    `#${id} option`,
    (options, wanted) => options.find((option) => option.textContent.startsWith(`${wanted},`))?.value ?? "",
    name,
  );
  await page.select(`#${id}`, value);
};
await choose("model", model);
await choose("other", other);
await page.type("#text", "Life is short, eat dessert first");
await page.click("#submit");
await page.waitForSelector("#picture:not([hidden])");
await page.$eval("#queries button:nth-child(4)", (button) => button.focus());
await page.screenshot({ path, fullPage: true });
await browser.close();
