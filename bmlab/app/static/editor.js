// The editor: widgets that Jupyter draws, put into the place of the record.

function build(model) {
  const root = make("div", "bmlab-editor");
  let view = null;
  const attach = () => {
    if (!view || !root.isConnected || view.luminoWidget.isAttached) return;
    view.luminoWidget.constructor.attach(view.luminoWidget, root);
  };
  const drawn = async () => {
    view = await model.widget_manager.create_view(await model.widget_manager.get_model(model.get("inner")));
    requestAnimationFrame(attach);
  };
  const kept = keep(root, () => model.send({record: true}));
  root.dataset.lmSuppressShortcuts = "true";
  drawn();
  const back = () => {
    attach();
    kept.focus();
  };
  return {root, back, stop: () => view?.remove()};
}
