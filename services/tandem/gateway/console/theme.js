// Puts the chosen colours on before anything is drawn; a classic script, because modules come too late for that.
"use strict";
(() => {
  const chosen = () => {
    try { return localStorage.getItem("tandem-theme") || "auto"; } catch { return "auto"; }
  };
  const put = (theme) => {
    document.documentElement.dataset.theme = theme;
    for (const button of document.querySelectorAll("#theme button")) {
      button.setAttribute("aria-pressed", String(button.dataset.theme === theme));
    }
  };
  put(chosen());
  document.addEventListener("DOMContentLoaded", () => {
    put(chosen());
    document.getElementById("theme").addEventListener("click", ({ target }) => {
      const theme = target.dataset.theme;
      if (!theme) return;
      try { localStorage.setItem("tandem-theme", theme); } catch { /* for this page only, then */ }
      put(theme);
    });
  });
})();
