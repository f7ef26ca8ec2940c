"use strict";
document.documentElement.classList.add("js");
for (const bar of document.querySelectorAll("[data-filter-for]")) {
  const list = document.getElementById(bar.dataset.filterFor);
  const buttons = Array.from(bar.querySelectorAll("button[data-kind]"));
  const status = bar.querySelector("[role=status]");
  const apply = (kind) => {
    let shown = 0;
    for (const card of list.children) {
      const keep = kind === "all" || card.dataset.kind === kind;
      card.hidden = !keep;
      if (keep) shown += 1;
    }
    for (const b of buttons) b.setAttribute("aria-pressed", String(b.dataset.kind === kind));
    status.textContent = shown + " shown";
  };
  for (const b of buttons) b.addEventListener("click", () => apply(b.dataset.kind));
  const toggle = bar.parentElement.querySelector("[data-toggle]");
  if (toggle) toggle.addEventListener("click", () => {
    const open = toggle.getAttribute("aria-pressed") !== "true";
    toggle.setAttribute("aria-pressed", String(open));
    toggle.textContent = open ? "Close all" : "Open all";
    for (const d of list.querySelectorAll("details")) d.open = open;
  });
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy).textContent;
    let done = false;
    try {
      await navigator.clipboard.writeText(text);
      done = true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
    }
    button.textContent = done ? "Copied" : "Select and copy";
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  });
}
