"""The table of docs/reference/families.md: errors by family and version of transformers.

The tests append a row of JSON for each family that they find exact to the file that
FORKPOINT_FAMILIES_ROWS names (`make test-versions` does so, with every supported version of
transformers); `python tests/numerics/families_table.py ROWS` keeps them in benchmarks/results and
writes the table anew.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

from torch import nn

from benchmarks.environment import environment
from benchmarks.rows import ResultRow
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.hosts.transformers.linear_attention import recurrent_modules

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "families.jsonl"
DOCS = ROOT / "docs" / "reference" / "families.md"
VARIABLE = "FORKPOINT_FAMILIES_ROWS"
SHARED = {
    "latents": "expanded keys and values",
    "states": "keys and values, states and convolution inputs",
}
"""Tensors that later microbatches read, where they are more than keys and values, by feature."""
EXPERTS_REFUSE = "router jitter"


def features(model: nn.Module, windows: set[int]) -> list[str]:
    """Features of a family's model that ask something of attention, in the docs' words.

    `windows` are those that its layers asked attention for; 0 is none.
    """
    config = model.config
    chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    found = {
        "windows": windows != {0} and not chunks,
        "chunks": chunks,
        "sinks": any(hasattr(m, "sinks") for m in model.modules()),
        "softcap": bool(getattr(config, "attn_logit_softcapping", None)),
        "latents": hasattr(config, "kv_lora_rank"),
        "states": bool(recurrent_modules(model)),
        "experts": any(hasattr(m, "experts") for m in model.modules()),
    }
    return [name for name, there in found.items() if there]


def record(family: str, error: float, found: list[str]) -> None:
    """Append what was shown, where a file is named for it."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    row = ResultRow(
        bench="families",
        case=family,
        metric="gradient_error",
        unit="of the global gradient norm, float64",
        value=error,
        note=", ".join(found) or None,
    )
    values = {**vars(row), **environment(), "command": "make test-versions"}
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def table() -> list[str]:
    """The lines of the table, from the rows that are kept."""
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    notes: dict[str, str] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        errors[row["case"]][row["versions"]["transformers"]] = row["value"]
        notes[row["case"]] = row["note"] or ""
    versions = sorted({v for found in errors.values() for v in found}, key=_ordered)
    head = ["`model_type`", "class", "with", "shared", "refused", *versions]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for family, known in FAMILIES.items():
        parts = notes.get(family, "").split(", ")
        cells = [
            f"`{family}`",
            f"`{known.model_class}`",
            ", ".join(p for p in parts if p not in (*SHARED, "experts")),
            next((shared for name, shared in SHARED.items() if name in parts), "keys and values"),
            EXPERTS_REFUSE if "experts" in parts else "",
            *(f"{errors[family][v]:.0e}" if v in errors[family] else "-" for v in versions),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def table_in_docs() -> list[str]:
    text = DOCS.read_text(encoding="utf-8").splitlines()
    return [line for line in text if line.startswith("|")][: len(FAMILIES) + 2]


def main(rows: Path) -> None:
    RESULTS.write_text(rows.read_text(encoding="utf-8"), encoding="utf-8")
    text = DOCS.read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(text) if line.startswith("| `model_type`"))
    end = next(i for i in range(begin, len(text)) if not text[i].startswith("|"))
    DOCS.write_text("\n".join([*text[:begin], *table(), *text[end:]]) + "\n", encoding="utf-8")


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
