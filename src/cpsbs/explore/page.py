"""Puts the built page and its data into one HTML file that makes no requests of its own.

Script and style are inline, and a content security policy allows these two, by their hashes, and
nothing else: no other script, no ``eval``, and no connection but to the server of the page, if it
has one. Data are a block of JSON that a browser does not execute; texts reach the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from cpsbs import __version__
from cpsbs.explore.explorer import design_summaries

NOT_BUILT = (
    "the page is not built; in the folder of the repository run: make page (it needs Node.js 20 or "
    "later, and npm)"
)


def html(data: dict[str, Any], *, connects: bool = False) -> str:
    """Return the page as a whole HTML document.

    Args:
        data: what the page shows; the versions and the designs are added here.
        connects: whether the page has a server that it may ask.

    Raises:
        ImportError: if the page has not been built.
    """
    script, style = _built("page.js"), _built("page.css")
    content = {"cpsbs": __version__, "designs": design_summaries(), **data}
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta http-equiv="Content-Security-Policy" content="',
            policy(script, style, connects),
            '">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="referrer" content="no-referrer">\n',
            '<link rel="icon" href="data:,">\n<title>cpsbs explore</title>\n',
            f"<style>{style}</style>\n</head>\n<body>\n",
            "<noscript>This page draws a tree by JavaScript, which is turned off.</noscript>\n",
            '<div id="app"></div>\n',
            f'<script type="application/json" id="data">{_inert(content)}</script>\n',
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def policy(script: str, style: str, connects: bool) -> str:
    """Return the content security policy of a page with this script and this style."""
    parts = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'" if connects else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _built(name: str) -> str:
    """Return a file of the built page."""
    file = files("cpsbs.explore") / "static" / name
    if not file.is_file():
        raise ImportError(NOT_BUILT)
    content = file.read_text(encoding="utf-8")
    if any(end in content.lower() for end in ("</script", "</style")):
        raise ValueError(f"{name} would end the element that it stands in; build the page again")
    return content


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _inert(data: dict[str, Any]) -> str:
    """Return data as JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
