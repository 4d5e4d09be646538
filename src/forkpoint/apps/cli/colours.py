"""Whether words such as passed, failed and chosen are coloured. Imports no torch."""

import os
import re
from typing import TextIO

from rich.text import Text

from forkpoint.errors import ConfigError

OPTION = "--color"
CHOICES = ("auto", "always", "never")
# Not within a path or a longer word.
_WORDS = tuple(
    (re.compile(rf"(?<![\w./-])(?:{words})(?![\w/-]|\.\w)"), style)
    for words, style in (
        ("passed", "bold green"),
        ("failed|FAILED", "bold red"),
        ("chosen", "bold cyan"),
    )
)
_chosen = "auto"


def take_off(arguments: list[str]) -> list[str]:
    """The arguments without `--color`, whose value holds for the command that they call.

    Raises ConfigError for a value that is none of `CHOICES`.
    """
    global _chosen
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest: list[str] = []
    _chosen, words = "auto", iter(arguments[:end])
    for word in words:
        name, given, value = word.partition("=")
        if name != OPTION:
            rest.append(word)
            continue
        value = value if given else next(words, "")
        if value not in CHOICES:
            raise ConfigError(f"{OPTION} is {value!r}; allowed are {', '.join(CHOICES)}.")
        _chosen = value
    return rest + arguments[end:]


def wanted(stream: TextIO) -> bool:
    """Whether text for this stream is coloured.

    By default on a terminal that can, unless the environment has a NO_COLOR.
    """
    if _chosen != "auto":
        return _chosen == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def colour(text: Text) -> Text:
    """The text with its verdicts coloured."""
    for pattern, style in _WORDS:
        text.highlight_regex(pattern, style)
    return text
