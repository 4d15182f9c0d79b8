// Convenience only: without it every page works. Tick all rows of a page, and say on the button how many are ticked.
"use strict";
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

const all = document.querySelector("[data-tick-all]");
const button = document.querySelector("[data-ticked]");
const ticks = [...document.querySelectorAll('.tick input[name="id"]')];

function tell() {
  const ticked = ticks.filter((tick) => tick.checked).length;
  if (all) all.checked = ticked > 0 && ticked === ticks.length;
  if (button) {
    button.disabled = ticked === 0;
    button.textContent = ticked ? `${button.dataset.ticked} (${ticked})` : button.dataset.ticked;
  }
}

if (all && ticks.length) {
  all.hidden = false;
  all.addEventListener("change", () => {
    for (const tick of ticks) tick.checked = all.checked;
    tell();
  });
}
for (const tick of ticks) tick.addEventListener("change", tell);
addEventListener("pageshow", tell);
tell();
