"""Write the table of TRL's options into docs/trl.md; with --check say whether it is up to date."""

import sys
from pathlib import Path

from forkpoint.integrations.trl.options import table

PAGE = Path(__file__).parents[1] / "docs" / "trl.md"
MARK = "<!-- options: written by scripts/trl_options.py -->\n"


def page(text: str) -> str:
    """The page with the table after its mark, which comes last."""
    before, _, _ = text.partition(MARK)
    rows = ["| option | | what to do |", "|---|---|---|"]
    rows += [f"| {names} | {status} | {remedy} |" for names, status, remedy in table()]
    return before + MARK + "\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    found = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        sys.exit(0 if page(found) == found else "docs/trl.md is old: run scripts/trl_options.py")
    PAGE.write_text(page(found), encoding="utf-8")
