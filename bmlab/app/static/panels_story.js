// The body of a story: the continuations stream into a list below the text, and the focus never leaves the text.

function storyBody(model, p, listen) {
  const body = make("div", "bp-body");
  const list = make("div", "bp-choices");
  const buttons = make("div", "bp-buttons");
  const id = `bp-${model.get("token")}`;
  const choices = () => model.get("choices");
  p.box.placeholder = "Begin a story, then press Tab";
  p.box.rows = 5;
  p.box.setAttribute("aria-label", "story");
  p.box.setAttribute("aria-controls", id);
  p.box.setAttribute("aria-autocomplete", "list");
  list.id = id;
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "continuations");
  p.ask.title = "ask for continuations (Tab)";
  p.go = () => {
    if (running(model) || !p.box.value.trim()) return;
    offered.first();
    p.send("ask", p.box.value);
  };
  const close = () => {
    if (!running(model) && !choices().length) return;
    model.set("choices", []);
    p.send("dismiss");
  };
  const take = i => {
    const choice = choices()[i];
    if (!choice) return;
    p.put(continued(p.box.value, choice));
    p.box.setSelectionRange(p.box.value.length, p.box.value.length);
    p.box.scrollTop = p.box.scrollHeight;
    p.send("dismiss");
    model.set("choices", []);
  };
  const busy = () => running(model);
  const offered = offers({
    box: p.box, list, ask: p.ask, id, choices, busy, wants: () => true, go: () => p.go(), take, close,
  });
  p.edit = close;
  listen(["choices", "state"], offered.draw);
  buttons.append(p.ask, p.stop, storyKeys());
  body.append(p.box, list, buttons);
  offered.draw();
  return body;
}
