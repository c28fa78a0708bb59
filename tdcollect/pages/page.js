"use strict";
// Tables sort and filter, and commands can be copied. Without this script the page is whole.

const SHOWN = 500; // rows of a table at once: browsers are slow with thousands
const number = new Intl.NumberFormat("en").format;

function made(name, properties, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

function value(cell) {
  // The number that a cell starts with, else its text; NaN, "-" and empty cells come last.
  const text = (cell ? cell.textContent : "").trim();
  const found = text.replace(/,/g, "").match(/^[[(<\s]*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?inf\b)/i);
  if (found) return Number(found[1].replace(/inf/i, "Infinity"));
  return text === "" || text === "-" || /^nan\b/i.test(text) ? null : text.toLowerCase();
}

function compare(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? -1 : 1;
}

function sorted(rows, column, descending) {
  const keyed = rows.map((row) => [value(row.cells[column]), row]);
  const there = keyed.filter(([key]) => key !== null);
  there.sort((a, b) => (descending ? -1 : 1) * compare(a[0], b[0]));
  return [...there, ...keyed.filter(([key]) => key === null)].map(([, row]) => row);
}

function test(word, names) {
  // "return<100" compares the column whose name starts so; any other word is looked for.
  const found = word.match(/^(.+?)(<=|>=|<|>|=)(.+)$/);
  const column = found ? names.findIndex((name) => name.startsWith(found[1])) : -1;
  if (column < 0) return (row) => row.textContent.toLowerCase().includes(word);
  const wanted = value({ textContent: found[3] });
  return (row) => {
    const own = value(row.cells[column]);
    if (own === null || typeof own !== typeof wanted) return false;
    return { "<": own < wanted, ">": own > wanted, "=": own === wanted,
      "<=": own <= wanted, ">=": own >= wanted }[found[2]];
  };
}

function enhance(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const names = heads.map((head) => head.textContent.trim().toLowerCase());
  const tools = made("div", { className: "tools" });
  const count = made("output");
  const more = made("button", { type: "button", className: "copy" });
  let rows = [...body.rows];
  let tests = [];
  let limit = SHOWN;

  function show() {
    const passing = rows.filter((row) => tests.every((passes) => passes(row)));
    const shown = passing.slice(0, limit);
    if (table.dataset.before !== undefined) shown.forEach(addCommand);
    body.replaceChildren(...shown);
    const some = tests.length ? `${number(passing.length)} of ` : "";
    const first = shown.length < passing.length ? `, the first ${number(shown.length)} shown` : "";
    count.textContent = `${some}${number(rows.length)} rows${first}`;
    more.hidden = shown.length === passing.length;
    more.textContent = `show all ${number(passing.length)}`;
  }

  function addCommand(row) {
    // One command for the table; the index of a row stands between its two halves.
    if (row.cells.length > heads.length) return;
    const index = row.cells[0].textContent;
    const text = table.dataset.before + index + table.dataset.after;
    row.insertCell().append(copying(text, `Copy the command that runs episode ${index} again`));
  }

  if (table.dataset.sort !== undefined) {
    heads.forEach((head, column) => {
      if (!names[column]) return;
      const button = made("button", { type: "button", title: "Sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        rows = sorted(rows, column, descending);
        show();
      });
    });
  }
  if (table.dataset.before !== undefined) {
    table.tHead.rows[0].append(made("th", { scope: "col" }, "run it again"));
  }
  if (table.dataset.filter !== undefined) {
    const field = made("input", { type: "search", placeholder: table.dataset.filter });
    count.setAttribute("aria-live", "polite");
    tools.append(made("label", {}, "Filter", field), count, more);
    table.parentElement.before(tools);
    field.addEventListener("input", () => {
      tests = field.value.toLowerCase().split(/\s+/).filter(Boolean).map((w) => test(w, names));
      show();
    });
    more.addEventListener("click", () => { limit = Infinity; show(); });
  }
  addEventListener("beforeprint", () => { limit = Infinity; show(); });
  show();
}

async function copy(button) {
  const text = button.dataset.copy;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = made("textarea", { value: text });
    button.after(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = done ? "copied" : "not copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

function copying(text, label) {
  const button = made("button", { type: "button", className: "copy" }, "copy");
  button.setAttribute("aria-label", label);
  button.dataset.copy = text;
  return button;
}

for (const block of document.querySelectorAll(".command")) {
  block.append(copying(block.textContent, "Copy the command"));
}
document.querySelectorAll("table").forEach(enhance);
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button) copy(button);
});
