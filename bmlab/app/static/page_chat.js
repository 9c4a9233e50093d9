// The tab to talk in: the whole conversation is sent each time; what no longer fits is left out, the oldest first.
// Conversations stay in the browser, each under a key of its own, so that two windows do not write over each other.

const TALK = "talk:";
const MOST = 50;                                                   // conversations that are kept

function kept() {
  let names = [];
  try {
    names = Object.keys(localStorage).filter(k => k.startsWith(TALK));
  } catch {
    return [];
  }
  const read = name => {
    try {
      const {turns, system, at} = JSON.parse(store(localStorage, name));
      return Array.isArray(turns) && turns.length ? {name, turns, system: system || "", at: at || 0} : null;
    } catch {
      return null;
    }
  };
  return names.map(read).filter(x => x).sort((a, b) => b.at - a.at);
}

function forget(name) {
  try {
    localStorage.removeItem(name);
  } catch {                                                        // (storage is forbidden: there is nothing)
  }
}

function titled({turns}) {
  const text = (turns[0]?.content ?? "").trim().replace(/\s+/g, " ");
  return text.length > 48 ? `${text.slice(0, 47)}…` : text || "(empty)";
}

function chatTab() {
  const log = $("#chat .log");
  const system = $("#system textarea");
  const turns = [];
  let name = "";                                                   // of this conversation in the storage
  const select = make("select");
  select.ariaLabel = "conversations";
  const fill = () => {
    const all = kept();
    const here = make("option", "", "new conversation");
    here.value = "";
    const others = all.map(t => {
      const option = make("option", "", titled(t));
      option.value = t.name;
      return option;
    });
    select.replaceChildren(...(name ? [] : [here]), ...others);
    select.value = name;
    select.hidden = !all.length;
  };
  const keep = () => {
    if (!turns.length) return;
    name ||= `${TALK}${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    store(localStorage, name, JSON.stringify({turns, system: system.value, at: Date.now()}));
    store(localStorage, "talk", name);
    for (const old of kept().slice(MOST)) forget(old.name);
  };
  const begin = (to, said = "") => {
    const talk = kept().find(t => t.name === to);
    name = talk ? to : "";
    turns.splice(0, turns.length, ...(talk?.turns ?? []));
    if (talk) system.value = talk.system;
    store(localStorage, "talk", name);
    draw();
    t.say(said);
  };
  const append = t => {
    const e = turn(t);
    log.append(e);
    log.scrollTop = log.scrollHeight;
    return e.querySelector(".said");
  };
  const draw = () => {
    log.replaceChildren();
    turns.forEach(append);
    clear.disabled = !turns.length;
    fresh.disabled = !turns.length;
    select.disabled = false;
    fill();
    again.hidden = turns.at(-1)?.role !== "assistant";
  };
  const ask = (from, each, signal) => {
    const messages = turns.slice(from).map(({role, content}) => ({role, content}));
    if (system.value.trim()) messages.unshift({role: "system", content: system.value});
    const body = {...settings(), messages, stream_options: {include_usage: true}};
    return streamed("/v1/chat/completions", body, each, signal);
  };
  const answered = async (each, signal) => {
    for (let from = 0;; from += 2) {
      try {
        await ask(from, each, signal);
        return from ? `the oldest ${from} messages no longer fit and were left out` : "";
      } catch (e) {
        if (e.code !== "context_length_exceeded" || from + 2 >= turns.length) throw e;
      }
    }
  };
  const t = tab("chat", "Send", "send the message (Enter)", async ([text], signal, count) => {
    if (text !== undefined) turns.push({role: "user", content: text});
    else turns.pop();
    draw();
    again.hidden = true;
    clear.disabled = true;
    fresh.disabled = true;
    select.disabled = true;
    const answer = {role: "assistant", content: ""};
    const said = append(answer);
    said.classList.add("live");
    const each = o => {
      if (o.usage) count(o.usage);
      const piece = o.choices[0]?.delta.content;
      if (!piece) return;
      answer.content += piece;
      following(log, () => said.replaceChildren(prose(answer.content)));
      count();
    };
    try {
      return await answered(each, signal);
    } catch (e) {
      answer.note = e.name === "AbortError" ? "stopped" : "broken off";
      throw e;
    } finally {
      if (answer.content) turns.push(answer);
      else if (text !== undefined) {                               // nothing came: the message goes back into the box
        turns.pop();
        t.box.value ||= text;
      }
      keep();
      draw();
    }
  });
  const clear = button("", "clear", "forget this conversation", () => {
    forget(name);
    begin("");
    t.box.focus();
  });
  const fresh = button("", "new", "begin a new conversation; this one stays in the list", () => {
    begin("");
    t.box.focus();
  });
  select.addEventListener("change", () => begin(select.value));
  system.addEventListener("change", keep);
  $("#chat .talks").append(select, fresh);
  const again = button("", "another answer", "ask the same again", () => {
    t.box.focus();
    t.go();
  });
  t.enter = () => {
    const text = t.box.value;
    if (t.busy || !text.trim()) return;
    t.box.value = "";
    t.go(text);
  };
  t.row.append(again, clear, keys(["Enter", "send"], ["Shift Enter", "new line"], ["Esc", "stop"]));
  t.box.addEventListener("keydown", e => {
    if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
    e.preventDefault();
    t.enter();
  });
  begin(store(localStorage, "talk"));
}
