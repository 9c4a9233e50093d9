"The picker, the panels, the editor and the server."
from importlib import import_module

_ROOMS = dict(pick="picker", chat="panels", fill_blank="panels", story="panels", title="panels", edit="editor")


def __getattr__(name):
    "Widgets are imported where they are used."
    if name not in _ROOMS: raise AttributeError(f"module 'bmlab.app' has no attribute {name!r}")
    return getattr(import_module(f"bmlab.app.{_ROOMS[name]}"), name)
