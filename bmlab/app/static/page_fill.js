// The tab for blanks: the box is swapped for the same text with the answers in it.

function fillTab() {
  const paper = $("#fill .paper");
  let asked = "";
  let answers = [];
  const draw = () => {
    const shown = asked !== "";
    t.box.hidden = shown;
    for (const e of [paper, edit, keep]) e.hidden = !shown;
    if (shown) paper.replaceChildren(...filledIn(asked, answers));
  };
  const t = tab("fill", "Fill in", "fill in the blanks (Ctrl Enter)", async (_, signal, count) => {
    asked = t.box.value.replace(/_{2,}/g, "__");
    answers = [];
    keep.disabled = true;
    draw();
    paper.focus();
    const each = o => {
      if (o.usage) {
        count(o.usage);
        answers = o.answers;
      } else {
        answers[o.blank] = (answers[o.blank] ?? "") + o.text;
        count();
      }
      draw();
    };
    try {
      await streamed("/v1/fill", {...settings(), text: asked}, each, signal);
    } finally {
      keep.disabled = false;
      if (!answers.length) back();
    }
  });
  const back = () => {
    asked = "";
    draw();
    t.box.focus();
  };
  const edit = button("", "edit", "back to the text with its blanks", () => {
    t.stop();
    back();
  });
  const keep = button("", "keep", "make the answers a part of the text", () => {
    const text = joined(asked, answers);
    edit.click();
    typed(t.box, text);
  });
  t.enter = () => {
    if (/_{2,}/.test(t.box.value)) t.go();
    else t.say("There is no blank in the text: write two underscores, __, where words are missing.", true);
  };
  t.row.append(edit, keep, keys(["__", "a blank"], ["Ctrl Enter", "fill in"], ["Esc", "stop"]));
  draw();
}
