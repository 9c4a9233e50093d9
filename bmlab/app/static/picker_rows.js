// One row: box, marks, name, the fold's ×n, and columns of numbers.

const COLUMNS = [
  ["each", v => v.names.length > 1 ? count(v.node.each) : ""],
  ["parameters", v => count(v.node.each * v.names.length)],
  ["trainable", v => count(v.node.trainable * v.names.length)],
  ["dtype", v => v.node.dtype],
  ["device", v => v.node.device],
  ["memory", v => bytes(v.node.bytes * v.names.length)],
];
const STATES = {"░": "frozen", "◐": "partly tunable", "●": "tunable", "": "no weights"};

const color = mark => mark.includes("▲") ? "delta" : mark === "░" ? "frozen" : mark ? "tunable" : "none";
const cell = (c, v) => !v.node.mark || v.node.tied || !v.names.length ? "" : c[1](v);

// what a screen reader says of a row
function spoken(v) {
  const n = v.node;
  const words = [
    v.label,
    n.class,
    n.shape,
    v.times > 1 ? `${v.times} folded` : "",
    n.tied ? `tied to ${n.tied}` : STATES[n.mark.replace("▲", "")],
    n.mark.includes("▲") ? "with delta" : "",
  ];
  if (v.target.length > 1) words.push(`${v.picked} of ${v.target.length} picked`);
  return words.filter(w => w).join(", ");
}

function attributes(v, i, id) {
  const set = {
    role: "treeitem",
    id,
    "aria-level": v.level + 1,
    "aria-label": spoken(v),
    "data-i": i,
    "data-name": v.id,
    title: v.names.length > 1 ? `${v.names[0]} … ${v.names.at(-1)}` : v.id,
  };
  if (v.place) Object.assign(set, {"aria-posinset": v.place[0], "aria-setsize": v.place[1]});
  if (v.rows.length) set["aria-expanded"] = v.open;
  if (v.target.length) set["aria-checked"] = v.state;
  return set;
}

// the button that unfolds a run, or folds it again
function fold(v) {
  const b = make("button", "bm-fold", v.run ? "fold" : `×${v.times}`);
  b.title = v.run ? "fold equal neighbours again (u)" : `show the ${v.times} one by one (u)`;
  b.tabIndex = -1;
  return b;
}

function row(v, i, columns, id) {
  const n = v.node;
  const r = make("div", `bm-row bm-${color(n.mark)}${v.state === "true" ? " bm-picked" : ""}`);
  const lead = make("span", "bm-lead");
  const ticked = v.state === "true" ? "✓" : v.state === "mixed" ? "–" : "";
  const box = make("span", v.target.length ? "bm-box" : "bm-box bm-void", ticked);
  const set = attributes(v, i, id);
  for (const k in set) r.setAttribute(k, set[k]);
  box.title = v.target.length > 1 ? `${v.picked} of ${v.target.length} picked` : "";
  lead.style.setProperty("--bm-level", v.level);
  lead.append(
    make("span", "bm-twist", v.rows.length ? v.open ? "▾" : "▸" : ""),
    box,
    make("span", "bm-delta-mark", n.mark.includes("▲") ? "▲" : ""),
    make("span", "bm-mark", n.mark.replace("▲", "") || " "),
    make("span", "bm-name", v.label),
  );
  if (v.run ? v.run.first : v.times > 1) lead.append(fold(v));
  const note = n.tied ? `↪ ${n.kind === "repeat" ? "same module as" : "tied to"} ${n.tied}` : "";
  const kind = make("span", "bm-class", [n.class, n.shape, note].filter(x => x).join(" "));
  kind.title = kind.textContent;
  r.append(lead, kind);
  for (const c of columns) r.append(make("span", `bm-cell bm-${c[0]}`, cell(c, v)));
  return r;
}
