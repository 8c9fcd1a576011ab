// Keeps the API key in the session storage of this tab, and the dialog that asks for it.
import { byId, mark, setText } from "./dom.js";

const NAME = "tandem-key";

export const key = () => sessionStorage.getItem(NAME) ?? "";

export const headers = () => (key() ? { authorization: `Bearer ${key()}` } : {});

/* `onKey` is called after each key that the user enters. */
export class KeyDialog {
  constructor(onKey) {
    this.dialog = byId("key-dialog");
    this.field = byId("key-input");
    this.mayClose = false;
    byId("key").addEventListener("click", () => this.open("", true));
    byId("key-cancel").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("cancel", (event) => this.mayClose || event.preventDefault());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const entered = this.field.value.trim();
      // A header cannot carry other characters, so the request would fail before it is sent.
      if (!/^[\x21-\x7e]+$/.test(entered)) return this.open("A key has only letters, digits and signs, and no spaces.", this.mayClose);
      sessionStorage.setItem(NAME, entered);
      setText(byId("key-status"), "Checking the key …");
      return onKey();
    });
  }

  open(reason, mayClose = false) {
    this.mayClose = mayClose;
    byId("key-cancel").hidden = !mayClose;
    byId("key").hidden = false;
    setText(byId("key-status"), reason);
    mark(this.field, "aria-invalid", reason ? "true" : null);
    if (!this.dialog.open) this.dialog.showModal();
    this.field.focus();
    this.field.select();
  }

  /* Call this when the gateway answered. `needsKey`: the gateway requires a key, and accepted this one. */
  accepted(needsKey) {
    byId("key").hidden = !needsKey;
    if (!this.dialog.open || this.mayClose && !byId("key-status").textContent) return;
    this.dialog.close();
    this.field.value = "";
    setText(byId("key-status"), "");
  }
}
