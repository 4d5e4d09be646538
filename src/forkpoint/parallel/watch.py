"""A thread that ends this process where a step's collectives would wait for a rank for ever.

A rank that fails within a model's forward or backward has issued some of its collectives and not
others, and the ranks that wait in them cannot be woken. The failed rank says so in the process
group's store; a rank that has died stops its beats there. The others then end with the reason.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

POLL_S = 0.5
BEAT_S = 2.0
DEAD_S = 30.0
"""A rank without a beat for so long has died, or its process stands still."""
GRACE_S = 10.0
"""How long a rank has to end by itself after another has failed."""
EXIT_CODE = 75


class Watch:
    """Watches over one step, from `start` to `end`."""

    def __init__(
        self, index: int, names: tuple[int, ...], number: int, store: Store | None = None
    ) -> None:
        """
        Args:
            index: this rank's, among those of the step.
            names: by index, numbers for messages.
            number: of the step, the same on all of its ranks, and another for each step.
            store: of the process group; by default that of the default group.
        """
        self.index = index
        self.names = names
        base = store if store is not None else default_store()
        ranks = "-".join(map(str, names[:2])) + f"of{len(names)}"
        prefix = f"forkpoint/{ranks}/{number}"
        self.store: Store | None = None if base is None else PrefixStore(prefix, base)
        self._ended = threading.Event()
        self._own_failure = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.store is None or len(self.names) < 2:
            return
        self._thread = threading.Thread(target=self._watch, name="forkpoint-watch", daemon=True)
        self._thread.start()

    def failed(self, reason: str) -> None:
        """Tell the other ranks that this one cannot go on."""
        self._own_failure = True
        if self.store is not None:
            self.store.set("failed", f"rank {self.names[self.index]}: {reason}")

    def end(self) -> None:
        """The step has ended on this rank."""
        self._ended.set()
        if self._thread is not None:
            self.store.set(f"done/{self.index}", "1")  # pyright: ignore[reportOptionalMemberAccess]
            self._thread.join()

    def _watch(self) -> None:
        assert self.store is not None
        neighbour = (self.index + 1) % len(self.names)
        last, since, beaten, beats = b"", time.monotonic(), 0.0, 0
        try:
            while not self._ended.wait(POLL_S):
                now = time.monotonic()
                if now - beaten >= BEAT_S:
                    beats += 1
                    beaten = now
                    self.store.set(f"beat/{self.index}", str(beats))
                if self.store.check(["failed"]) and not self._own_failure:
                    reason = self.store.get("failed").decode(errors="replace")
                    self._give_up(reason)
                    return
                key = f"beat/{neighbour}"
                found = self.store.get(key) if self.store.check([key]) else b""
                if found != last:
                    last, since = found, now
                elif now - since > DEAD_S and not self.store.check([f"done/{neighbour}"]):
                    self.store.set(
                        "failed",
                        f"rank {self.names[neighbour]}: no sign of life for {DEAD_S:.0f} s; its "
                        "process has died or stands still",
                    )
        except Exception as error:
            # The store is gone, and with it the process that holds it.
            self._give_up(f"the process group's store cannot be reached ({error})")

    def _give_up(self, reason: str) -> None:
        """End the process, unless the step ends by itself."""
        if self._ended.wait(GRACE_S):
            return
        leave(
            f"forkpoint: rank {self.names[self.index]} ends (exit code {EXIT_CODE}), because a "
            f"step of several ranks cannot be finished: {reason}"
        )


def default_store() -> Store | None:
    """The store of the default process group; None where torch does not give it."""
    find: Callable[[], Store] | None = getattr(c10d, "_get_default_store", None)
    return None if find is None else find()


def leave(message: str) -> None:
    """End this process at once: its main thread waits in a collective and cannot be woken."""
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)
