// The tab to talk in: the whole conversation is sent each time; what no longer fits is left out, the oldest first.

function chatTab() {
  const log = $("#chat .log");
  const turns = [];
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
    again.hidden = turns.at(-1)?.role !== "assistant";
  };
  const ask = (from, each, signal) => {
    const messages = turns.slice(from).map(({role, content}) => ({role, content}));
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
      draw();
    }
  });
  const clear = button("", "clear", "begin a new conversation", () => {
    turns.length = 0;
    draw();
    t.say("");
    t.box.focus();
  });
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
  draw();
}
