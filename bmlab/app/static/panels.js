// A panel: a frame with the sliders, the buttons and the meter, and in it the body of its kind. All that it shows is
// in the traits of its model; what a click or a key asks for goes to the kernel as one message.

Object.assign(look, {prefix: "bp-", marks: true});

const BODIES = {chat: chatBody, fill: fillBody, story: storyBody, titles: titlesBody, beside: besideBody};
const TRAITS = {temperature: "temperature", top_p: "top_p", top_k: "top_k", max_new_tokens: "length"};   // its slider

const running = model => model.get("state") !== "idle";

function save(model, values) {
  for (const k in values) model.set(k, values[k]);
  model.save_changes();
}

// a box is as high as its text
function grow(box) {
  if (!box.isConnected || !box.offsetParent) return;
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function sliders(model, listen) {
  const box = make("div", "bp-sliders");
  for (const [trait, kind] of Object.entries(TRAITS)) {
    const high = kind === "length" ? model.get("longest") : SLIDERS[kind].high;
    const {whole, range, show} = slider({...SLIDERS[kind], high});
    const shown = () => show(model.get(trait));
    range.addEventListener("input", () => {
      model.set(trait, Number(range.value));
      shown();
    });
    range.addEventListener("change", () => model.save_changes());
    box.append(whole);
    listen([trait], shown);
    shown();
  }
  const {whole, field} = seedField();
  const shown = () => {
    if (document.activeElement !== field) field.value = model.get("seed") ?? "";
  };
  field.addEventListener("change", () => {
    const n = parseInt(field.value);
    save(model, {seed: n >= 0 ? n : null});
    shown();
  });
  box.append(whole);
  listen(["seed"], shown);
  shown();
  return box;
}

// title, the engine in a line, buttons
function head(model, p, listen) {
  const head = make("div", "bp-head");
  p.tools = make("span", "bp-tools");
  p.tools.append(button("", "random example", "put an example into the box", () => {
    const others = model.get("examples").filter(x => x !== p.box.value);
    p.edit?.();
    p.put(others[Math.floor(Math.random() * others.length)] ?? p.box.value);
  }));
  p.about = make("span", "bp-about", model.get("about"));
  listen(["about"], () => { p.about.textContent = model.get("about") });
  head.append(make("span", "bp-title", model.get("title")), p.about, p.tools);
  return head;
}

// the box to type in, and the trait that holds what stands in it
function typing(model, p, listen) {
  const box = make("textarea", "bp-text");
  let timer;
  p.box = box;
  box.value = model.get("text");
  box.spellcheck = false;
  box.rows = 2;
  box.addEventListener("input", () => {
    grow(box);
    clearTimeout(timer);
    timer = setTimeout(() => save(model, {text: box.value}), 250);
  });
  listen(["text"], () => {
    const text = model.get("text");
    if (box.value === text || box.value && document.activeElement === box) return;
    box.value = text;
    grow(box);
  });
  p.put = text => {
    typed(box, text);
    clearTimeout(timer);
    save(model, {text});
    grow(box);
  };
  p.send = (what, ...args) => {
    clearTimeout(timer);
    const settings = Object.fromEntries([...Object.keys(TRAITS), "seed"].map(k => [k, model.get(k)]));
    model.send({do: what, settings, args});
  };
  p.onCtrlEnter = () => box.addEventListener("keydown", e => {
    if (e.key !== "Enter" || !withCtrl(e)) return;
    e.preventDefault();
    p.go();
  });
}

// of HTML what can neither run nor load anything: boxes, tables and text, with inline styles
const DRAWN = new Set("B BR DETAILS DIV EM PRE SMALL SPAN SUMMARY TABLE TBODY TD TH THEAD TR".split(" "));

function drawn(html, place) {
  const copy = (from, to) => {
    for (const child of from.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) to.append(child.data);
      if (!DRAWN.has(child.tagName)) continue;
      const own = make(child.tagName.toLowerCase());
      for (const name of ["style", "title", "open"]) {
        const value = child.getAttribute(name);
        if (value !== null && !/url|image|\\/i.test(name === "style" ? value : "")) own.setAttribute(name, value);
      }
      copy(child, own);
      to.append(own);
    }
  };
  copy(new DOMParser().parseFromString(html, "text/html").body, place);
}

// the engine's own picture of its plan, as `e.plan` shows it
function plan(model) {
  const plan = make("details", "bp-plan");
  const inner = make("div");
  drawn(model.get("plan"), inner);
  plan.append(make("summary", "", model.get("plan_said")), inner);
  plan.hidden = !model.get("plan");
  return plan;
}

