"""Writes tests/durations.tsv: the seconds of each test file, from a JUnit report of pytest.

python scripts/durations.py REPORT.xml
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

TABLE = Path(__file__).resolve().parents[1] / "tests" / "durations.tsv"


def main(report: str) -> None:
    """Sum the times of the cases of each module, the longest first."""
    cases: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        cases[case.get("classname", "").replace(".", "/") + ".py"].append(
            float(case.get("time", 0))
        )
    rows = sorted(((sum(times), len(times), file) for file, times in cases.items()), reverse=True)
    lines = [f"{seconds:.1f}\t{count}\t{file}" for seconds, count, file in rows]
    TABLE.write_text("\n".join(["seconds\ttests\tfile", *lines, ""]), encoding="utf-8")
    print(f"written: {TABLE}")


if __name__ == "__main__":
    main(sys.argv[1])
