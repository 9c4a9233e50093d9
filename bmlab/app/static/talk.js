// What the panels in a notebook and the page of the server have in common. The panels live in a page of others, so
// the names of their classes begin with "bp-". Both show fenced code, `code` and **bold**.

const look = {prefix: "", marks: false};
const part = (tag, names, text) => make(tag, names.replace(/\S+/g, name => look.prefix + name), text);

function button(names, text, title, click) {
  const b = part("button", `button ${names}`.trim(), text);
  b.type = "button";
  b.title = title;
  b.addEventListener("click", click);
  return b;
}

const stopButton = click => button("stop", "Stop", "end it here; what has come stays (Esc)", click);

// the line that says which keys do what
function keys(...pairs) {
  const line = part("div", "keys");
  for (const [key, text] of pairs) {
    const item = make("span");
    item.append(make("kbd", "", key), ` ${text}`);
    line.append(item);
  }
  return line;
}

const withCtrl = e => e.ctrlKey || e.metaKey;

// a text into a box as if it were typed, so that Ctrl+Z takes it back
function typed(box, text) {
  box.focus();
  box.select();
  const done = text ? document.execCommand("insertText", false, text) : document.execCommand("delete");
  if (!done || box.value !== text) box.value = text;
}

// ---- sampling ----

const SLIDERS = {
  temperature: {
    label: "temperature", low: 0, high: 2, step: 0.05,
    title: "0: always the likeliest token; higher: more surprising",
  },
  top_p: {
    label: "top-p", low: 0.05, high: 1, step: 0.05,
    title: "draw from the fewest tokens that hold this probability; 1: from all",
  },
  top_k: {
    label: "top-k", low: 0, high: 200, step: 1,
    title: "draw from the k likeliest tokens; 0: no such limit",
  },
  length: {label: "length", low: 1, high: 1024, step: 1, title: "tokens, at most"},
};

function slider({label, low, high, step, title}) {
  const whole = part("label", "slider");
  const range = make("input");
  const value = part("span", "value");
  Object.assign(range, {type: "range", ariaLabel: label, min: low, max: high, step});
  whole.title = title;
  whole.append(make("span", "", label), value, range);
  const show = x => {
    range.value = x;
    if (label === "top-k" && !x) value.textContent = "all";
    else value.textContent = step < 1 ? Number(x.toPrecision(3)) : x;
  };
  return {whole, range, show};
}

function seedField() {
  const whole = part("label", "slider seed");
  const field = make("input");
  Object.assign(field, {type: "number", ariaLabel: "seed", min: 0, step: 1, placeholder: "random"});
  whole.title = "the same seed draws the same text; empty: another each time";
  whole.append(make("span", "", "seed"), field);
  return {whole, field};
}

// ---- a conversation ----

// a piece between fenced code: `code` and **bold**, everything else as it is
function marked(text, afterCode, beforeCode) {
  if (!look.marks) return [text];
  if (afterCode) text = text.replace(/^\n+/, "");
  if (beforeCode) text = text.replace(/\n+$/, "");
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map(bit => {
    if (/^`[^`\n]+`$/.test(bit)) return make("code", "", bit.slice(1, -1));
    if (/^\*\*[^*\n]+\*\*$/.test(bit)) return make("strong", "", bit.slice(2, -2));
    return bit;
  });
}

// text of the model, without its markup being taken for HTML
function prose(text) {
  const out = document.createDocumentFragment();
  text.trimStart().split("```").forEach((piece, i, pieces) => {
    if (i % 2) out.append(part("div", "code", piece.replace(/^[\w+-]*\n/, "").replace(/\n$/, "")));
    else out.append(...marked(piece, i > 0, i < pieces.length - 1));
  });
  return out;
}

function turn({role, content, note}) {
  const whole = part("div", `turn ${role}`);
  const said = part("div", "said");
  said.append(prose(content));
  whole.append(part("div", "who", role === "user" ? "You" : "Model"), said);
  if (note) whole.append(part("span", "mark", note));
  return whole;
}

