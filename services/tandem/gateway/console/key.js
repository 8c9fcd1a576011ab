// Keeps the key in this tab's session and asks for one; never sends it anywhere itself.
import { byId, mark, say } from "./dom.js";

const NAME = "tandem-key";

export const key = () => sessionStorage.getItem(NAME) ?? "";

export const headers = () => (key() ? { authorization: `Bearer ${key()}` } : {});

/* `onKey` is called with each key that is put in. */
export class Door {
  constructor(onKey) {
    this.dialog = byId("door");
    this.field = byId("door-key");
    this.mayClose = false;
    byId("key").addEventListener("click", () => this.ask("", true));
    byId("door-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("cancel", (event) => this.mayClose || event.preventDefault());
    byId("door-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const shown = this.field.value.trim();
      // What a header cannot carry never gets as far as to be refused.
      if (!/^[\x21-\x7e]+$/.test(shown)) return this.ask("A key has letters, digits and signs, and no blanks.", this.mayClose);
      sessionStorage.setItem(NAME, shown);
      say(byId("door-said"), "Trying this key …");
      return onKey();
    });
  }

  ask(reason, mayClose = false) {
    this.mayClose = mayClose;
    byId("door-close").hidden = !mayClose;
    byId("key").hidden = false;
    say(byId("door-said"), reason);
    mark(this.field, "aria-invalid", reason ? "true" : null);
    if (!this.dialog.open) this.dialog.showModal();
    this.field.focus();
    this.field.select();
  }

  /* The gateway answers; `needsKey`: because of the key that was shown. */
  passed(needsKey) {
    byId("key").hidden = !needsKey;
    if (!this.dialog.open || this.mayClose && !byId("door-said").textContent) return;
    this.dialog.close();
    this.field.value = "";
    say(byId("door-said"), "");
  }
}
