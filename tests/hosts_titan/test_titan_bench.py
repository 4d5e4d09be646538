"""The benchmark of a group with a model of torchtitan."""

from benchmarks.runner import Deadline
from benchmarks.shapes import make_model, make_titan_model
from benchmarks.steps.groups import Groups


def test_sizes_are_those_of_transformers() -> None:
    theirs = make_titan_model("llama3-8b", "meta")
    ours = make_model("llama3-8b", "meta")
    assert sorted(tuple(p.shape) for p in theirs.parameters()) == sorted(
        tuple(p.shape) for p in ours.parameters()
    )


def test_a_group_is_timed() -> None:
    made = Groups(
        tiny=True, layers=1, blocks="eager", groups=("P6144-R1024-N4",), library="torchtitan"
    )
    rows = {row.metric: row for row in made.measure(Deadline(None))}
    assert "of torchtitan" in rows["speed-up"].case
    assert rows["shared nonfinite"].value == 0
