// A widget's life in a notebook. Joined behind a script that has `build(model)`, which makes one view of the widget:
// {root: its element, back: call when the root was put into the page, stop: call when the view goes}.

// a saved notebook holds only the static picture; while the kernel lives, the widget is put in its place
function inhabit(model) {
  const places = document.getElementsByClassName(`bmlab-pick-${model.get("token")}`);
  const views = new Map();
  const move = place => {
    const old = [...views].find(([, v]) => v.idle);
    const view = old ? old[1] : build(model);
    if (old) views.delete(old[0]);
    view.idle = false;
    views.set(place, view);
    for (const child of place.children) child.style.display = "none";
    place.append(view.root);
    view.back();
    model.send({here: true});
  };
  const look = () => {
    for (const [place, view] of views) view.idle = !place.isConnected;
    for (const place of places) {
      if (!views.has(place)) move(place);
    }
  };
  const watch = new MutationObserver(look);
  let over = false;
  const leave = () => {
    if (over) return;
    over = true;
    watch.disconnect();
    for (const [place, view] of views) {
      view.stop();
      view.root.remove();
      for (const child of place.children) child.style.display = "";
    }
    views.clear();
  };
  // the kernel has ended: a view that knows how stays as it is, greyed; else its record is shown again
  const ended = () => {
    if (over) return;
    if (![...views.values()].every(v => v.freeze)) {
      leave();
      return;
    }
    over = true;
    watch.disconnect();
    for (const view of views.values()) freeze(view);
  };
  watch.observe(document.body, {childList: true, subtree: true});
  look();
  model.on("destroy", leave);
  model.on("comm:close", leave);
  model.on("comm_live_update", ended);
  const kernel = model.widget_manager?.kernel;
  kernel?.statusChanged?.connect((_, status) => {
    if (["restarting", "autorestarting", "terminating", "dead"].includes(status)) ended();
  });
  return leave;
}

// What is seen stays and can be copied, but nothing can be typed or clicked any more
function freeze(view) {
  if (view.root.classList.contains("bm-ended")) return;
  view.stop();
  view.root.classList.add("bm-ended");
  view.root.setAttribute("aria-busy", "false");
  for (const e of view.root.querySelectorAll("button, input, select")) e.disabled = true;
  for (const e of view.root.querySelectorAll("textarea")) e.readOnly = true;
  const said = make("div", "bm-record", "A record: the kernel behind it has ended. Run the cell again to use it.");
  said.setAttribute("role", "status");
  view.root.prepend(said);
}

// when a record is written, the element is out of the page for a moment, and the browser forgets its focus
// and a click that was pressed before and is released after
function keep(root, left, released) {
  let last = null;
  let pressed = null;
  let moved = false;
  root.addEventListener("focusin", e => { last = e.target });
  root.addEventListener("focusout", e => {
    // gone to another place at once: a record that comes now must not fetch it back
    if (e.relatedTarget && !root.contains(e.relatedTarget)) last = null;
    setTimeout(() => {
      if (!root.isConnected || root.contains(document.activeElement) || !document.hasFocus()) return;
      last = null;
      left();
    });
  });
  root.addEventListener("pointerdown", e => {
    const target = e.button ? null : e.target;
    const over = new AbortController();
    const mouse = e.pointerType === "mouse";
    pressed = target;
    moved = false;
    if (!target) return;
    const settle = e => {
      const lost = mouse && moved && pressed === target && e.type === "pointerup" && e.target === target;
      over.abort();
      pressed = null;
      if (lost) target.click();
      released?.();
    };
    // behind the browser's own click, if there is one; a tap's comes some milliseconds later, whatever was drawn anew
    const end = e => setTimeout(() => settle(e), mouse ? 0 : 50);
    for (const type of ["pointerup", "pointercancel"]) {
      window.addEventListener(type, end, {capture: true, signal: over.signal});
    }
  }, true);
  root.addEventListener("click", () => { pressed = null }, true);
  const focus = () => {
    moved = true;
    if (last?.isConnected) last.focus({preventScroll: true});
  };
  return {focus, held: () => pressed !== null};
}

export default {
  initialize({model}) {
    return model.get("token") ? inhabit(model) : undefined;
  },
  render({model, el}) {
    const view = build(model);
    el.append(view.root);
    return view.stop;
  },
};
