(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const say = text => { document.getElementById("say").textContent = text; };

  /* ---- theme: system, light, dark */

  const themes = ["system", "light", "dark"];
  const root = document.documentElement;
  const toggle = document.getElementById("theme");
  const show_theme = () => { toggle.textContent = `Theme: ${root.dataset.theme || "system"}`; };
  toggle.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % themes.length];
    if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
    try { localStorage.setItem("specbench-theme", next); } catch (error) { /* no storage: it holds for this visit */ }
    show_theme();
  });
  show_theme();
  toggle.hidden = false;

  /* ---- tables: sort, filter, export */

  const number_of = text => {
    const found = /^[^\d+\-.−]*([+\-−]?[\d,]*\.?\d+(?:e[+-]?\d+)?)/i.exec(text.trim());
    if (!found) return null;
    const value = Number(found[1].replace(/,/g, "").replace("−", "-"));
    if (!Number.isFinite(value)) return null;
    const prefix = /^\s*([pTGMkmµn])(?:B|FLOP|s\b|\b)/.exec(text.trim().slice(found[0].length).trimStart());
    const scale = { T: 1e12, G: 1e9, M: 1e6, k: 1e3, m: 1e-3, "µ": 1e-6, n: 1e-9, p: 1e-12 };
    return prefix && scale[prefix[1]] ? value * scale[prefix[1]] : value;
  };
  const key_of = cell => {
    const text = cell ? cell.textContent.trim() : "";
    return { text, number: /^[A-Za-z]/.test(text) ? null : number_of(text) };
  };
  const order = (a, b) => {
    if (a.key.number !== null && b.key.number !== null) return a.key.number - b.key.number;
    if (a.key.number === null && b.key.number === null) {
      return a.key.text.localeCompare(b.key.text, undefined, { numeric: true });
    }
    return a.key.number === null ? 1 : -1;
  };

  const sort = (table, head, column) => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map(row => ({ row, key: key_of(row.cells[column]) }));
    const empty = rows.filter(one => one.key.text === "" || one.key.text === "–");
    const full = rows.filter(one => !empty.includes(one)).sort(order);
    if (down) full.reverse();
    body.append(...[...full, ...empty].map(one => one.row));
    say(`sorted by ${head.textContent.trim()}, ${head.getAttribute("aria-sort")}`);
  };

  const download = (name, type, text) => {
    const address = URL.createObjectURL(new Blob([text], { type }));
    const link = make("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };
  const csv_cell = value => {
    let text = value === null || value === undefined ? "" : String(value);
    /* A spreadsheet would run it; a number with a sign it would not. */
    if (/^[=+\-@\t\r]/.test(text) && !/^[+-]?[\d.,]+(e[+-]?\d+)?( ?%| ±[\d.]+)?$/i.test(text)) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  const contents = table => {
    const shown = [...table.tBodies[0].rows].filter(row => !row.hidden);
    const raw = table.dataset.raw ? JSON.parse(document.getElementById(table.dataset.raw).textContent) : null;
    if (raw) {
      const places = new Map(all_rows.get(table).map((row, place) => [row, place]));
      return { columns: raw.columns, rows: shown.map(row => raw.rows[places.get(row)]) };
    }
    const columns = [...table.tHead.rows[0].cells].map(cell => cell.textContent.trim());
    return { columns, rows: shown.map(row => [...row.cells].map(cell => cell.textContent.trim())) };
  };
  const exporters = {
    CSV: table => {
      const { columns, rows } = contents(table);
      return ["text/csv", [columns, ...rows].map(row => row.map(csv_cell).join(",")).join("\r\n") + "\r\n"];
    },
    JSON: table => {
      const { columns, rows } = contents(table);
      const records = rows.map(row => Object.fromEntries(columns.map((name, place) => [name, row[place]])));
      return ["application/json", JSON.stringify(records, null, 1)];
    },
  };

  const all_rows = new Map();
  const filter = (table, text, count) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) {
      const content = words.length ? row.textContent.toLowerCase() : "";
      row.hidden = !words.every(word => content.includes(word));
    }
    const left = rows.filter(row => !row.hidden).length;
    count.textContent = words.length ? `${left} of ${rows.length} rows` : "";
  };

  for (const table of all("table.data")) {
    const name = table.caption.textContent.trim();
    all_rows.set(table, [...table.tBodies[0].rows]);
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = make("button", { type: "button" });
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => sort(table, head, column));
    });
    const tools = make("div", { className: "tools" });
    if (table.tBodies[0].rows.length > 5) {
      const count = make("span", { className: "count" });
      count.setAttribute("role", "status");
      const input = make("input", { type: "search", placeholder: "Filter rows" });
      input.setAttribute("aria-label", `Filter rows: ${name}`);
      input.addEventListener("input", () => filter(table, input.value, count));
      tools.append(input, count);
    }
    for (const kind of Object.keys(exporters)) {
      const button = make("button", { type: "button" }, kind);
      button.setAttribute("aria-label", `Export as ${kind}: ${name}`);
      button.addEventListener("click", () => {
        const [type, text] = exporters[kind](table);
        download(`${table.dataset.file}.${kind.toLowerCase()}`, type, text);
        say(`exported as ${kind}`);
      });
      tools.append(button);
    }
    table.closest(".scroll").before(tools);
  }

  /* ---- figures: values at the pointer and by arrow keys */

  const tip = document.getElementById("tip");
  const hide = () => {
    tip.hidden = true;
    for (const mark of all(".sb-now")) mark.classList.remove("sb-now");
  };
  const point_at = mark => {
    hide();
    mark.classList.add("sb-now");
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const box = mark.getBoundingClientRect();
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    const middle = box.left + box.width / 2 - wide / 2;
    tip.style.left = `${Math.max(6, Math.min(middle, root.clientWidth - wide - 6))}px`;
    tip.style.top = `${box.top - high - 8 > 0 ? box.top - high - 8 : box.bottom + 8}px`;
  };
  const nearest = (plot, x, y) => {
    let best = null, least = 18 * 18;
    for (const mark of all("[data-tip]", plot)) {
      const box = mark.getBoundingClientRect();
      const away = (box.left + box.width / 2 - x) ** 2 + (box.top + box.height / 2 - y) ** 2;
      if (away < least) [best, least] = [mark, away];
    }
    return best;
  };
  for (const plot of all(".plot")) {
    const marks = all("[data-tip]", plot);
    if (!marks.length) continue;
    let place = -1;
    plot.addEventListener("pointermove", event => {
      const under = event.target.closest("[data-tip]");
      const mark = under || nearest(plot, event.clientX, event.clientY);
      if (mark) point_at(mark); else hide();
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", event => {
      const steps = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: marks.length - 1 };
      if (event.key === "Escape") { hide(); place = -1; return; }
      if (!(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      place = (steps[event.key] + marks.length) % marks.length;
      marks[place].scrollIntoView({ block: "nearest", inline: "nearest" });
      point_at(marks[place]);
      say(`${marks[place].dataset.tip} (${place + 1} of ${marks.length})`);
    });
  }
  document.addEventListener("scroll", () => { if (!document.activeElement.closest(".plot")) hide(); }, true);

  /* ---- permalinks open what hides their target; print opens all */

  const reveal = () => {
    const name = decodeURIComponent(location.hash.slice(1));
    const target = name ? document.getElementById(name) : null;
    if (!target) return;
    for (let node = target; node; node = node.parentElement) {
      if (node.tagName === "DETAILS") node.open = true;
      if (node.hidden && node.tagName === "TR") node.hidden = false;
    }
    target.scrollIntoView({ block: "center" });
  };
  addEventListener("hashchange", reveal);
  reveal();
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
})();
