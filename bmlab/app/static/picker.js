// The picker: its furniture, what is drawn from the traits, and what a click or a key changes in them.

const MARKS = [
  ["░", "frozen", "frozen"],
  ["◐", "tunable", "partly tunable"],
  ["●", "tunable", "tunable"],
  ["▲", "delta", "delta here or below"],
  ["↪", "none", "tied, counted once"],
];
const KEYS = [
  ["↑ ↓ ← →", "move, open, close"],
  ["Space", "pick"],
  ["Shift", "with a click or Space: all up to there"],
  ["Enter", "open or close"],
  ["u", "fold ×n or show each"],
  ["/", "filter"],
];

function legends() {
  const marks = make("div", "bm-legend");
  const keys = make("div", "bm-legend");
  for (const [mark, cls, text] of MARKS) {
    const item = make("span", `bm-${cls}`);
    item.append(make("span", "bm-mark", mark), make("span", "bm-name", text));
    marks.append(item);
  }
  for (const [key, text] of KEYS) {
    const item = make("span");
    item.append(make("kbd", "", key), make("span", "", text));
    keys.append(item);
  }
  return [marks, keys];
}

// the bar above the tree: filter, matches, and what is done with them
function bar(p) {
  const bar = make("div", "bm-bar");
  p.filter = make("input", "bm-filter");
  Object.assign(p.filter, {type: "search", spellcheck: false, autocomplete: "off"});
  p.filter.placeholder = "filter: q_proj, layers[3:6].mlp, *.mlp.*";
  p.filter.setAttribute("aria-label", "filter modules by a pattern");
  p.status = make("span", "bm-status");
  p.status.setAttribute("role", "status");
  p.take = make("button", "bm-button bm-take");
  p.linear = make("button", "bm-button bm-toggle", "only linear");
  p.linear.title = "show only modules with a weight matrix; a box then stands for all of them below it";
  bar.append(p.filter, p.status, p.take, p.linear);
  return bar;
}

// the panel beside the tree: what is picked, as code, and what a Lora there would cost
function side(p) {
  const side = make("div", "bm-side");
  const buttons = make("div", "bm-buttons");
  const label = make("label", "bm-ranklabel", "r ");
  p.about = make("div", "bm-about");
  p.chosen = make("div", "bm-chosen");
  p.chosen.setAttribute("role", "status");
  p.code = make("code", "bm-code");
  p.preview = make("div", "bm-preview");
  p.copy = make("button", "bm-button", "copy");
  p.clear = make("button", "bm-button", "clear");
  p.rank = make("input", "bm-rank");
  Object.assign(p.rank, {type: "number", min: 1, max: 4096});
  label.append(p.rank);
  buttons.append(p.copy, p.clear, label);
  side.append(p.about, make("div", "bm-title", "Picked"), p.chosen, p.code, buttons, p.preview, ...legends());
  return side;
}

function furniture(model) {
  const p = {root: make("div", "bmlab-picker")};
  const main = make("div", "bm-main");
  p.tree = make("div", "bm-tree");
  p.tree.tabIndex = 0;
  p.tree.setAttribute("role", "tree");
  p.tree.setAttribute("aria-multiselectable", "true");
  p.tree.setAttribute("aria-label", `modules of ${model.get("tree").label}`);
  p.head = make("div", "bm-row bm-head");
  p.head.setAttribute("aria-hidden", "true");
  p.body = make("div", "bm-body");
  p.body.append(p.head, p.tree);
  p.root.append(bar(p), main);
  main.append(p.body, side(p));
  p.root.dataset.lmSuppressShortcuts = "true";
  return p;
}

// What gives way where the page is narrow, first to last; names never do
const GIVE_WAY = ["each", "device", "dtype", "trainable", "class", "memory", "parameters", "indent"];

// hides columns until the rest fits
function arrange(p, columns) {
  if (!p.body.clientWidth) return;
  const gone = [];
  const there = name => !gone.includes(name);
  const set = () => {
    p.body.dataset.gone = gone.join(" ");
    const numbers = columns.filter(c => there(c[0])).map(() => "max-content");
    const kind = there("class") ? ["minmax(12ch, 2fr)"] : [];
    const tracks = ["minmax(max-content, 3fr)", ...kind, ...numbers];
    p.body.style.setProperty("--bm-columns", tracks.join(" "));
  };
  set();
  for (const name of GIVE_WAY) {
    if (p.body.scrollWidth <= p.body.clientWidth) return;
    if (name !== "class" && name !== "indent" && !columns.some(c => c[0] === name)) continue;
    gone.push(name);
    set();
  }
}

