"""Events of steps, told as they begin."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forkpoint.engine.timing import Timing


@contextmanager
def watched(note: Callable[[str], object]) -> Iterator[None]:
    """Within it `note` is called with each event of any step, such as "forward prefix 0", before it
    runs."""
    before = Timing.before

    def noting(self: Timing, *given: Any) -> None:
        before(self, *given)
        note(self.events[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timing, "before", noting)
        yield
