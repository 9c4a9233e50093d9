// A look to walk in: a grid of layers × heads, and the map of the head that is chosen.

const SIDE = 12;                                                     // pixels of a cell at most
const TALL = 400;                                                    // pixels of a table at most, while cells can be seen

const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));

// a table of shades, 0…255 a cell, on a canvas; transparent where nothing is, so that it takes the page's colour
function shade(canvas, values, rows, columns, cell) {
  const sharp = Math.max(1, Math.round(window.devicePixelRatio || 1));
  canvas.width = columns * cell * sharp;
  canvas.height = rows * cell * sharp;
  canvas.style.width = `${columns * cell}px`;
  canvas.style.height = `${rows * cell}px`;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  for (let i = 0; i < rows * columns; i++) {
    pen.fillStyle = `rgba(26, 111, 212, ${values[i] / 255})`;
    pen.fillRect((i % columns) * cell, Math.floor(i / columns) * cell, cell - 1, cell - 1);
  }
}

// where a pointer is, in cells; null: beside them
function under(canvas, e, rows, columns) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor((e.clientX - box.left) / box.width * columns);
  const row = Math.floor((e.clientY - box.top) / box.height * rows);
  return row >= 0 && row < rows && column >= 0 && column < columns ? [row, column] : null;
}

// names along the rows or columns of a table, each beside its own, where there is room for a line of text
function axis(kind, names, cell) {
  const every = Math.ceil(10 / cell);
  const line = make("div", `bw-axis bw-${kind}`);
  line.append(...names.map((name, i) => {
    const at = make("span", "", i % every ? "" : name);
    at.style[kind === "rows" ? "height" : "width"] = `${cell}px`;
    at.style[kind === "rows" ? "lineHeight" : "minWidth"] = `${cell}px`;
    return at;
  }));
  return line;
}

// a table with its names: those of the columns above it, those of the rows on its left
function framed(canvas, rows, columns, cell) {
  const frame = make("div", "bw-frame");
  const above = columns ? axis("columns", columns, cell) : make("div");
  frame.append(make("div"), above, rows && cell >= 8 ? axis("rows", rows, cell) : make("div"), canvas);
  return frame;
}

const numbers = n => Array.from({length: n}, (_, i) => `${i}`);
const named = tokens => tokens.map(t => t.trim().slice(0, 14) || "␣");

function build(model) {
  const root = make("div", "bmlab-walk");
  const left = make("div", "bw-side");
  const right = make("div", "bw-side");
  const grid = make("canvas", "bw-grid");
  const map = make("canvas", "bw-map");
  const title = make("div", "bw-title");
  const told = make("div", "bw-told");
  const line = make("div", "bw-line");
  grid.tabIndex = 0;
  grid.setAttribute("role", "application");
  grid.setAttribute("aria-label", "heads: a row a layer, a column a head; arrow keys move");
  const caption = make("div", "bw-title", `${model.get("measure")}, layer ↓ head →`);
  const table = make("div");
  const square = make("div");
  left.append(caption, table, make("div", "bw-hint", "stronger: looks more at others; click, or arrow keys"));
  right.append(title, square, told, line);
  root.append(left, right);
  let token = null;                                                  // that looks; null: none is pointed at

  const size = () => [model.get("layers"), model.get("heads")];
  const draw = () => {
    const [layers, heads] = size();
    const [layer, head] = model.get("chosen");
    const side = Math.max(5, Math.min(SIDE, Math.floor(TALL / layers), Math.floor(TALL / heads)));
    shade(grid, bytes(model.get("scores")), layers, heads, side);
    if (!table.firstChild) table.append(framed(grid, numbers(layers), numbers(heads), side));
    const pen = grid.getContext("2d");
    pen.strokeStyle = "#d9730d";
    pen.lineWidth = 2;
    pen.strokeRect(head * side, layer * side, side - 1, side - 1);
    title.textContent = `layer ${layer} head ${head}: rows look at columns`;
    const tokens = model.get("tokens");
    const n = tokens.length;
    const cell = Math.max(2, Math.min(SIDE, Math.floor(TALL / n)));
    shade(map, bytes(model.get("map")), n, n, cell);
    if (!square.firstChild) square.append(framed(map, named(tokens), null, cell));
    tell();
  };
  const tell = () => {
    const tokens = model.get("tokens");
    const values = bytes(model.get("map"));
    line.replaceChildren(...tokens.map((t, i) => {
      const word = make("button", i === token ? "bw-word bw-on" : "bw-word", t);
      const seen = token === null ? 0 : values[token * tokens.length + i];
      word.style.background = `rgba(26, 111, 212, ${0.7 * seen / 255})`;
      word.title = token === null ? "where does it look?" : `${(seen / 255).toFixed(2)}`;
      word.addEventListener("click", () => { token = i; tell() });
      return word;
    }));
    told.textContent = token === null ? "point at a row, or click a token" : `${token} ${tokens[token]} looks at`;
  };
  const choose = (layer, head) => {
    const [layers, heads] = size();
    if (layer < 0 || layer >= layers || head < 0 || head >= heads) return;
    model.set("chosen", [layer, head]);
    model.save_changes();
  };
  const moves = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
  grid.addEventListener("click", e => {
    const at = under(grid, e, ...size());
    if (at) choose(...at);
  });
  grid.addEventListener("keydown", e => {
    if (!moves[e.key]) return;
    e.preventDefault();
    e.stopPropagation();
    const [layer, head] = model.get("chosen");
    choose(layer + moves[e.key][0], head + moves[e.key][1]);
  });
  grid.addEventListener("pointermove", e => {
    const at = under(grid, e, ...size());
    if (at) grid.title = `layer ${at[0]} head ${at[1]}`;
  });
  map.addEventListener("pointermove", e => {
    const n = model.get("tokens").length;
    const at = under(map, e, n, n);
    if (!at || at[0] === token) return;
    token = at[0];
    tell();
  });
  model.on("change:map", draw);
  draw();
  return {root, back: draw, stop: () => model.off("change:map", draw)};
}