function draw(p, model, ui) {
  const tree = model.get("tree");
  const chosen = new Set(model.get("selected"));
  const found = model.get("found");
  const text = model.get("filter");
  const linear = model.get("linear");
  const searching = text.trim() !== "" && found.filter === text;
  const names = new Set(found.names);
  const passes = (n, node) => (!linear || node.linear) && (!searching || names.has(n));
  const root = grow(tree, [""], null, new Set(model.get("unfolded")))[0];
  weigh(root, chosen, passes, linear || searching);
  ui.rows = flatten(root, new Set(model.get("expanded")), linear || searching, searching, []);
  ui.at = Math.max(0, ui.rows.findIndex(v => v.id === ui.active));
  ui.target = root.target;
  // dtype and device are said once above if all are alike
  const columns = COLUMNS.filter(c => !["dtype", "device"].includes(c[0]) || tree[c[0]].includes("+"));
  const titles = columns.map(c => make("span", `bm-cell bm-${c[0]}`, c[0]));
  p.head.replaceChildren(make("span", "bm-lead", "module"), make("span", "bm-class", "class"), ...titles);
  const rows = ui.rows.map((v, i) => row(v, i, columns, `${ui.id}-${i}`));
  rows[ui.at].classList.add("bm-active");
  p.tree.replaceChildren(...rows);
  ui.columns = columns;
  arrange(p, columns);
  p.tree.setAttribute("aria-activedescendant", rows[ui.at].id);
  const about = [`${count(tree.each)} parameters`, bytes(tree.bytes), tree.dtype, tree.device];
  p.about.textContent = `${tree.label}: ${about.join(" · ")}`;
  settle(p, model, searching, text, found, root);
}

function settle(p, model, searching, text, found, root) {
  const waiting = text !== found.filter;
  const all = root.target.length > 0 && root.picked === root.target.length;
  const active = searching || model.get("linear");
  p.status.textContent = waiting ? "…" : searching ? found.note : "";
  p.take.textContent = active ? `${all ? "unpick" : "pick"} ${root.target.length}` : "pick matches";
  p.take.disabled = !active || waiting || !root.target.length;
  p.linear.setAttribute("aria-pressed", model.get("linear"));
  p.filter.classList.toggle("bm-none", searching && !found.names.length);
  if (document.activeElement !== p.filter && p.filter.value !== text) p.filter.value = text;
  if (document.activeElement !== p.rank) p.rank.value = model.get("rank");
  const n = model.get("selected").length;
  const pattern = model.get("pattern").map(x => JSON.stringify(x));
  p.chosen.textContent = n ? `${n} module${n > 1 ? "s" : ""}` : "nothing yet: tick a box";
  p.code.textContent = n ? `modules=${pattern.length > 1 ? `[${pattern.join(", ")}]` : pattern[0]}` : "";
  p.code.hidden = !n;
  p.copy.disabled = !n;
  p.clear.disabled = !n;
  p.preview.textContent = n ? model.get("preview") : "";
}

// names into a trait's list, or out of it
function put(model, trait, names, inside) {
  const s = new Set(model.get(trait));
  for (const n of names) {
    if (inside) s.add(n);
    else s.delete(n);
  }
  model.set(trait, [...s]);
}

function toggle(model, names, off) {
  put(model, "selected", names, !off);
  model.save_changes();
}

const act = {
  pick(model, ui, v) {
    if (!v.target.length) return;
    ui.from = v.id;
    toggle(model, v.target, v.picked === v.target.length);
  },
  // from the row that was picked last to this one; between two rows of one level, the rows of that level
  range(model, ui, v) {
    const from = ui.rows.findIndex(r => r.id === ui.from);
    if (from < 0) {
      act.pick(model, ui, v);
      return;
    }
    const [a, b] = [from, ui.rows.indexOf(v)].sort((x, y) => x - y);
    const level = ui.rows[from].level === v.level ? v.level : null;
    const rows = ui.rows.slice(a, b + 1).filter(r => level === null || r.level === level);
    toggle(model, rows.flatMap(r => r.target), v.target.length > 0 && v.picked === v.target.length);
  },
  open(model, ui, v, yes) {
    if (!v.rows.length || v.open === yes) return;
    put(model, "expanded", v.names, yes);
    model.save_changes();
  },
  fold(model, ui, v) {
    const members = v.run ? v.parent.kids.filter(k => k.node === v.node).flatMap(k => k.names) : v.names;
    if (!v.run && v.times < 2) return;
    if (v.run) ui.active = members[0];
    put(model, "unfolded", members, !v.run);
    put(model, "expanded", members, v.run !== null);               // a fold is open, its members singly are closed
    model.save_changes();
  },
};

