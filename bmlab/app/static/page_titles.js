// The tab for titles: three of them, each with a button that copies it.

const INSTRUCTION = "Write a title for the text above, in a few words and on one line. Reply with the title only.";
const clean = title => title.trim().replace(/^(title:\s*)?["“„«*#\s]*/i, "").replace(/["”“»*\s]*$/, "");

function titlesTab() {
  const list = $("#title .list");
  const item = (title, i) => {
    const o = numbered("div", i, title);
    const said = o.querySelector(".said");
    const copy = button("copy", "copy", "copy this title", async () => {
      if (await copied(title, said)) copy.textContent = "copied";
    });
    o.setAttribute("role", "listitem");
    o.append(copy);
    return o;
  };
  const t = tab("title", "Find titles", "ask for titles (Ctrl Enter)", async (_, signal, count) => {
    const titles = ["", "", ""];
    const text = t.box.value.trim();
    const draw = () => {
      list.hidden = false;
      list.replaceChildren(...titles.map(clean).map(item));
    };
    const each = o => {
      if (o.usage) count(o.usage);
      const c = o.choices[0];
      const piece = c?.text ?? c?.delta?.content;
      if (!piece) return;
      titles[c.index] += piece;
      count();
      draw();
    };
    const body = {...settings(), n: 3, stop: ["\n"], stream_options: {include_usage: true}};
    const messages = [{role: "user", content: `${text}\n\n${INSTRUCTION}`}];
    draw();
    if (model.chat) await streamed("/v1/chat/completions", {...body, messages}, each, signal);
    else await streamed("/v1/completions", {...body, prompt: `${text}\n\nTitle:`}, each, signal);
  });
  t.enter = () => {
    if (t.box.value.trim()) t.go();
  };
  t.row.append(keys(["Ctrl Enter", "find titles"], ["Esc", "stop"]));
}
