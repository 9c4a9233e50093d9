"""Do the pages hang together, and do they load nothing from elsewhere?

usage: check.py FOLDER
"""
import re, sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "link": "href",
}


class Page(HTMLParser):
    "What a page is (ids), what it points at (links), what it loads, and the style in it"
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads, self.styles, self._style = set(), set(), set(), [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {v for k in ("id", "name") if (v := attrs.get(k))}
        if tag == "a" and attrs.get("href"): self.links.add(attrs["href"])
        if (key := LOADS.get(tag)) and attrs.get(key) and attrs.get("rel") not in ("canonical", "search"):
            self.loads.add(attrs[key])
        if attrs.get("srcset"): self.loads |= {part.split()[0] for part in attrs["srcset"].split(",")}
        if attrs.get("style"): self.styles.append(attrs["style"])
        self._style = tag == "style"

    def handle_data(self, data):
        if self._style: self.styles.append(data)


def css_loads(text):
    return {m for m in re.findall(r"url\(\s*['\"]?([^'\")]+)", text)} | set(
        re.findall(r"@import\s+['\"]([^'\"]+)", text)
    )


def problems(folder):
    "Lines that say which page points at nothing, or loads from elsewhere"
    folder = Path(folder).resolve()
    pages = {f: Page(f.read_text(encoding="utf-8")) for f in sorted(folder.rglob("*.html"))}
    found = []
    def look(f, address, loads):
        u = urlsplit(address)
        if u.scheme in ("data", "mailto", "javascript"): return
        if u.scheme or u.netloc:
            if loads: found.append(f"{f.relative_to(folder)}: loads {address} from elsewhere")
            return
        there = (f.parent / unquote(u.path)).resolve() if u.path else f
        if not there.is_file():
            found.append(f"{f.relative_to(folder)}: nothing is at {address}")
            return
        if u.fragment and there in pages and unquote(u.fragment) not in pages[there].ids:
            found.append(f"{f.relative_to(folder)}: no place #{unquote(u.fragment)} in {there.relative_to(folder)}")
    for f, page in pages.items():
        for a in sorted(page.links): look(f, a, False)
        for a in sorted(page.loads | css_loads(" ".join(page.styles))): look(f, a, True)
    for f in sorted(folder.rglob("*.css")):
        for a in sorted(css_loads(f.read_text(encoding="utf-8"))): look(f, a, True)
    return found


if __name__ == "__main__":
    found = problems(sys.argv[1])
    print("\n".join(found) or "every link leads somewhere")
    sys.exit(bool(found))
