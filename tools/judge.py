"""How notebooks and tutorials are judged: nbval runs each once and compares what comes with what is stored.

pytest --nbval nbs tutorials             a stored output that is not what comes is a failure
pytest --store nbs/30_delta              stores what comes instead (`make outputs NB=nbs/30_delta`)
pytest --nbval --slow-cells nbs/…        runs the cells marked `#| slow`, too (`make test-slow`)

Text is compared exactly, numbers that are no integers to three digits or to the cell's own `#| tolerance: 0.1`
(relative), pictures by presence and size; times, rates, addresses and paths are not (tests/nbval-sanitize.cfg), nor is
a cell that says `# NBVAL_IGNORE_OUTPUT`. Cells for a GPU (`#| cuda`) do not run, and keep the record that they show.
A kernel is forked by a server that has imported torch already, in half a second.
"""
import base64, functools, importlib.util, itertools, json, os, re, struct, tempfile, time, warnings
from pathlib import Path

import nbformat, nbval.kernel, nbval.plugin
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import local_provisioner

import tidy

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = "notest", "cuda", "slow"                              # (tst_flags of settings.ini)
NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
LONG = ["20_cook", "90_story", "36_bee", "21_staircase", "45_chat", "03_data", "12_loading", "11_forkserver", "04_cost"]
LARGE = 100 << 10                                                # bytes of an output that a reader waits for
MINUTES = 15                                                     # that a cell may take
SECONDS = 300                                                    # that a cell may wait for what it printed


# ---- kernels --------------------------------------------------------------------------------------------------------
# what every notebook imports before its own first line, and the variables that a kernel sets: with these from the
# start, one server forks the kernels and what they fork in turn
IMPORTED = (
    "IPython ipykernel.ipkernel ipykernel.debugger matplotlib.pyplot ipywidgets fastcore.test "
    "transformers.models.llama.modeling_llama torch._inductor.compile_fx bmlab.all"
)
SET = {
    "BMLAB_AHEAD": IMPORTED, "MPLBACKEND": "module://matplotlib_inline.backend_inline", "TERM": "xterm-color",
    "CLICOLOR": "1", "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "PAGER": "cat", "GIT_PAGER": "cat",
    "PYDEVD_USE_FRAME_EVAL": "NO",
}
KERNEL = """
import os
os.setsid()
import pandas                # imported ahead, where there was no notebook yet: the widths that it takes in one
pandas.set_option("display.max_columns", 20)
from ipykernel.kernelapp import launch_new_instance
launch_new_instance()
"""


COUNT = itertools.count()


@functools.cache
def folder():
    "Where this process's kernels listen, and where the last one's own words go"
    # (among the servers, where a suite has a folder for them: it is gone with them)
    place = os.environ.get("BMLAB_SERVERS")
    return tempfile.TemporaryDirectory(prefix="kernels-", dir=place, ignore_cleanup_errors=True)


def log(): return Path(folder().name) / "log"


def forked(program, args=(), cwd=None, env=None):
    "A process from the server that forks kernels"
    return forkserver().start_process(program, args, log=log(), cwd=cwd, env={**(env or os.environ), **SET})


def kernel_manager(**options):
    "Its kernel listens at files: a free port may be somebody else's by the time that the kernel takes it"
    return KernelManager(transport="ipc", ip=f"{folder().name}/{next(COUNT)}", **options)


def start_new_kernel(*args, **kwargs):
    "nbval's own, once more if the kernel does not come to an answer; says what that one said"
    try: return STARTS(*args, **kwargs)
    except RuntimeError as e: warnings.warn(f"{e}; another is started. {log().read_text(errors='replace')[-2000:]}")
    return STARTS(*args, **kwargs)


STARTS = nbval.kernel.start_new_kernel


def get_message(kernel, *args, **kwargs):
    "nbval's own; what is shown is what a picture has become, where it was drawn anew in its place"
    message = HEARD(kernel, *args, **kwargs)
    content, pictures = message.get("content", {}), kernel.__dict__.setdefault("pictures", {})
    place = content.get("transient", {}).get("display_id")
    if place is None or "image/png" not in content.get("data", {}): return message
    if message["msg_type"] == "update_display_data":
        if place in pictures: pictures[place].update(content["data"])
    else: content["data"] = pictures[place] = nbformat.from_dict(content["data"])         # (kept by nbval as it is)
    return message


HEARD = nbval.kernel.RunningKernel.get_message


