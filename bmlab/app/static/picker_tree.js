// The folded tree is multiplied out, and each row learns what its box stands for.

const four = x => String(Number(x.toPrecision(4)));

function count(n) {
  for (const [unit, step] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]]) {
    if (n >= step * 0.99995) return four(n / step) + unit;
  }
  return four(n);
}

function bytes(n) {
  let u = 0;
  while (n >= 1023.95 && u < 5) {
    n /= 1024;
    u++;
  }
  return four(n) + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][u];
}

// a node and all below it, its names multiplied out; a run that is unfolded becomes one view for each member
function grow(node, before, parent, unfolded) {
  const view = (keys, label, run) => {
    const names = before.flatMap(p => keys.map(k => p && k ? `${p}.${k}` : p || k));
    const v = {node, label, names, parent, run, times: keys.length, level: parent ? parent.level + 1 : 0};
    v.id = names.length ? names[0] : `${parent.id}/${label}`;
    v.kids = node.children.flatMap(c => grow(c, names, v, unfolded));
    return v;
  };
  const first = before[0] ? `${before[0]}.${node.keys[0]}` : node.keys[0];
  if (node.keys.length > 1 && unfolded.has(first)) {
    return node.keys.map((k, i) => view([k], k.split(".").pop(), {first: i === 0}));
  }
  return [view(node.keys, node.label, null)];
}

// what the box of a row stands for: its own modules if they pass the filter, else those below it that do
function weigh(v, chosen, passes, filtered) {
  const module = v.node.kind === "module" && v.level > 0;
  v.own = module ? v.names.filter(n => passes(n, v.node)) : [];
  v.hit = module ? v.names.filter(n => chosen.has(n)).length : 0;
  v.below = [];
  for (const k of v.kids) {
    weigh(k, chosen, passes, filtered);
    v.hit += k.hit;
    for (const n of k.every) v.below.push(n);
  }
  v.every = v.own.concat(v.below);
  v.target = v.own.length ? v.own : v.level || filtered ? v.below : [];
  v.picked = v.target.filter(n => chosen.has(n)).length;
  v.state = v.picked && v.picked === v.target.length ? "true" : v.picked || v.hit ? "mixed" : "false";
}

// the rows that show, from the top
function flatten(v, open, filtered, searching, out) {
  out.push(v);
  v.rows = v.kids.filter(k => !filtered || k.target.length || k.node.kind !== "module" && v.own.length);
  v.open = v.rows.length > 0 && (open.has(v.id) || searching && v.below.length > 0);
  if (!v.open) return out;
  v.rows.forEach((k, i) => {
    k.place = [i + 1, v.rows.length];
    flatten(k, open, filtered, searching, out);
  });
  return out;
}
