"Headless Chromium, and a JupyterLab of its own to open a notebook in"
import contextlib, json, os, re, shutil, subprocess, sys, tempfile, threading, time, urllib.request
from pathlib import Path

import pytest

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
if CHROMIUM is None and os.environ.get("BROWSER") == "required":
    raise RuntimeError("BROWSER=required, and no Chromium is on the PATH: apt-get install chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
expect.set_options(timeout=30_000)          # a bound for what never comes, not for how fast a busy machine is

FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync
           --disable-default-apps --disable-extensions --metrics-recording-only --disable-dev-shm-usage""".split()


# what a record does to the panel around an element
REDRAWN = """async e => {
  const place = e.closest(".bmlab-panel, .bmlab-picker").parentElement, fresh = place.cloneNode(false);
  fresh.append(...[...place.children].filter(c => !c.contains(e)).map(c => c.cloneNode(true)));
  place.replaceWith(fresh);
  await new Promise(done => queueMicrotask(() => queueMicrotask(done)));
}"""


@contextlib.contextmanager
def jupyterlab(folder):
    """A server of its own, with configuration, data and workspaces in throw-away folders; yields its address and its
    token"""
    home = Path(tempfile.mkdtemp())
    settings = home / "settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    env = dict(
        os.environ,
        JUPYTER_CONFIG_DIR=str(home / "config"),
        JUPYTER_DATA_DIR=str(home / "data"),
        JUPYTER_RUNTIME_DIR=str(home / "run"),
        JUPYTERLAB_SETTINGS_DIR=str(home / "settings"),
        JUPYTERLAB_WORKSPACES_DIR=str(home / "workspaces"),
        IPYTHONDIR=str(home / "ipython"),
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(Path(__file__).resolve().parents[2]),
    )
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--ip=127.0.0.1",
        "--port=0",
        "--allow-root",
        f"--ServerApp.root_dir={folder}",
    ]
    server = subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=folder
    )
    try:
        found = next(
            (m for line in server.stderr if (m := re.search(r"(http://127\.0\.0\.1:\d+)/lab\?token=(\w+)", line))), None
        )
        assert found, "JupyterLab did not start"
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield found[1], found[2]
    finally:
        server.terminate()
        try: server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(home, ignore_errors=True)


class Lab:
    "A notebook open in a browser"
    def __init__(self, page, url, token):
        self.page, self.url, self.token, self.errors = page, url, token, []
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: self.errors.append(str(e)))

    def open(self):
        self.page.goto(f"{self.url}/lab/tree/t.ipynb?reset&token={self.token}")
        self.page.get_by_text("| Idle").wait_for(timeout=60_000)            # an earlier key press is swallowed
        return self

    def cell(self, i): return self.page.locator(".jp-Notebook .jp-Cell").nth(i)

    def run(self, i, source=None):
        "Run one cell and wait for its number; the text that it prints"
        prompt = self.cell(i).locator(".jp-InputPrompt")
        before = prompt.inner_text()
        self.cell(i).locator(".cm-content").click()
        if source is not None:
            self.page.keyboard.press("Control+A")
            self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")
        old = "".join(c for c in before if c.isdigit()) or "x"
        expect(prompt).to_have_text(re.compile(rf"\[(?!{old}\])\d+\]"), timeout=60_000)
        return self.cell(i).locator(".jp-OutputArea-output").all_inner_texts() if i == 3 else None

    def ask(self, expression): return "".join(self.run(3, f"print({expression})")).strip()

    @contextlib.contextmanager
    def working(self):
        "Cell 3 runs as long as the body does"
        end, prompt = self.notebook.with_name("end"), self.cell(3).locator(".jp-InputPrompt")
        end.unlink(missing_ok=True)
        self.cell(3).locator(".cm-content").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(
            "import pathlib, time; print(any(pathlib.Path('end').exists() or time.sleep(0.05) for _ in range(2400)))"
        )
        self.page.keyboard.press("Control+Enter")
        expect(prompt).to_have_text("[*]:")
        try:
            yield
            assert prompt.inner_text() == "[*]:"
        finally: end.touch()
        expect(prompt).to_have_text(re.compile(r"\[\d+\]"))

    @property
    def picker(self): return self.page.locator(".bmlab-picker").first

    def row(self, name): return self.picker.locator(f'[data-name="{name}"]')

    def pick(self, name): self.row(name).locator(".bm-box").click()

    def menu(self, *names):
        self.page.locator(".lm-MenuBar-itemLabel", has_text=names[0]).first.click()
        for n in names[1:]: self.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{n}$")).last.click()

    def save(self):
        self.menu("File", "Save Notebook")
        self.page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")

    def recorded(self, i, text):
        "Wait until the record in the output of a cell, which the panel hides, holds a text"
        expect(
            self.cell(i).locator("[class^=bmlab-pick-] > :not(.bmlab-panel)").filter(has_text=text).first
        ).to_be_attached()

    def saved(self, text):
        "The saved notebook, once it holds a text: the server writes it while the page goes on"
        end = time.monotonic() + 20
        while (
            text not in (found := self.notebook.read_text(encoding="utf-8"))
            or not found.endswith("}\n")
            and not found.endswith("}")
        ):
            assert time.monotonic() < end, f"{text!r} was not saved"
            self.page.wait_for_timeout(50)
        return found

    def api(self, method, path):
        request = urllib.request.Request(
            f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request) as answer: body = answer.read()
        return json.loads(body) if body else None


@contextlib.contextmanager
def opened(cells, lab=Lab, width=1440, height=1000):
    "A notebook with these cells, open in JupyterLab in a browser; `notebook` is its file"
    folder = Path(tempfile.mkdtemp())
    cell = lambda i, s: {
        "cell_type": "code",
        "id": f"cell-{i}",
        "metadata": {},
        "source": s,
        "outputs": [],
        "execution_count": None,
    }
    spec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    (folder / "t.ipynb").write_text(
        json.dumps(
            {
                "cells": [cell(i, s) for i, s in enumerate(cells)],
                "metadata": {"kernelspec": spec},
                "nbformat": 4,
                "nbformat_minor": 5,
            }
        )
    )
    with jupyterlab(folder) as (url, token), playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_context(viewport={"width": width, "height": height}).new_page()
        page.set_default_timeout(30_000)
        it = lab(page, url, token).open()
        it.notebook = folder / "t.ipynb"
        yield it
        browser.close()
    shutil.rmtree(folder, ignore_errors=True)


def shot(lab, name):
    "A picture among the artefacts"
    folder = Path(os.environ.get("BMLAB_ARTEFACTS", Path(__file__).resolve().parents[1] / "artefacts"))
    folder.mkdir(exist_ok=True)
    lab.page.screenshot(path=folder / f"{name}.png")
