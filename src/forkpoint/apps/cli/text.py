"""Escapes of invisible characters, for text from files. Imports no torch."""

import re

_HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and line feed
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # directions, characters without width
    "\u2028\u2029\ufeff\ufff9-\ufffb\ufffe\uffff"  # separators, marks, non-characters
    "\ud800-\udfff"  # halves of surrogate pairs, which cannot be encoded
    "\U000e0000-\U000e007f"  # tags
    "]"
)


def visible(text: str) -> str:
    """Replace characters that are invisible or change other text by escapes.

    These are control characters (including those of terminals), characters that change the
    direction of writing, and characters that UTF-8 or XML cannot encode. Tabs and line feeds are
    kept.
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
