// Applies the chosen theme before the first paint; a classic script, because modules run too late for that.
"use strict";
(() => {
  const chosen = () => {
    try { return localStorage.getItem("tandem-theme") || "auto"; } catch { return "auto"; }
  };
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    for (const button of document.querySelectorAll("#theme button")) {
      button.setAttribute("aria-pressed", String(button.dataset.theme === theme));
    }
  };
  apply(chosen());
  document.addEventListener("DOMContentLoaded", () => {
    apply(chosen());
    document.getElementById("theme").addEventListener("click", ({ target }) => {
      const theme = target.dataset.theme;
      if (!theme) return;
      try { localStorage.setItem("tandem-theme", theme); } catch { /* without storage the choice holds for this page only */ }
      apply(theme);
    });
  });
})();
