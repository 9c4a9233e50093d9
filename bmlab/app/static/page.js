// The server's page. It asks the same interface as everybody: a request is a stream of events, several tabs may be at
// it at once, and an aborted fetch is a client that hangs up.

look.marks = true;
const $ = selector => document.querySelector(selector);

// a value that the browser keeps; storage may be forbidden
function store(kind, key, value) {
  try {
    if (value === undefined) return kind.getItem(key) || "";
    kind.setItem(key, value);
  } catch {
    return "";
  }
}

// ---- asking the server ----

let token = new URLSearchParams(location.hash.slice(1)).get("token") || store(sessionStorage, "token");
let model = {};
if (location.hash.includes("token=")) {
  store(sessionStorage, "token", token);
  history.replaceState(null, "", location.pathname);
}

async function fetched(path, body, signal) {
  const headers = {"Content-Type": "application/json", ...(token && {Authorization: `Bearer ${token}`})};
  const post = body && {method: "POST", body: JSON.stringify(body)};
  let answer;
  try {
    answer = await fetch(path, {...post, headers, signal});
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw Error("The server does not answer. Does it still run?");
  }
  if (answer.ok) return answer;
  const {error} = await answer.json().catch(() => ({}));
  if (answer.status === 401) $("#key").hidden = false;
  throw Object.assign(Error(error?.message ?? `The server says ${answer.status}`), {code: error?.code});
}

// `each(object)` for every event
async function streamed(path, body, each, signal) {
  const answer = await fetched(path, {...body, stream: true}, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  let ended = false;
  for (;;) {
    const {value, done} = await reader.read();
    if (done) break;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") ended = true;
      else if (event.startsWith("data: ")) {
        const obj = JSON.parse(event.slice(6));
        if (obj.error) throw Error(obj.error.message);
        each(obj);
      }
    }
  }
  if (!ended) throw Error("The connection was cut off.");
}

// ---- sampling ----

const seed = seedField();
for (const [id, first] of [["temperature", 0.7], ["top_p", 0.95], ["length", 128]]) {
  const {whole, range, show} = slider(SLIDERS[id]);
  range.id = id;
  range.addEventListener("input", () => show(Number(range.value)));
  show(first);
  $(".sliders").append(whole);
}
seed.field.id = "seed";
$(".sliders").append(seed.whole);

function settings() {
  const n = parseInt(seed.field.value);
  return {
    temperature: Number($("#temperature").value),
    top_p: Number($("#top_p").value),
    max_tokens: Number($("#length").value),
    ...(n >= 0 && {seed: n}),
    ...($("#which select").value && {model: $("#which select").value}),
  };
}

// the model itself and its adapters, which may come and go
async function listed() {
  const all = (await (await fetched("/v1/models")).json()).data;
  const select = $("#which select");
  const before = select.value || store(localStorage, "model");
  select.replaceChildren(...all.map(m => {
    const option = make("option", "", m.parent ? `${m.id} (adapter)` : m.id);
    option.value = m.id;
    return option;
  }));
  select.value = all.some(m => m.id === before) ? before : all[0].id;
  $("#which").hidden = all.length < 2;
  return all[0];
}

$("#which select").addEventListener("change", e => store(localStorage, "model", e.target.value));
addEventListener("focus", () => { if (model.id) listed().catch(() => {}) });

// ---- tabs ----

// what is said below a box: how much has come and how fast, or since when one waits
function metered(state, seconds, first, pieces, tokens) {
  const n = tokens || pieces;
  const rate = first && (n - 1) / Math.max(seconds - first, 1e-3);
  const words = [state];
  if (first) words.push(`${n} ${tokens ? "tokens" : "pieces"}`);
  if (rate > 0) words.push(`${rate.toPrecision(3)} per s`);
  if (first) words.push(`first after ${first.toFixed(2)} s`);
  else if (!state) words.push(`waiting, ${seconds.toFixed(1)} s`);
  return words.filter(x => x).join(" · ");
}

