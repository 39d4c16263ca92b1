#!/usr/bin/env python3
"""check_links.py FOLDER: every link and picture of the built site leads somewhere, anchors included.
Nothing is fetched."""

import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        for name in ("href", "src"):
            if attributes.get(name):
                self.links.append(attributes[name])


def main(folder):
    folder = pathlib.Path(folder).resolve()
    # A missing page is served from any address, so that its links begin at the root.
    pages = {path: Page(path.read_text(encoding="utf-8"))
             for path in sorted(folder.rglob("*.html")) if path.name != "404.html"}
    faults = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target = target / "index.html"
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists():
                faults.append(f"{path.relative_to(folder)}: {link} leads nowhere")
            elif anchor == "nested-classes" and target == path:
                continue  # Doxygen 1.9 offers a list of private classes, which it then leaves out
            elif anchor and target in pages and anchor not in pages[target].anchors:
                faults.append(f"{path.relative_to(folder)}: {link} has no such anchor")
    links = sum(len(page.links) for page in pages.values())
    print("\n".join(faults[:50]) or f"{len(pages)} pages, {links} links: all lead somewhere")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
