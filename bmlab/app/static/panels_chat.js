// The body of a chat: a log of turns, and a line to type in. While the model writes, only the last turn is drawn again.

function chatBody(model, p, listen) {
  const body = make("div", "bp-body");
  const log = make("div", "bp-log");
  const line = make("div", "bp-line");
  const buttons = make("div", "bp-buttons");
  let live = null;                                                 // the turn that is being written
  log.setAttribute("role", "log");
  log.setAttribute("aria-label", "conversation");
  log.tabIndex = 0;
  p.box.placeholder = "Ask something";
  p.box.rows = 1;
  p.box.setAttribute("aria-label", "message");
  p.ask.textContent = "Send";
  p.ask.title = "send the message (Enter)";
  p.go = () => {
    const text = p.box.value;
    if (!text.trim() || running(model)) return;
    p.box.value = "";
    grow(p.box);
    p.send("ask", text);
    save(model, {text: ""});
  };
  const clear = button("", "clear", "begin a new conversation", () => {
    p.send("clear");
    p.box.focus();
  });
  const again = button("again", "another answer", "ask the same again", () => {
    p.box.focus();
    p.send("again");
  });
  const all = () => {
    const turns = model.get("turns");
    const busy = running(model);
    following(log, () => {
      log.replaceChildren(...turns.map(turn));
      live = null;
      if (busy) {
        live = turn({role: "assistant", content: model.get("live")});
        live.classList.add("bp-live");
        log.append(live);
      } else if (turns.length && turns.at(-1).role === "assistant") log.append(again);
      log.hidden = !turns.length;
      clear.disabled = busy || !turns.length;
    }, busy && !model.get("live"));
  };
  listen(["turns", "state"], all);
  listen(["live"], () => {
    if (!live) return;
    following(log, () => live.querySelector(".bp-said").replaceChildren(prose(model.get("live"))));
  });
  p.box.addEventListener("keydown", e => {
    if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
    e.preventDefault();
    p.go();
  });
  model.on("msg:custom", m => {                                    // a message that could not be answered comes back
    if (m.draft === undefined || p.box.value.startsWith(m.draft)) return;
    p.put(m.draft + (p.box.value && `\n${p.box.value}`));
  });
  p.tools.append(clear);
  buttons.append(p.ask, p.stop);
  line.append(p.box, buttons);
  body.append(log, line, keys(["Enter", "send"], ["Shift Enter", "new line"], ["Esc", "stop"]));
  all();
  requestAnimationFrame(() => { log.scrollTop = log.scrollHeight });
  return body;
}
