"""The known word that a mistyped one is most like. Imports no torch."""

import difflib
from collections.abc import Iterable


def suggested(word: str, known: Iterable[str]) -> str:
    """The known word that a mistyped one is most like, as part of a message; nothing if none is."""
    lower = {name.lower().lstrip("-"): name for name in known}
    # Half of the letters in order: "repaly", "veryfy", "pln".
    found = difflib.get_close_matches(word.lower().lstrip("_-"), lower, n=1, cutoff=0.5)
    if not found:
        found = [name for name in lower if len(word) > 2 and name.startswith(word.lower())][:1]
    return f" (did you mean {lower[found[0]]!r}?)" if found else ""
