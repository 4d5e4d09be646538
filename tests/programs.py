"""The rules that every program keeps to, whoever ordered it."""

from collections import Counter
from collections.abc import Iterable

from forkpoint import Plan
from forkpoint.plan.program import (
    BACKWARD,
    BOUNDARY,
    FORWARD,
    HEAD,
    RECOMPUTE,
    SCORE,
    Program,
    check_order,
)


def equal_costs(programs: Iterable[Program]) -> list[list[float]]:
    """For `align`: one for each microbatch."""
    return [[1.0] * len(program.instructions) for program in programs]


def check_program(plan: Plan) -> None:
    """Each microbatch runs once in every pass, as far as it must, after all that it waits for."""
    check_order(plan.waits_for(), range(len(plan.program.units)))
    own = [i for i in plan.program.instructions if not i.idle and not i.exchanges]
    of = {(i.operation, i.microbatch): i for i in own}
    assert len(of) == len(own)
    count = Counter(i.operation for i in own)
    here = [m for m in plan.microbatches if m.shared_prompt != "received"]
    assert count[FORWARD] == count[BACKWARD] == len(here)
    assert count[SCORE] in (0, len(here))
    for microbatch in here:
        index = microbatch.index
        forward, again = of[FORWARD, index], of.get((RECOMPUTE, index))
        assert forward.keeps_graph is (again is None)
        assert again is not None or microbatch.activations != "recompute"
        scored = [of[SCORE, index]] if count[SCORE] else []
        for instruction in (again or forward, *scored):
            ends = {HEAD} if microbatch.num_loss_entries else {HEAD, BOUNDARY}
            assert instruction.ends_at in ends
    for unit in plan.program.units:
        assert [i.operation for i in unit] == [RECOMPUTE, BACKWARD] or len(unit) == 1
        assert len({(i.slot, i.microbatch) for i in unit}) == 1
