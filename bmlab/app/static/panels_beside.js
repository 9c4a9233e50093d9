// The body for several engines side by side: the same prompt, a column for each, and a vote.

function besideBody(model, p, listen) {
  const body = make("div", "bp-body");
  const buttons = make("div", "bp-buttons");
  const columns = make("div", "bp-columns");
  const score = make("div", "bp-score");
  const key = make("div", "bp-key");
  key.append(make("span", "bp-part2", "where they part"), make("span", "bp-part1", "not in all of them"));
  p.box.placeholder = "Ask all of them the same";
  p.box.setAttribute("aria-label", "prompt");
  p.ask.textContent = "Ask all";
  p.ask.title = "one after the other, so that each has the machine for itself (Ctrl Enter)";
  p.go = () => {
    if (!running(model)) p.send("ask", p.box.value);
  };
  const vote = (i, text, title) => {
    const b = button("vote", text, title, () => p.send("vote", i));
    b.disabled = running(model) || !model.get("awaits");
    return b;
  };
  const column = (c, i) => {
    const whole = make("section", "bp-column");
    const said = make("div", "bp-said");
    whole.setAttribute("aria-label", c.name);
    for (const [text, mark] of c.pieces) said.append(mark ? make("span", `bp-part${mark}`, text) : text);
    if (c.live) whole.classList.add("bp-live");
    const better = vote(i, "better", `${c.name} is better`);
    whole.append(make("div", "bp-who", c.name), said, make("div", "bp-mark", c.meter), better);
    return whole;
  };
  const draw = () => {
    const shown = model.get("columns");
    columns.hidden = !shown.length;
    columns.style.setProperty("--bp-n", shown.length);
    columns.replaceChildren(...shown.map(column));
    score.hidden = !shown.length;
    score.replaceChildren(vote(null, "no difference", "neither is better"), make("span", "", model.get("score")));
    key.hidden = !shown.some(c => c.pieces.some(([, mark]) => mark));
  };
  listen(["columns", "state", "score", "awaits"], draw);
  p.onCtrlEnter();
  const next = button("", "next prompt", "the next of the prompts that were given", () => p.send("next"));
  buttons.append(p.ask, p.stop, next, keys(["Ctrl Enter", "ask all"], ["Esc", "stop"]));
  body.append(p.box, buttons, columns, key, score);
  draw();
  return body;
}
