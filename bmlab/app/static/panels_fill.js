// The body for blanks: the box is swapped for the same text with the answers in it; a click goes back to the blanks.

function fillBody(model, p, listen) {
  const body = make("div", "bp-body");
  const paper = make("div", "bp-paper");
  const buttons = make("div", "bp-buttons");
  p.box.placeholder = "Write a text with two underscores, __, where words are missing";
  p.box.setAttribute("aria-label", "text with blanks");
  p.box.rows = 3;
  p.ask.textContent = "Fill in";
  p.ask.title = "fill in the blanks (Ctrl Enter)";
  p.go = () => {
    if (!running(model)) p.send("ask", p.box.value);
  };
  const edit = button("", "edit", "back to the text with its blanks", () => {
    p.edit();
    p.box.focus();
  });
  const keep = button("", "keep", "make the answers a part of the text", () => {
    const text = joined(model.get("asked"), model.get("answers"));
    p.edit();
    p.put(text);
  });
  p.edit = () => {
    if (running(model)) p.send("stop");
    save(model, {asked: ""});
    draw();
  };
  const draw = () => {
    const asked = model.get("asked");
    const answers = model.get("answers");
    const busy = running(model);
    const shown = asked !== "";
    const at = busy ? Math.max(0, answers.findLastIndex(a => a)) : -1;
    p.box.hidden = shown;
    for (const e of [paper, edit, keep]) e.hidden = !shown;
    keep.disabled = busy;
    if (!shown) return grow(p.box);
    paper.replaceChildren(...filledIn(asked, answers, (a, i) => {
      const number = make("sup", "", String(i + 1));
      number.setAttribute("aria-hidden", "true");
      a.classList.toggle("bp-now", i === at);
      return [a, number];
    }));
  };
  listen(["asked", "answers", "state"], draw);
  paper.tabIndex = 0;
  paper.setAttribute("role", "region");
  paper.setAttribute("aria-label", "filled text");
  paper.title = "click to edit";
  paper.addEventListener("click", () => {
    if (getSelection().isCollapsed && !running(model)) edit.click();
  });
  paper.addEventListener("keydown", e => {
    if (e.key !== "Enter") return;
    e.preventDefault();
    if (withCtrl(e)) p.go();
    else edit.click();
  });
  p.onCtrlEnter();
  p.stop.addEventListener("click", () => paper.focus());
  buttons.append(p.ask, p.stop, edit, keep, keys(["__", "a blank"], ["Ctrl Enter", "fill in"], ["Esc", "stop"]));
  body.append(p.box, paper, buttons);
  draw();
  return body;
}
