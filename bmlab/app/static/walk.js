// A look to walk in: a grid of layers × heads, and the map of the head that is chosen.

const SIDE = 12;                                                     // pixels of a head's cell, and of a token's at most

const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));

// a table of shades, 0…255 a cell, on a canvas; transparent where nothing is, so that it takes the page's colour
function shade(canvas, values, rows, columns, cell) {
  canvas.width = columns * cell;
  canvas.height = rows * cell;
  const pen = canvas.getContext("2d");
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

function build(model) {
  const root = make("div", "bmlab-walk");
  const left = make("div", "bm-side");
  const right = make("div", "bm-side");
  const grid = make("canvas", "bm-grid");
  const map = make("canvas", "bm-map");
  const title = make("div", "bm-title");
  const told = make("div", "bm-told");
  const line = make("div", "bm-line");
  grid.tabIndex = 0;
  grid.setAttribute("role", "application");
  grid.setAttribute("aria-label", "heads: a row a layer, a column a head; arrow keys move");
  const caption = make("div", "bm-title", `${model.get("measure")}, layer ↓ head →`);
  left.append(caption, grid, make("div", "bm-hint", "click, or arrow keys"));
  right.append(title, map, told, line);
  root.append(left, right);
  let token = null;                                                  // that looks; null: none is pointed at

  const size = () => [model.get("layers"), model.get("heads")];
  const draw = () => {
    const [layers, heads] = size();
    const [layer, head] = model.get("chosen");
    shade(grid, bytes(model.get("scores")), layers, heads, SIDE);
    const pen = grid.getContext("2d");
    pen.strokeStyle = "#d9730d";
    pen.lineWidth = 2;
    pen.strokeRect(head * SIDE, layer * SIDE, SIDE - 1, SIDE - 1);
    title.textContent = `layer ${layer} head ${head}: row looks at column`;
    const n = model.get("tokens").length;
    shade(map, bytes(model.get("map")), n, n, Math.max(2, Math.min(SIDE, Math.floor(360 / n))));
    tell();
  };
  const tell = () => {
    const tokens = model.get("tokens");
    const values = bytes(model.get("map"));
    line.replaceChildren(...tokens.map((t, i) => {
      const word = make("button", i === token ? "bm-word bm-on" : "bm-word", t);
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
