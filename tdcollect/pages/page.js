"use strict";
// Tables sort and filter, and commands can be copied. Without this script the page is whole.

const number = new Intl.NumberFormat("en").format;

function value(cell) {
  // The number that a cell starts with, else its text; NaN, "-" and empty cells come last.
  const text = (cell ? cell.textContent : "").trim();
  const found = text.replace(/,/g, "").match(/^[[(]?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?inf)/i);
  if (found) return Number(found[1].replace(/inf/i, "Infinity"));
  return text === "" || text === "-" || /^nan\b/i.test(text) ? null : text.toLowerCase();
}

function compare(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === "number" ? -1 : 1;
}

function sort(table, column, descending) {
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => [value(row.cells[column]), row]);
  const there = keyed.filter(([key]) => key !== null);
  const last = keyed.filter(([key]) => key === null);
  there.sort((a, b) => (descending ? -1 : 1) * compare(a[0], b[0]));
  body.append(...[...there, ...last].map(([, row]) => row));
  for (const head of table.tHead.rows[0].cells) head.removeAttribute("aria-sort");
  table.tHead.rows[0].cells[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
}

function sortable(table) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () =>
      sort(table, column, head.getAttribute("aria-sort") === "ascending"));
  });
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

function filterable(table, tools) {
  const label = document.createElement("label");
  const field = document.createElement("input");
  const count = document.createElement("output");
  const names = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim().toLowerCase());
  field.type = "search";
  field.placeholder = table.dataset.filter;
  label.append("Filter", field);
  tools.append(label, count);
  count.setAttribute("aria-live", "polite");
  field.addEventListener("input", () => {
    const tests = field.value.toLowerCase().split(/\s+/).filter(Boolean).map((w) => test(w, names));
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      row.hidden = !tests.every((passes) => passes(row));
      shown += !row.hidden;
    }
    const all = table.tBodies[0].rows.length;
    count.textContent = tests.length ? `${number(shown)} of ${number(all)} rows` : "";
  });
}

async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    button.after(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const before = button.dataset.text;
  button.textContent = done ? "copied" : "not copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}

function copying(text, name, label) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = button.dataset.text = name;
  button.setAttribute("aria-label", label);
  button.dataset.copy = text;
  return button;
}

function replayable(table) {
  // One command for the table; the index of a row stands between its two halves.
  const { before, after } = table.dataset;
  const head = document.createElement("th");
  head.scope = "col";
  head.textContent = "run it again";
  table.tHead.rows[0].append(head);
  for (const row of table.tBodies[0].rows) {
    const index = row.cells[0].textContent;
    const label = `Copy the command that runs episode ${index} again`;
    row.insertCell().append(copying(before + index + after, "copy", label));
  }
}

for (const block of document.querySelectorAll(".command")) {
  block.append(copying(block.textContent, "copy", "Copy the command"));
}
for (const table of document.querySelectorAll("table")) {
  const tools = document.createElement("div");
  tools.className = "tools";
  if (table.dataset.sort !== undefined) sortable(table);
  if (table.dataset.before !== undefined) replayable(table);
  if (table.dataset.filter !== undefined) {
    table.parentElement.before(tools);
    filterable(table, tools);
  }
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("button.copy");
  if (button) copy(button.dataset.copy, button);
});
