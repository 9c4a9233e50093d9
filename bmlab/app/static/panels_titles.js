// The body for titles: a box, a button, and a list that fills while the titles are made; a click copies one.

function titlesBody(model, p, listen) {
  const body = make("div", "bp-body");
  const list = make("ol", "bp-choices bp-titles");
  const buttons = make("div", "bp-buttons");
  p.box.placeholder = "Paste a text";
  p.box.setAttribute("aria-label", "text");
  p.box.rows = 6;
  p.ask.textContent = "Find titles";
  p.ask.title = "ask for titles (Ctrl Enter)";
  list.setAttribute("aria-label", "titles");
  p.go = () => {
    if (!running(model)) p.send("ask", p.box.value);
  };
  const item = (title, i) => {
    const o = numbered("li", i, title);
    const said = o.querySelector(".bp-said");
    const copy = button("", "copy", "copy this title", () => copyBy(copy, title, said, "selected"));
    copy.disabled = running(model) || !title;
    copy.setAttribute("aria-label", `copy title ${i + 1}`);
    o.append(copy);
    return o;
  };
  const draw = () => {
    const titles = model.get("choices");
    list.hidden = !titles.length;
    list.replaceChildren(...titles.map(item));
  };
  listen(["choices", "state"], draw);
  p.onCtrlEnter();
  buttons.append(p.ask, p.stop, keys(["Ctrl Enter", "find titles"], ["Esc", "stop"]));
  body.append(p.box, buttons, list);
  draw();
  return body;
}
