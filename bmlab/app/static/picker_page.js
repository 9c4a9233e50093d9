// The picker on a page of its own: what anywidget's model does in a notebook, over HTTP.

const KEY = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";

async function ask(path, body) {
  const headers = {"Authorization": `Bearer ${KEY}`, "Content-Type": "application/json"};
  const answer = await fetch(path, {method: "POST", headers, body: JSON.stringify(body ?? {})});
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error?.message ?? answer.statusText);
  return said;
}

function modelOf(state, told) {
  const listeners = new Map();
  const changed = new Set();
  let last = Promise.resolve();
  const take = news => {
    for (const [k, v] of Object.entries(news)) {
      if (changed.has(k) || JSON.stringify(state[k]) === JSON.stringify(v)) continue;
      state[k] = v;
      listeners.get(`change:${k}`)?.forEach(f => f());
    }
  };
  return {
    get: k => state[k],
    set(k, v) {
      state[k] = v;
      changed.add(k);
      listeners.get(`change:${k}`)?.forEach(f => f());
    },
    save_changes() {
      const sent = Object.fromEntries([...changed].map(k => [k, state[k]]));
      changed.clear();
      last = last.then(() => ask("/change", sent)).then(take).catch(e => told(e.message));
    },
    on(name, f) { listeners.set(name, (listeners.get(name) ?? new Set()).add(f)) },
    off(name, f) { listeners.get(name)?.delete(f) },
    send() {},
    settled: () => last,
  };
}

async function begin() {
  const said = document.getElementById("said");
  const done = document.getElementById("done");
  const told = text => { said.textContent = text };
  try {
    const model = modelOf(await ask("/state"), told);
    const view = build(model);
    document.getElementById("picker").append(view.root);
    view.back();
    done.disabled = false;
    done.addEventListener("click", async () => {
      done.disabled = true;
      await model.settled();
      const {pattern} = await ask("/done");
      view.root.inert = true;
      told(`Picked: ${JSON.stringify(pattern)}. You can close this page.`);
    });
  } catch (e) { told(e.message) }
}

begin();
