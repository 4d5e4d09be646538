"""Python's garbage collector within a step.

The Python objects of a graph live until its backward, and survive collections of the youngest
generation. If the middle generation is collected before the backward, they become old. Then Python
soon collects all objects of the process. Beside torch's compiler that takes 0.2 to 0.4 s every few
steps, and it finds nothing. So a step lets Python collect only the youngest generation. The step
collects the middle one at its start, and later after a backward or a forward without a graph.
"""

import gc

from forkpoint.engine.changes import Changes

NEVER = 2**30
DUE = 100
"""Collections of the youngest generation after which a step collects the middle one."""


def defer_collections(changes: Changes) -> None:
    """Let Python collect only its youngest generation until `changes` are undone.

    Called before a step makes objects. Garbage that the previous step has left is collected here,
    because few collections may begin outside of steps.
    """
    collect_middle(due=0)
    youngest, *older = gc.get_threshold()
    changes.later(gc.set_threshold, youngest, *older)
    gc.set_threshold(youngest, NEVER, *older[1:])


def collect_middle(due: int = DUE) -> None:
    """Collect the middle generation after more than `due` collections of the youngest one.

    Does nothing if the user has turned the collector off.
    """
    if gc.isenabled() and gc.get_threshold()[0] and gc.get_count()[1] > due:
        gc.collect(1)
