/** The form of the page that a server serves: which text, which models, and the token, which is kept in memory. */

import type { Answer } from "./answer.js";
import { byId, element } from "./elements.js";
import { attend, hasWeights, isDrawn, listModels, type Model, Refusal } from "./server.js";

export class RequestForm {
  readonly #form = byId("request", HTMLFormElement);
  readonly #text = byId("text", HTMLTextAreaElement);
  readonly #model = byId("model", HTMLSelectElement);
  readonly #other = byId("other", HTMLSelectElement);
  readonly #token = byId("token", HTMLInputElement);
  readonly #submit = byId("submit", HTMLButtonElement);
  readonly #status = byId("status", HTMLElement);
  readonly #error = byId("error", HTMLElement);
  #models: Model[] = [];

  /** @param show - Draws one answer, or two that are compared. */
  constructor(readonly show: (answers: Answer[]) => void) {
    this.#form.hidden = false;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#during("Computing …", () => this.#ask());
    });
    byId("reload", HTMLButtonElement).addEventListener("click", () => {
      this.start();
    });
  }

  /** Lists the models. */
  start(): void {
    void this.#during("Listing the models …", () => this.#list());
  }

  async #list(): Promise<void> {
    const models = await listModels(this.#token.value);
    this.#models = models.filter(isDrawn);
    const options = this.#models.map((model, index) =>
      option(String(index), `${model.name}, version ${model.version}`),
    );
    const kept = [this.#model.value, this.#other.value];
    this.#model.replaceChildren(...options);
    this.#other.replaceChildren(option("", "no other model"), ...options.map((each) => each.cloneNode(true)));
    [this.#model.value, this.#other.value] = [kept[0] || "0", kept[1] ?? ""];
    const arrays = models.filter((model) => hasWeights(model) && !model.accepts_text).length;
    byId("others", HTMLElement).textContent =
      arrays === 0
        ? ""
        : `${arrays} more take arrays or token ids: attention-client weights --html draws theirs.`;
    if (this.#models.length === 0)
      throw new Refusal("No model here takes text and returns attention weights.");
  }

  async #ask(): Promise<void> {
    const text = this.#text.value.trim();
    const chosen = [this.#model.value, this.#other.value].filter((value) => value !== "");
    const models = chosen.flatMap((value) => this.#models[Number(value)] ?? []);
    if (text === "") throw new Refusal("Enter a text.");
    if (models.length === 0) throw new Refusal("Choose a model.");
    const answers = [];
    for (const model of models) answers.push(await attend(model, text, this.#token.value));
    this.show(answers);
  }

  /** Shows what goes on, and the sentence of a failure. */
  async #during(status: string, work: () => Promise<void>): Promise<void> {
    [this.#status.textContent, this.#error.textContent] = [status, ""];
    this.#submit.disabled = true;
    try {
      await work();
    } catch (error) {
      this.#error.textContent =
        error instanceof Refusal ? error.message : `The page failed: ${String(error)}`;
    } finally {
      this.#status.textContent = "";
      this.#submit.disabled = false;
    }
  }
}

function option(value: string, text: string): HTMLOptionElement {
  return element("option", { value }, text);
}
