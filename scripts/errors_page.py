"""Writes docs/errors.md from the table of bad inputs in tests/integration/bad_inputs/."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT / "tests")]
    from bad_inputs.page import page

    (ROOT / "docs" / "errors.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