// what is going on: buttons, the note, and the meter at the foot
function telling(model, p, listen) {
  const foot = make("div", "bp-foot");
  const bar = make("span", "bp-bar");
  const fill = make("span");
  const meter = make("span", "bp-meter");
  const words = make("span");
  p.note = make("span", "bp-note");
  p.note.setAttribute("role", "status");
  p.stale = make("span", "bp-stale", "not in the saved notebook: run the cell again");
  p.stale.hidden = true;
  p.stale.title = "the page was reloaded, and its old outputs take no new versions";
  bar.title = "share of the memory limit in use";
  bar.append(fill);
  meter.append(words);
  foot.append(bar, meter, p.stale);
  p.tell = () => {
    const busy = running(model);
    const stopping = model.get("state") === "stopping";
    const {words: said, share} = model.get("meter");
    p.root.classList.toggle("bp-running", busy);
    p.root.setAttribute("aria-busy", busy);
    p.ask.hidden = busy;
    p.stop.hidden = !busy;
    p.stop.disabled = stopping;
    p.stop.textContent = stopping ? "stopping" : "Stop";
    p.note.textContent = model.get("note");
    p.note.classList.toggle("bp-problem", model.get("problem"));
    words.textContent = said.join(" · ");
    bar.hidden = share === null || share === undefined;
    fill.style.width = `${Math.min(100, 100 * share)}%`;
  };
  listen(["state", "note", "problem", "meter"], p.tell);
  return foot;
}

function frame(model, listen) {
  const p = {root: make("div", "bmlab-panel")};
  typing(model, p, listen);
  p.ask = button("ask", "", "", () => {
    p.box.focus();
    p.go();
  });
  p.stop = stopButton(() => {
    p.box.focus();
    p.send("stop");
  });
  p.parts = {
    head: head(model, p, listen), foot: telling(model, p, listen), plan: plan(model), sliders: sliders(model, listen),
  };
  return p;
}

// Tells the kernel when a record is due, and says where one did not arrive: each has a number, and the output that
// holds it must come to have a child of that number
function recording(model, p, listen) {
  const record = () => {
    if (!p.box.composing) model.send({record: true});
  };
  const number = e => Number(/bmlab-at-(\d+)/.exec(e.className)?.[1]);
  const arrived = m => {
    if (m.recorded === undefined) return;
    setTimeout(() => {
      const place = p.root.parentElement;
      const here = place?.className.startsWith("bmlab-pick-");
      // (one that came in the meantime is as good)
      const numbers = here ? [...place.querySelectorAll("[class*=bmlab-at-]")].map(number) : [];
      p.stale.hidden = !here || numbers.some(n => n >= m.recorded);
    }, 800);
  };
  model.on("msg:custom", arrived);
  listen(["state", "score"], () => {
    if (!running(model)) record();
  });
  p.box.addEventListener("compositionstart", () => { p.box.composing = true });
  p.box.addEventListener("compositionend", () => {
    p.box.composing = false;
    record();
  });
  return {record, stop: () => model.off("msg:custom", arrived)};
}

// a view: the frame with a body in it, and the listeners that go when it goes
function build(model) {
  const heard = [];
  const listen = (traits, call) => traits.forEach(t => {
    model.on(`change:${t}`, call);
    heard.push([t, call]);
  });
  const p = frame(model, listen);
  const body = BODIES[model.get("kind")](model, p, listen);
  const tops = new Map();
  p.root.append(p.parts.head, body, p.note, p.parts.sliders, p.parts.foot, p.parts.plan);
  p.tell();
  const {record, stop} = recording(model, p, listen);
  p.root.addEventListener("keydown", e => {
    if (e.key === "Escape" && running(model)) {
      p.send("stop");
      e.preventDefault();
    }
    // a letter typed here would be a command of the notebook; Ctrl+S and the like go on
    if (!withCtrl(e) || e.key === "Enter" || "acvxyz".includes(e.key.toLowerCase())) e.stopPropagation();
  });
  p.root.addEventListener("scroll", e => tops.set(e.target, e.target.scrollTop), true);
  const kept = keep(p.root, () => {
    save(model, {text: p.box.value});
    record();
  });
  const back = () => {
    p.stale.hidden = true;
    for (const [e, top] of tops) e.scrollTop = top;
    grow(p.box);
    kept.focus();
  };
  requestAnimationFrame(() => grow(p.box));
  const leave = () => {
    stop();
    heard.forEach(([t, call]) => model.off(`change:${t}`, call));
  };
  return {root: p.root, back, stop: leave, freeze: true};
}