@functools.cache
def forkserver():
    "bmlab's module by its file: its package would import torch here, too"
    spec = importlib.util.spec_from_file_location("forkserver", ROOT / "bmlab/train/forkserver.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def launch_kernel(command, cwd=None, env=None, **_):
    "A kernel in a forked process, in place of a new interpreter"
    process = forked(KERNEL, command[command.index("-f"):], cwd, env)
    process.stdin = process.stdout = process.stderr = None
    while process.poll() is None and os.getpgid(process.pid) != process.pid: time.sleep(.001)
    return process


# ---- comparison -----------------------------------------------------------------------------------------------------
def parts(text):
    "What a text says between its numbers, and the numbers"
    return NUMBER.split(text), NUMBER.findall(text)


def value(number): return float(number.replace(",", "").replace("−", "-"))


def near(a, b, tolerance):
    "Two numbers as they are written: integers are the same, others nearly so"
    if a == b: return True
    if not set(".e") & set(a + b): return False
    digits = max(len(n.partition(".")[2].partition("e")[0]) for n in (a, b))
    last = 10. ** -digits if "e" not in a + b else 0.
    return abs(value(a) - value(b)) <= 1.01 * max(tolerance * max(abs(value(a)), abs(value(b))), last)


def same_text(stored, come, tolerance=.005):
    "Do two outputs say the same? White space that lays out columns does not count"
    if stored == come: return True
    (words, numbers), (others, theirs) = parts(stored), parts(come)
    words, others = ([re.sub(r"[\s─-]+", " ", w) for w in side] for side in (words, others))
    return words == others and all(near(a, b, tolerance) for a, b in zip(numbers, theirs))


def size_of(png):
    "(width, height) of a picture"
    return struct.unpack(">II", base64.b64decode(png)[16:24])


def shown_size(output):
    "(width, height) at which the picture of an output is shown: its own, unless the output says that it is sharper"
    size = tidy.shown_at(output).get("image/png", {})
    own = size_of(output["data"]["image/png"])
    return size.get("width", own[0]), size.get("height", own[1])


def same_size(stored, come): return all(abs(a - b) <= .1 * max(a, b) for a, b in zip(stored, come))


def told(cell, outputs):
    "{kind: what the outputs say}, streams and kinds of data apart; text that only stands in for HTML is left out"
    found = {}
    for o in outputs:
        data = {o["name"]: o["text"]} if o["output_type"] == "stream" else o.get("data", {})
        for kind, said in data.items():
            shown = kind != "text/plain" or "text/html" not in data
            if shown and kind not in cell.parent.skip_compare: found.setdefault(kind, []).append(cell.sanitize(said))
    return found


def compare_outputs(cell, come, stored, skip_compare=None):
    "In the place of nbval's own: the first difference goes to comparison_traceback"
    cell.comparison_traceback = []
    stated = re.search(r"^#\|\s*tolerance:\s*(\S+)", cell.cell.source, re.M)
    tolerance = float(stated[1]) if stated else .005
    come, stored = ([o for o in map(tidy.clean, side) if o] for side in (come, stored))
    sizes = [[shown_size(o) for o in side if "image/png" in o.get("data", {})] for side in (stored, come)]
    if len(sizes[0]) != len(sizes[1]) or not all(map(same_size, *sizes)):
        cell.comparison_traceback.append(f"pictures stored {sizes[0]}, come {sizes[1]}")
        return False
    stored, come = told(cell, stored), told(cell, come)
    if stored.keys() != come.keys():
        cell.comparison_traceback.append(f"stored {sorted(stored)}, come {sorted(come)}: {come}")
        return False
    for kind in stored:
        a, b = "\n".join(stored[kind]), "\n".join(come[kind])
        if not same_text(a, b, tolerance):
            cell.format_output_compare(kind, a, b)
            return False
    return True


# ---- storing --------------------------------------------------------------------------------------------------------
def store(notebook):
    "Write what the cells of an nbval file gave into it; cells that did not run or that failed keep what they have"
    path = notebook.path
    nb = json.loads(path.read_text(encoding="utf-8"))
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    for cell, item in zip(code, notebook.ran):
        came = item.test_outputs
        if came is None or any(o["output_type"] == "error" for o in came): continue
        cell["outputs"] = json.loads(json.dumps(came))
        size = len(json.dumps(cell["outputs"]))
        if size > LARGE: print(f"{path.name}: cell {item.cell_num} shows {size >> 10} kB")
    path.write_text(tidy.dump(tidy.tidy(nb, tidy.counted(path))), encoding="utf-8")


# ---- pytest ---------------------------------------------------------------------------------------------------------
def pytest_addoption(parser):
    parser.addoption("--store", action="store_true", help="store what notebooks give, instead of comparing it")
    parser.addoption("--slow-cells", action="store_true", help="run the cells marked slow, too")


def pytest_configure(config):
    option = config.option
    option.nbval |= option.store
    option.nbval_current_env, option.nbval_cell_timeout = True, MINUTES * 60
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(ROOT / "tests/nbval-sanitize.cfg")
    local_provisioner.launch_kernel = launch_kernel
    nbval.kernel.KernelManager, nbval.kernel.start_new_kernel = kernel_manager, start_new_kernel
    nbval.kernel.RunningKernel.get_message = get_message
    nbval.plugin.IPyNbCell.compare_outputs = compare_outputs


def pytest_collection_modifyitems(config, items):
    left_out = set(LEFT_OUT) - ({"slow"} if config.option.slow_cells else set())
    for item in (i for i in items if isinstance(i, nbval.plugin.IPyNbCell)):
        flags = set(re.findall(r"^#\|\s*(\w+)", item.cell.source, re.M))
        if flags & left_out: item.options["skip"] = True
        if config.option.store: item.options["check"] = False
        item.output_timeout = SECONDS
        if item.cell.execution_count is None: item.cell.execution_count = 0      # (compare it all the same)
        if not hasattr(item.parent, "ran"): item.parent.ran = []
        item.parent.ran.append(item)
    # the longest pages begin first: none of them is left for the end, alone on one core
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_runtest_teardown(item, nextitem):
    "After the last cell of a notebook that ran: store"
    if not isinstance(item, nbval.plugin.IPyNbCell): return
    last = nextitem is None or nextitem.parent is not item.parent
    if last and item.config.option.store: store(item.parent)
