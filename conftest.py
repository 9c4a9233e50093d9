import os
from importlib.util import find_spec

os.environ.setdefault("BMLAB_MEASURE", "off")                    # plans of tests and notebooks are the same everywhere
pytest_plugins = ["judge"] if find_spec("nbval") else []         # notebooks and tutorials, where --nbval asks for them