// a key in the tree: does it mean anything here?
function press(model, p, ui, e) {
  if (e.ctrlKey || e.metaKey || e.altKey) return false;
  const v = ui.rows[ui.at];
  const go = i => {
    ui.active = ui.rows[Math.min(ui.rows.length - 1, Math.max(0, i))].id;
    ui.redraw(true);
  };
  const page = Math.max(1, Math.floor(p.body.clientHeight / 24) - 2);
  const moves = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9};
  const does = {
    ArrowRight() {
      if (v.open) go(ui.at + 1);
      else act.open(model, ui, v, true);
    },
    ArrowLeft() {
      if (v.open && !p.filter.value) act.open(model, ui, v, false);
      else if (v.parent) go(ui.rows.indexOf(v.parent));
    },
    " "() { act[e.shiftKey ? "range" : "pick"](model, ui, v) },
    Enter() { act.open(model, ui, v, !v.open) },
    u() { act.fold(model, ui, v) },
    "/"() { p.filter.focus() },
  };
  if (e.key in moves) go(ui.at + moves[e.key]);
  else if (Object.hasOwn(does, e.key)) does[e.key]();
  else return false;
  return true;
}

function listenToTree(p, model, ui) {
  p.tree.addEventListener("click", e => {
    const r = e.target.closest("[data-i]");
    if (!r) return;
    const v = ui.rows[r.dataset.i];
    ui.active = v.id;
    if (e.target.closest(".bm-fold")) act.fold(model, ui, v);
    else if (e.target.closest(".bm-twist") || !v.target.length) act.open(model, ui, v, !v.open);
    else act[e.shiftKey ? "range" : "pick"](model, ui, v);
    p.tree.focus({preventScroll: true});
    ui.redraw();
  });
  p.tree.addEventListener("mousedown", e => {
    if (e.shiftKey) e.preventDefault();                            // no text is selected
  });
  p.tree.addEventListener("keydown", e => {
    if (press(model, p, ui, e)) e.preventDefault();
    // the notebook has shortcuts on single letters
    if (!(e.ctrlKey || e.metaKey || e.key === "Escape")) e.stopPropagation();
  });
  p.body.addEventListener("scroll", () => { ui.top = p.body.scrollTop });
}

function listenToFilter(p, model, ui, send) {
  let timer;
  p.filter.addEventListener("input", () => {
    clearTimeout(timer);
    p.status.textContent = "…";
    timer = setTimeout(() => send("filter", p.filter.value), 120);
  });
  p.filter.addEventListener("keydown", e => {
    if (!(e.ctrlKey || e.metaKey)) e.stopPropagation();
    if (e.key === "Enter" && !p.take.disabled) p.take.click();
    if (e.key === "ArrowDown") {
      p.tree.focus();
      e.preventDefault();
    }
    if (e.key === "Escape") {
      p.filter.value = "";
      send("filter", "");
      p.tree.focus();
    }
  });
  p.take.addEventListener("click", () => toggle(model, ui.target, p.take.textContent.startsWith("unpick")));
  p.linear.addEventListener("click", () => send("linear", !model.get("linear")));
}

function listenToSide(p, send) {
  p.clear.addEventListener("click", () => send("selected", []));
  p.rank.addEventListener("change", () => {
    const r = parseInt(p.rank.value);
    if (r >= 1) send("rank", r);
  });
  p.rank.addEventListener("keydown", e => e.stopPropagation());
  p.copy.addEventListener("click", () => copyBy(p.copy, p.code.textContent, p.code, "press Ctrl+C"));
}

const TRAITS = [
  "tree", "selected", "found", "filter", "pattern", "preview", "linear", "rank", "expanded", "unfolded",
];
let made = 0;

function build(model) {
  const p = furniture(model);
  const ui = {active: "", rows: [], at: 0, id: `bm${++made}-${Math.random().toString(36).slice(2)}`};
  let queued = false;
  const now = scroll => {
    queued = true;
    if (kept.held()) return;                                       // a row that is pressed stays until it is released
    queued = false;
    draw(p, model, ui);
    if (scroll) p.tree.children[ui.at].scrollIntoView({block: "nearest"});
  };
  const released = () => {
    if (queued) now(false);
  };
  const kept = keep(p.root, () => model.send({inside: false}), released);
  ui.redraw = scroll => {
    if (scroll) return now(true);
    if (queued) return;
    queued = true;
    queueMicrotask(() => now(false));
  };
  const send = (trait, value) => {
    model.set(trait, value);
    model.save_changes();
  };
  const heard = () => ui.redraw();
  TRAITS.forEach(t => model.on(`change:${t}`, heard));
  listenToTree(p, model, ui);
  listenToFilter(p, model, ui, send);
  listenToSide(p, send);
  p.root.addEventListener("focusin", e => {
    if (!p.root.contains(e.relatedTarget)) model.send({inside: true});
  });
  now(false);
  const sized = new ResizeObserver(() => arrange(p, ui.columns));
  sized.observe(p.root);
  const back = () => {
    p.body.scrollTop = ui.top ?? 0;
    kept.focus();
  };
  const stop = () => {
    sized.disconnect();
    TRAITS.forEach(t => model.off(`change:${t}`, heard));
  };
  return {root: p.root, back, stop};
}