// a tab: its box, its buttons, its meter; `work(asked, signal, count)` does what the tab is for
function tab(id, ask, title, work) {
  const head = $(`#tab-${id}`);
  const meter = $(`#${id} .meter`);
  const t = {panel: $(`#${id}`), box: $(`#${id} textarea`), row: $(`#${id} .row`), busy: false};
  let aborter = null;
  t.stop = () => aborter?.abort();
  t.say = (text, bad = false) => {
    meter.textContent = text;
    meter.classList.toggle("problem", bad);
  };
  const set = busy => {
    t.busy = busy;
    t.ask.hidden = busy;
    t.end.hidden = !busy;
    t.panel.setAttribute("aria-busy", busy);
    head.toggleAttribute("data-busy", busy);
    if (t.panel.hidden || document.activeElement !== document.body) return;
    if (t.box.hidden) t.panel.focus();
    else t.box.focus();
  };
  t.go = async (...args) => {
    if (t.busy) return;
    const began = performance.now();
    const seconds = () => (performance.now() - began) / 1000;
    let pieces = 0;
    let first = 0;
    let tokens = 0;
    const said = state => t.say(metered(state, seconds(), first, pieces, tokens));
    const count = usage => {
      if (usage) tokens = usage.completion_tokens;
      else {
        pieces++;
        first ||= seconds();
      }
    };
    aborter = new AbortController();
    set(true);
    said("");
    const clock = setInterval(said, 200, "");
    try {
      said(await work(args, aborter.signal, count) || "");
    } catch (e) {
      if (e.name === "AbortError") said("stopped");
      else t.say(e.message, true);
    } finally {
      clearInterval(clock);
      aborter = null;
      set(false);
    }
  };
  t.ask = button("ask", ask, title, () => {
    t.box.focus();
    t.enter();
  });
  t.end = stopButton(() => {
    t.stop();
    t.box.focus();
  });
  t.end.hidden = true;
  t.row.prepend(t.ask, t.end);
  t.panel.addEventListener("keydown", e => {
    if (e.key === "Escape" && t.busy) t.stop();
    else if (e.key === "Enter" && withCtrl(e)) t.enter();
    else return;
    e.preventDefault();
    e.stopImmediatePropagation();
  }, true);
  return t;
}

const tabs = [...document.querySelectorAll("[role=tab]")];

function choose(chosen, focus) {
  for (const t of tabs) {
    const on = t === chosen;
    t.setAttribute("aria-selected", on);
    t.tabIndex = on ? 0 : -1;
    $(`#${t.getAttribute("aria-controls")}`).hidden = !on;
  }
  store(localStorage, "tab", chosen.id);
  if (focus) chosen.focus();
}

for (const [i, t] of tabs.entries()) {
  t.addEventListener("click", () => choose(t));
  t.addEventListener("keydown", e => {
    const to = {ArrowRight: i + 1, ArrowLeft: i - 1 + tabs.length, Home: 0, End: tabs.length - 1}[e.key];
    if (to === undefined) return;
    e.preventDefault();
    choose(tabs[to % tabs.length], true);
  });
}

// ---- colours ----

const dark = matchMedia("(prefers-color-scheme: dark)");
const themes = ["auto", "light", "dark"];
const theme = () => store(localStorage, "theme") || "auto";

function paint() {
  const system = dark.matches ? "dark" : "light";
  document.documentElement.dataset.theme = theme() === "auto" ? system : theme();
  $("#theme").textContent = `colours: ${theme()}`;
}

$("#theme").addEventListener("click", () => {
  store(localStorage, "theme", themes[(themes.indexOf(theme()) + 1) % 3]);
  paint();
});
dark.addEventListener("change", paint);
paint();

// ---- begin ----

// who is there, and what can it do?
async function enter() {
  try {
    model = await listed();
  } catch (e) {
    $("#about").textContent = e.message;
    return;
  }
  $("#key").hidden = true;
  $("#about").textContent = `${model.id} · context of ${model.max_model_len} tokens`;
  $("#length").max = Math.min(1024, model.max_model_len - 1);
  $("#length").dispatchEvent(new Event("input"));
  const mute = "This model cannot generate text.";
  const abilities = [
    ["fill", model.fill, "This model fills no blanks."],
    ["chat", model.chat, "This model has no chat template."],
    ["story", model.generates, mute],
    ["title", model.generates, mute],
  ];
  for (const [id, can, why] of abilities) {
    $(`#${id} .ask`).disabled = !can;
    if (!can) $(`#${id} .meter`).textContent = why;
  }
}

$("#key").addEventListener("submit", e => {
  e.preventDefault();
  token = $("#key input").value.trim();
  store(sessionStorage, "token", token);
  enter();
});
chatTab();
fillTab();
storyTab();
titlesTab();
choose($(`#${store(localStorage, "tab") || "tab-chat"}`) ?? tabs[0]);
enter();
