"use strict";
// The table of suspects: sorted, filtered, paged and decided here. Whatever comes from the data is put on the page as the
// text of an element, or as an attribute that the report has checked; never as markup.
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const { suspects, page_size: pageSize, spark: [sparkWidth, sparkHeight] } = data;
  const explorer = byId("explorer");

  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      addEventListener("afterprint", () => { part.open = false; }, { once: true });
    }
  });
  if (!explorer) return;

  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const makeSvg = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const fixed = (x, digits) => (x === null ? "–" : x.toFixed(digits));
  const percent = (x) => (x === null ? "–" : `${(100 * x).toFixed(1)}%`);
  const likely = (x) => (x !== null && x < 1 && x >= 0.9995 ? `> 99.9%` : percent(x));  // never quite certain

  const kinds_seen = {};
  for (const s of suspects) {
    const kind = JSON.stringify([s.given, s.suggested]);
    s.variety = kinds_seen[kind] = (kinds_seen[kind] || 0) + 1;  // the first of every kind, then the second, ...
    s.decision = "";
    s.label = "";
    s.example = s.text || s.features.map(([name, value]) => `${name} ${value}`).join(" ");
    s.change = s.first === null ? null : s.last - s.first;
    s.searched = `${s.example}\n${s.row === null ? "" : s.row}\n${s.ids.map(([, value]) => value).join("\n")}`.toLowerCase();
  }

  // --- decisions: accept the suggestion, reject it (keep the given label), or another label -------------------------

  const WORDS = { accept: "accepted", reject: "rejected", relabel: "relabelled" };
  const byRow = new Map(suspects.map((s) => [s.row, s]));
  const key = `hyperkron decisions ${data.key}`;
  const decided = () => suspects.filter((s) => s.decision);
  const asFile = () => JSON.stringify({
    format: 1, run: data.run, data: data.key,
    decisions: decided().map((s) => ({ row: s.row, decision: s.decision, label: s.label })),
  }, null, 1);
  const remember = () => {
    try { localStorage.setItem(key, asFile()); } catch { byId("kept").textContent = "This browser does not keep them: save the file."; }
  };
  const recall = () => {
    try {
      for (const { row, decision, label } of JSON.parse(localStorage.getItem(key) || "{}").decisions || []) {
        if (byRow.has(row) && decision in WORDS && data.classes.includes(label)) Object.assign(byRow.get(row), { decision, label });
      }
    } catch { /* nothing was kept, or not by us */ }
  };
  const labelOf = (s, decision, label) => ({ accept: s.suggested, reject: s.given, relabel: label, "": "" })[decision];
  const decide = (s, decision, label) => {
    s.decision = decision === "relabel" && label === s.suggested ? "accept" : decision === "relabel" && label === s.given ? "reject" : decision;
    s.label = labelOf(s, s.decision, label);
    remember();
    tell();
  };
  const tell = () => {
    const counts = Object.entries(WORDS).map(([name, word]) => [suspects.filter((s) => s.decision === name).length, word]);
    const said = counts.filter(([n]) => n).map(([n, word]) => `${n} ${word}`).join(", ");
    byId("decided").textContent = said ? `${decided().length} of ${suspects.length} suspects decided: ${said}.` : "No decision yet.";
    byId("save").disabled = byId("forget").disabled = !said;
  };

  // --- one row -------------------------------------------------------------------------------------------------

  const showText = (s) => {
    const part = make("div");
    const text = make("div", "text", s.text + (s.cut ? `… (${s.cut.toLocaleString("en")} more characters)` : ""));
    text.dir = "auto";
    part.append(text);
    const more = make("button", "more", "Show all");
    more.type = "button";
    more.setAttribute("aria-expanded", "false");
    more.addEventListener("click", () => {
      const open = text.classList.toggle("open");
      more.textContent = open ? "Show less" : "Show all";
      more.setAttribute("aria-expanded", String(open));
    });
    part.append(more);
    return part;
  };

  // The button stands only under texts of which something is hidden at this width.
  const offerMore = () => {
    const closed = [...document.querySelectorAll("#rows .text:not(.open)")];
    const hides = closed.map((text) => text.scrollHeight > text.clientHeight + 1);
    closed.forEach((text, i) => { text.nextElementSibling.hidden = !hides[i]; });
  };

  const showFeatures = (features) => {
    const shown = make("dl", "features");
    const add = (from, to) => {
      for (const [name, value] of features.slice(from, to)) {
        const pair = make("div");
        pair.append(make("dt", "", `${name} `), make("dd", "", value));
        shown.append(pair);
      }
    };
    add(0, 8);
    const part = make("div");
    part.append(shown);
    if (features.length > 8) {
      const more = make("button", "more", `Show ${features.length - 8} more`);
      more.type = "button";
      more.addEventListener("click", () => { add(8); more.remove(); });
      part.append(more);
    }
    return part;
  };

  const showExample = (s) => {
    const parts = [];
    if (s.picture) {
      const picture = make("img", "picture");
      picture.alt = s.row === null ? `Suspect ${s.rank}` : `Row ${s.row}`;
      picture.src = s.picture;
      parts.push(picture);
    }
    if (s.text) parts.push(showText(s));
    if (s.features.length) parts.push(showFeatures(s.features));
    return parts.length ? parts : [make("span", "small", "not kept")];
  };

  const showHistory = (s) => {
    if (!s.spark) return make("span", "small", "–");
    const words = `Weight from ${fixed(s.first, 2)} to ${fixed(s.last, 2)}`;
    const box = makeSvg("svg", { width: sparkWidth, height: sparkHeight, class: "spark", role: "img", "aria-label": words });
    const title = makeSvg("title", {});
    title.textContent = words;
    const [x, y] = s.spark.split(" ").pop().split(",");
    box.append(
      title,
      makeSvg("line", { x1: 0, x2: sparkWidth, y1: sparkHeight - 3, y2: sparkHeight - 3 }),
      makeSvg("polyline", { points: s.spark }),
      makeSvg("circle", { cx: x, cy: y, r: 2.5 }),
    );
    return box;
  };

  const showProbability = (s) => {
    const part = make("div", "", likely(s.probability));
    const gauge = make("span", "gauge"), level = make("span");
    gauge.setAttribute("aria-hidden", "true");
    level.style.width = `${100 * Math.min(1, Math.max(0, s.probability || 0))}%`;
    gauge.append(level);
    part.append(gauge);
    return part;
  };

  const showId = (name, value) => {
    const part = make("bdi", "small id", value);
    part.title = name;
    return part;
  };

  const showDecision = (s, line) => {
    const part = make("div", "decision");
    const buttons = ["accept", "reject"].map((name) => {
      const button = make("button", name, name === "accept" ? "Accept" : "Reject");
      button.type = "button";
      button.title = name === "accept" ? "Take the suggested label (a)" : "Keep the given label (r)";
      button.addEventListener("click", () => { decide(s, s.decision === name ? "" : name); mark(); });
      return button;
    });
    const other = make("select");
    other.setAttribute("aria-label", "Another label");
    other.append(new Option("Relabel…", ""));
    const fill = () => {
      if (other.options.length > 1) return;
      other.append(...data.classes.map((name, i) => new Option(name, String(i))));
      mark();
    };
    other.addEventListener("focus", fill);
    other.addEventListener("change", () => { decide(s, other.value === "" ? "" : "relabel", data.classes[other.value]); mark(); });
    const mark = () => {
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(s.decision === ["accept", "reject"][i])));
      const shown = s.decision === "relabel" || (s.decision && other === document.activeElement);  // arrows pass over all
      other.value = shown ? String(data.classes.indexOf(s.label)) : "";
      line.dataset.decision = s.decision;
    };
    part.append(...buttons, other);
    if (data.classes.length <= 100 || s.decision === "relabel") fill();
    mark();
    line.mark = mark;
    return part;
  };

  const showRow = (s) => {
    const line = make("tr");
    line.setAttribute("role", "row");
    line.tabIndex = -1;
    line.suspect = s;
    const cell = (label, className, ...content) => {
      const made = make("td", className);
      made.setAttribute("role", "cell");
      made.dataset.label = label;
      made.append(...content);
      line.append(made);
    };
    cell("#", "n rank", String(s.rank));
    cell("Row", "n", s.row === null ? "–" : String(s.row), ...s.ids.map(([name, value]) => showId(name, value)));
    cell("Example", "example", ...showExample(s));
    cell("Given", "given", make("bdi", "", s.given));
    cell("Suggested", "suggested", make("bdi", "", s.suggested), make("span", "small", s.suggested === s.given ? "in doubt, but no other label is more likely" : ""));
    cell("Decision", "decide", showDecision(s, line));
    cell("Error probability", "n probability", showProbability(s));
    cell("Weight", "n", fixed(s.weight, 3));
    cell("Weight history", "history", showHistory(s));
    return line;
  };

  // --- the table -----------------------------------------------------------------------------------------------

  const state = { key: "rank", down: false, page: 0, shown: suspects };
  const headers = [...document.querySelectorAll("#table thead th")];
  const kinds = Object.fromEntries(headers.map((header) => [header.dataset.key, header.dataset.kind]));
  const given = byId("given"), suggested = byId("suggested"), least = byId("least"), search = byId("search");
  const chips = [...document.querySelectorAll(".chip")];

  const compare = (a, b) => {
    const x = a[state.key], y = b[state.key];
    if (x === null || y === null) return (x === null) - (y === null);  // what is not known comes last, either way
    const order = kinds[state.key] === "text" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
    return state.down ? -order : order;  // the sort is stable: equal ones stay in the order of suspicion
  };

  const draw = () => {
    const pages = Math.max(1, Math.ceil(state.shown.length / pageSize));
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    const start = state.page * pageSize;
    const lines = state.shown.slice(start, start + pageSize).map(showRow);
    if (!lines.length) {
      const line = make("tr"), cell = make("td", "nothing", "No suspect matches these filters.");
      line.setAttribute("role", "row");
      cell.setAttribute("role", "cell");
      cell.colSpan = headers.length;
      line.append(cell);
      lines.push(line);
    }
    byId("rows").replaceChildren(...lines);
    offerMore();
    const of = state.shown.length === suspects.length ? "" : ` that match, of ${suspects.length}`;
    byId("status").textContent = state.shown.length
      ? `${start + 1}–${Math.min(start + pageSize, state.shown.length)} of ${state.shown.length} suspects${of}`
      : `0 suspects${of}`;
    byId("page").textContent = `Page ${state.page + 1} of ${pages}`;
    byId("previous").setAttribute("aria-disabled", String(state.page === 0));
    byId("next").setAttribute("aria-disabled", String(state.page === pages - 1));
    document.querySelector(".pager").hidden = pages === 1;
  };

  const refresh = () => {
    const words = search.value.trim().toLowerCase(), from = given.value, to = suggested.value;
    const floor = Number(least.value) / 100;
    state.shown = suspects.filter((s) =>
      (!words || s.searched.includes(words)) && (from === "" || s.given === data.givens[from])
      && (to === "" || s.suggested === data.suggestions[to]) && (floor === 0 || (s.probability !== null && s.probability >= floor)));
    if (byId("undecided").checked) state.shown = state.shown.filter((s) => !s.decision);
    state.shown.sort(compare);
    if (byId("varied").checked) state.shown.sort((a, b) => a.variety - b.variety);  // stable, so sorted within
    state.page = 0;
    byId("least-shown").textContent = `${least.value}%`;
    for (const chip of chips) {
      const on = chip.dataset.given === given.value && chip.dataset.suggested === suggested.value;
      chip.setAttribute("aria-pressed", String(on));
    }
    draw();
  };

  const sortBy = (key, down) => {
    state.key = key;
    state.down = down;
    for (const header of headers) {
      if (header.dataset.key === key) header.setAttribute("aria-sort", down ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    }
    byId("sorter").value = `${key} ${down ? "down" : "up"}`;
    refresh();
  };

  const turn = (by) => {
    const before = state.page;
    state.page += by;
    draw();
    if (state.page !== before) byId("status").scrollIntoView({ block: "start" });
  };

  for (const header of headers) {
    const { key, kind } = header.dataset, name = header.textContent.trim();
    for (const down of [false, true]) {
      const option = make("option", "", `${name} ${down ? "↓" : "↑"}`);
      option.value = `${key} ${down ? "down" : "up"}`;
      byId("sorter").append(option);
    }
    header.firstElementChild.addEventListener("click", () => {
      const first = kind === "number" && key !== "rank" && key !== "row" && key !== "change";  // large ones first
      sortBy(key, state.key === key ? !state.down : first);
    });
  }
  byId("sorter").addEventListener("change", (event) => {
    const [key, way] = event.target.value.split(" ");
    sortBy(key, way === "down");
  });
  for (const control of [search, given, suggested, least, byId("varied"), byId("undecided")]) control.addEventListener("input", refresh);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(() => sortBy("rank", false)));
  addEventListener("resize", offerMore);
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      const on = chip.getAttribute("aria-pressed") === "true";
      given.value = on ? "" : chip.dataset.given;
      suggested.value = on ? "" : chip.dataset.suggested;
      refresh();
    });
  }

  // --- decisions by keyboard, and their file ---------------------------------------------------------------------

  const lines = () => [...document.querySelectorAll("#rows tr")].filter((line) => line.suspect);
  const goTo = (line) => { line.focus({ preventScroll: true }); line.scrollIntoView({ block: "nearest" }); };
  const step = (by) => {
    const all = lines(), at = all.indexOf(document.activeElement.closest("#rows tr"));
    const next = at < 0 ? all[0] : all[at + by];
    if (next) { goTo(next); return; }
    const before = state.page;
    state.page += by;
    draw();
    if (state.page !== before) goTo(lines().at(by > 0 ? 0 : -1));
  };
  const keys = {
    j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
    a: (line) => choose(line, "accept"), r: (line) => choose(line, "reject"), u: (line) => choose(line, ""),
    l: (line) => line.querySelector("select").focus(),
  };
  const choose = (line, decision) => {
    decide(line.suspect, decision);
    line.mark();
    if (decision) step(1);
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const line = event.target.closest("#rows tr");
    if (event.key === "Escape" && line) { goTo(line); return; }
    if (event.target.closest("input, select, textarea") || !(event.key in keys)) return;
    if (event.key.startsWith("Arrow") && !line) return;  // which scroll the page
    if (!"jk".includes(event.key) && !line) return;
    event.preventDefault();
    keys[event.key](line);
  });
  byId("save").addEventListener("click", () => {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([asFile()], { type: "application/json" }));
    link.download = "decisions.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  });
  byId("forget").addEventListener("click", () => {
    if (!confirm("Forget all decisions on this page?")) return;
    for (const s of suspects) Object.assign(s, { decision: "", label: "" });
    remember();
    tell();
    refresh();
  });

  recall();
  tell();
  explorer.hidden = false;
  sortBy("rank", false);
})();
