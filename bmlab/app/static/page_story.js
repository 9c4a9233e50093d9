// The tab for a story: three continuations below the text, of which one is taken, or none.

function storyTab() {
  let choices = [];
  const close = () => {
    t.stop();
    choices = [];
    offered.draw();
  };
  const take = i => {
    const choice = choices[i];
    close();
    typed(t.box, continued(t.box.value, choice));
    t.box.setSelectionRange(t.box.value.length, t.box.value.length);
  };
  const t = tab("story", "Continue", "ask for continuations (Tab)", async (_, signal, count) => {
    const mine = ["", "", ""];
    choices = mine;
    offered.first();
    offered.draw();
    t.box.focus();
    const body = {...settings(), prompt: t.box.value.trimEnd(), n: 3, stream_options: {include_usage: true}};
    const each = o => {
      if (o.usage) count(o.usage);
      const c = o.choices[0];
      if (!c?.text) return;
      mine[c.index] += c.text;
      count();
      if (choices === mine) offered.draw();
    };
    try {
      await streamed("/v1/completions", body, each, signal);
    } finally {
      if (choices === mine && !mine.some(x => x)) close();
    }
  });
  const written = () => t.box.value.trim() !== "";
  t.enter = () => {
    if (written()) t.go();
  };
  const offered = offers({
    box: t.box, list: $("#story .list"), ask: t.ask, id: "story", choices: () => choices, busy: () => t.busy,
    wants: written, go: () => t.enter(), take, close,
  });
  t.row.append(storyKeys());
  offered.draw();
}
