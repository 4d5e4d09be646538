// Puts the figures into the page, and what works on all of it: the theme, copying tables.

const SHOW = { chart: showCharts, forest: showForest, timeline: showTimeline };

const figures = JSON.parse(document.getElementById("data").textContent);
for (const [name, figure] of Object.entries(figures)) SHOW[figure.kind](document.getElementById(name), figure);

// Storage may be forbidden for files; the theme then lasts as long as the page.
function remembered(value) {
  try {
    if (value === undefined) return localStorage.getItem("forkpoint-theme");
    localStorage.setItem("forkpoint-theme", value);
  } catch { return null; }
  return value;
}

const themeButton = document.getElementById("theme");
function setTheme(theme) {
  document.documentElement.style.colorScheme = theme;
  document.documentElement.dataset.theme = theme;
  themeButton.textContent = theme === "dark" ? "Light" : "Dark";
}
const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
setTheme(remembered() || preferred);
themeButton.addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(next);
  remembered(next);
});

function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = make("textarea", { readonly: "" }, document.body);
  area.value = text;
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done ? Promise.resolve() : Promise.reject(new Error("the browser did not copy"));
}

function tableText(table) {
  const cell = (c) => c.dataset.value ?? c.textContent.replace(/[\t\n]+/g, " ");
  return [...table.rows].map((row) => [...row.cells].map(cell).join("\t")).join("\n");
}

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", () => {
    const text = tableText(button.parentElement.querySelector("table"));
    const said = button.textContent;
    copyText(text).then(() => "Copied", () => "Not copied: select the table by hand").then((word) => {
      button.textContent = word;
      setTimeout(() => { button.textContent = said; }, 1600);
    });
  });
}
