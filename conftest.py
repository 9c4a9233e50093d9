from importlib.util import find_spec

pytest_plugins = ["judge"] if find_spec("nbval") else []         # notebooks and tutorials, where --nbval asks for them
