# Sphinx reads this; docs/build.py makes what it reads. No page may load anything from elsewhere.
import re
from configparser import ConfigParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
ini = ConfigParser(delimiters=["="])
ini.read(HERE.parent / "settings.ini", encoding="utf-8")

project, release, author = "bmlab", ini["DEFAULT"]["version"], ini["DEFAULT"]["author"]
copyright = ini["DEFAULT"]["copyright"]
extensions = ["myst_nb"]
root_doc = "index"
nb_execution_mode = "off"                # outputs as they are stored
nb_ipywidgets_js = {}                    # they would come from elsewhere
nb_merge_streams = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]      # a notebook may go from # to ###
add_module_names = False
toc_object_entries_show_parents = "hide"
pygments_style, pygments_dark_style = "tango", "monokai"
html_theme = "furo"
html_title = "bmlab"
html_static_path = [str(HERE / "static")]
html_css_files = ["bmlab.css"]
html_show_search_summary = False         # a page opened from a folder may not fetch another
html_show_sphinx = html_copy_source = False


# ---- the tree of pages on the left -------------------------------------------------------------------------------
# The same on every page but for the way to it and the marks of where one is; made anew for each page it takes most of
# the time.
def _tree_of_pages(builder):
    """HTML of the tree as the root sees it, with a slot @i@ in the class of item i; {address: items above it and its
    own}"""
    from bs4 import BeautifulSoup
    soup = BeautifulSoup(
        builder._get_local_toctree("index", collapse=False, titles_only=True, maxdepth=-1, includehidden=True),
        "html.parser",
    )
    above = {}
    for i, li in enumerate(soup.find_all("li")):
        li["slot"] = i
        li["class"] = [c for c in li["class"] if c != "current"] + [f"@{i}@"]
        above[li.a["href"]] = {i} | {p["slot"] for p in li.find_parents("li")}
    for li in soup.find_all("li"): del li["slot"]
    return str(soup), above


def _quick_toctree(app, pagename, templatename, context, doctree):
    "Give the theme the tree made once, its links leading from this page, its slots filled"
    if not hasattr(app, "tree_of_pages"): app.tree_of_pages = _tree_of_pages(app.builder)
    html, above = app.tree_of_pages
    here, up = above.get(f"{pagename}.html", ()), "../" * pagename.count("/")
    html = re.sub(r"@(\d+)@", lambda m: "current" if int(m[1]) in here else "", html)
    html = re.sub(r'href="(?![a-z]+:|#)', f'href="{up}', html)
    context["toctree"] = lambda **kw: html


def setup(app): app.connect("html-page-context", _quick_toctree, priority=100)
