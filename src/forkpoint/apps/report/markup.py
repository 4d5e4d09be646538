"""HTML by construction: `tag` makes all markup, and escapes all else. Imports no torch.

There is no way to markup but a call of `tag` with names that are in the lists below. So whatever
comes out of a file (text, numbers, lists, objects) is text in the page, and no element of it loads,
runs or leads anywhere.
"""

import base64
import hashlib
import html
import re
from typing import Any

from forkpoint.apps.report.text import visible

ELEMENTS = frozenset(
    {
        *("html", "head", "meta", "link", "title", "style", "script", "body"),
        *("header", "main", "footer", "article", "section", "div", "h1", "h2", "h3", "p"),
        *("ul", "li", "button", "details", "summary"),
        *("table", "caption", "thead", "tbody", "tr", "th", "td"),
    }
)
EMPTY_ELEMENTS = frozenset({"link", "meta"})
RAW_ELEMENTS = frozenset({"script", "style"})
"""Their text is not escaped in HTML, so it may not hold what could end them."""
ATTRIBUTES = frozenset(
    {
        *("charset", "content", "http-equiv", "name", "rel", "href", "lang", "type"),
        *("id", "class", "data-value", "hidden", "open", "scope", "tabindex"),
        *("role", "aria-label"),
    }
)
NOTHING = "data:,"
"""The one address that a page may have: an icon, so that browsers ask for none."""
_ENDS = re.compile(r"</|<!--|<script|]]>", re.IGNORECASE)
_KEY = object()


class Markup:
    """Finished markup. Made by `tag` alone."""

    __slots__ = ("_text",)

    def __init__(self, text: str, key: object) -> None:
        if key is not _KEY:
            raise TypeError("only tag makes markup")
        self._text = text

    def __str__(self) -> str:
        return self._text


Child = Markup | str | int | float | None


def tag(name: str, /, *children: Child, **attributes: str | bool | None) -> Markup:
    """An element.

    Args:
        name: of the element, one of ELEMENTS.
        children: markup as it is; everything else as escaped text, None as nothing.
        attributes: by their names, with `_` for `-` and without a last `_` (`class_`). True is an
            attribute without a value; False and None leave it out.

    Raises ValueError for a name that is in no list and for text that could end a raw element: a
    mistake of the caller, since neither comes out of a file.
    """
    if name not in ELEMENTS:
        raise ValueError(f"a page has no element {name!r}")
    opening = "".join(f" {_attribute(key, value)}" for key, value in attributes.items() if value)
    if name in EMPTY_ELEMENTS:
        if children:
            raise ValueError(f"{name} has no children")
        return Markup(f"<{name}{opening}>", _KEY)
    make = _raw if name in RAW_ELEMENTS else _content
    content = "".join(make(child) for child in children if child is not None)
    return Markup(f"<{name}{opening}>{content}</{name}>", _KEY)


def document(*children: Markup, lang: str) -> str:
    """A whole page."""
    return f"<!doctype html>\n{tag('html', *children, lang=lang)}\n"


def policy(script: str, style: str) -> Markup:
    """The content security policy of a page with this one script and this one style sheet.

    Nothing else runs and nothing is loaded, not from the page's own folder either.
    """
    parts = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return tag("meta", http_equiv="Content-Security-Policy", content="; ".join(parts))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _content(child: Any) -> str:
    # Not `isinstance`: a subclass could print itself as it likes.
    return str(child) if type(child) is Markup else html.escape(visible(str(child)))


def _raw(child: Any) -> str:
    if type(child) is not str or _ENDS.search(child):
        raise ValueError("this could end the element that it stands in")
    return child


def _attribute(key: str, value: str | bool) -> str:
    name = key.rstrip("_").replace("_", "-")
    if name not in ATTRIBUTES:
        raise ValueError(f"a page has no attribute {name!r}")
    if name == "href" and value != NOTHING:
        raise ValueError("a page leads nowhere")
    if name == "http-equiv" and value != "Content-Security-Policy":
        raise ValueError("a page has no other directive than its policy")
    return name if value is True else f'{name}="{html.escape(visible(str(value)))}"'