// a change of a log keeps its end in sight, unless the reader has scrolled up
function following(log, change, always = false) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd || always) log.scrollTop = log.scrollHeight;
}

// ---- blanks ----

const joined = (asked, answers) => asked.split("__").map((s, i) => s + (answers[i] ?? "")).join("");

// a text with its blanks as far as they are filled; `each` may add to the element of an answer
function filledIn(asked, answers, each = a => [a]) {
  const pieces = asked.split("__");
  return pieces.flatMap((s, i) => {
    if (i === pieces.length - 1) return [s];
    const a = part("span", answers[i] ? "answer" : "answer empty", answers[i] || "\u2007\u2007\u2007\u2007");
    a.title = `blank ${i + 1}`;
    return [s, ...each(a, i)];
  });
}

// ---- several texts to choose from ----

function numbered(tag, i, text) {
  const item = part(tag, "choice");
  item.append(part("span", "number", `${i + 1}`), part("span", "said", text.trimStart() || "…"));
  return item;
}

// a story and its continuation have one space between them
const continued = (story, choice) => story + (/\s$/.test(story) ? choice.trimStart() : choice);

// continuations below a box: Tab asks for them, arrows move, Enter or a click takes one, Esc closes the list. Pressed
// without a list, Esc lets the next Tab leave the box, as Tab does elsewhere. What is offered and what becomes of it
// is the caller's: `choices()`, `busy()`, `wants()` (does Tab ask now?), `go()`, `take(i)` and `close()`.
function offers({box, list, ask, id, choices, busy, wants, go, take, close}) {
  let at = 0;
  let leaving = false;
  const item = (text, i) => {
    const o = numbered("div", i, text);
    o.id = `${id}-${i}`;
    o.dataset.i = i;
    o.setAttribute("role", "option");
    o.setAttribute("aria-selected", i === at);
    return o;
  };
  const draw = () => {
    const texts = choices();
    at = Math.min(at, Math.max(0, texts.length - 1));
    list.hidden = !texts.length;
    ask.textContent = texts.length ? "Others" : "Continue";
    const items = texts.map(item);
    // a press that began before they grew is to end on the same element, else it is no click
    if (items.length !== list.children.length) list.replaceChildren(...items);
    else items.forEach((o, i) => {
      list.children[i].replaceChildren(...o.childNodes);
      list.children[i].setAttribute("aria-selected", i === at);
    });
    if (texts.length) box.setAttribute("aria-activedescendant", `${id}-${at}`);
    else box.removeAttribute("aria-activedescendant");
  };
  const moves = {ArrowDown: 1, ArrowUp: -1};
  list.addEventListener("mousedown", e => e.preventDefault());     // the focus stays in the text
  list.addEventListener("click", e => {
    const o = e.target.closest("[data-i]");
    if (o) take(Number(o.dataset.i));
  });
  box.addEventListener("input", () => {
    if (choices().length || busy()) close();
  });
  box.addEventListener("keydown", e => {
    const left = leaving;
    const n = choices().length;
    leaving = false;
    if (e.isComposing) return;
    if (e.key === "Tab" && !e.shiftKey && !left && wants()) {
      e.preventDefault();
      go();
    } else if (n && e.key in moves) {
      e.preventDefault();
      at = (at + moves[e.key] + n) % n;
      draw();
    } else if (n && e.key === "Enter" && !e.shiftKey) {
      e.preventDefault();
      take(at);
    } else if (e.key === "Escape" && !busy()) {
      leaving = !n;
      close();
    }
  });
  const first = () => { at = 0 };
  return {draw, first};
}

function storyKeys() {
  return keys(["Tab", "continue"], ["↑ ↓", "choose"], ["Enter", "take"], ["Esc", "close; then Tab leaves"]);
}
