/** A first-in, first-out queue of limited size between the task that fills it and the one that empties it. */

export class BoundedQueue<T> {
  readonly #items: T[] = [];
  readonly #capacity: number;
  #waiting: (() => void)[] = [];
  #closed = false;

  constructor(capacity: number) {
    this.#capacity = capacity;
  }

  /** Waits until the queue has fewer items than its capacity; false if it was closed. */
  async room(): Promise<boolean> {
    while (!this.#closed && this.#items.length >= this.#capacity) await this.#change();
    return !this.#closed;
  }

  /** Appends an item. It does not wait: the end of a call must fit into a full queue. */
  push(item: T): void {
    this.#items.push(item);
    this.#notify();
  }

  /** Waits for the first item, which keeps its place until it is removed. */
  async first(): Promise<T> {
    for (;;) {
      const [item] = this.#items;
      if (item !== undefined) return item;
      await this.#change();
    }
  }

  removeFirst(): void {
    this.#items.shift();
    this.#notify();
  }

  /** Ends the wait of the task that fills the queue. */
  close(): void {
    this.#closed = true;
    this.#notify();
  }

  #change(): Promise<void> {
    return new Promise((resolve) => this.#waiting.push(resolve));
  }

  #notify(): void {
    const waiting = this.#waiting;
    this.#waiting = [];
    for (const resolve of waiting) resolve();
  }
}
