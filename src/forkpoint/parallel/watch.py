"""A thread that ends this process if a call of several ranks would wait for a rank forever.

If a rank fails within a model's forward or backward, other ranks wait in collectives that it has
not issued, and cannot be woken. The failed rank writes the reason to the process group's store. A
rank that has died stops its heartbeats there. The other ranks then end with the reason.
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
"""Seconds without a heartbeat after which a rank is considered dead."""
GRACE_S = 10.0
"""Seconds in which a rank may end by itself after another has failed."""
EXIT_CODE = 75
FAILED = "failed"


class Watch:
    """Watches one call, from `start` to `end`."""

    def __init__(
        self, index: int, names: tuple[int, ...], number: int, store: Store | None
    ) -> None:
        """
        Args:
            index: index of this rank among those of the call.
            names: numbers of ranks for messages, by index.
            number: number of the call, the same on all ranks, and increasing.
            store: store of these ranks; None: nothing is watched.
        """
        self.index = index
        self.names = names
        self.number = number
        self.store: Store | None = store if len(names) > 1 else None
        self._ended = threading.Event()
        self._own_failure = False
        self._seen: str | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.store is None:
            return
        self._thread = threading.Thread(target=self._watch, name="forkpoint-watch", daemon=True)
        self._thread.start()

    def failed(self, reason: str, blamed: str | None = None) -> None:
        """Tell the other ranks that this one has failed. `blamed`: the cause, if it is another
        rank."""
        self._own_failure = True
        if self.store is not None:
            self._say(self.store, blamed or f"rank {self.names[self.index]}: {reason}")

    def stuck(self, reason: str) -> None:
        """Tell the other ranks that they may wait for this one in collectives of this call."""
        self._own_failure = True
        if self.store is not None:
            self.store.set(f"stuck/{self.number}", reason)

    def end(self) -> None:
        """End watching, because the call has ended on this rank. May be called again."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT_S)

    def blamed(self) -> str | None:
        """The rank that made a collective fail, and the reason; None if not known.

        Waits a few heartbeats for a message of that rank, or for the lack of its heartbeats.
        """
        if self.store is None:
            return None
        try:
            before = self._states(self.store)
            # Living ranks have new heartbeats after this time.
            end = time.monotonic() + 2 * BEAT_S + POLL_S
            while time.monotonic() < end:
                if (said := self._said(self.store)) is not None:
                    return said
                time.sleep(POLL_S / 5)
            after = self._states(self.store)
        except RuntimeError as error:
            return self._seen or _gone(error)
        silent = [
            self.names[n]
            for n, (one, other) in enumerate(zip(before, after, strict=True))
            if n != self.index and one == other
        ]
        return None if not silent else f"{_ranks(silent)}: no heartbeat; died or has left"

    def _watch(self) -> None:
        assert self.store is not None
        neighbour = (self.index + 1) % len(self.names)
        last, since, beaten, beats = "", time.monotonic(), -BEAT_S, 0
        try:
            while True:
                now = time.monotonic()
                if now - beaten >= BEAT_S:
                    beats += 1
                    beaten = now
                    self.store.set(f"state/{self.index}", f"{self.number} {beats}")
                if not self._own_failure and (reason := self._said(self.store)) is not None:
                    self._give_up(reason)
                    return
                found = self._state(self.store, neighbour)
                number = int(found.partition(" ")[0] or 0)
                if found != last or number != self.number or found.endswith("done"):
                    last, since = found, now
                elif now - since > DEAD_S:
                    self._say(
                        self.store,
                        f"rank {self.names[neighbour]}: no heartbeat for {DEAD_S:.0f} s; its "
                        "process has died or hangs",
                    )
                if self._ended.wait(POLL_S):
                    break
            self.store.set(f"state/{self.index}", f"{self.number} done")
        except RuntimeError as error:  # of any store: the process that holds it has ended
            self._give_up(self._seen or _gone(error))

    def _states(self, store: Store) -> list[str]:
        return [self._state(store, index) for index in range(len(self.names))]

    def _state(self, store: Store, index: int) -> str:
        """The number of a rank's call, with its number of heartbeats or "done"."""
        key = f"state/{index}"
        return store.get(key).decode() if store.check([key]) else ""

    def _said(self, store: Store) -> str | None:
        """The message of a failed rank, if there is one."""
        for key in (FAILED, f"stuck/{self.number}"):
            if self._seen is None and store.check([key]):
                self._seen = store.get(key).decode(errors="replace")
        return self._seen

    def _say(self, store: Store, reason: str) -> None:
        if self._said(store) is None:  # the first failure is the cause of others
            store.set(FAILED, reason)

    def _give_up(self, reason: str) -> None:
        """End the process, unless the call ends first."""
        if self._ended.wait(GRACE_S):
            return
        leave(
            f"forkpoint: rank {self.names[self.index]} ends (exit code {EXIT_CODE}), because a "
            f"step of several ranks cannot be finished: {reason}"
        )


def _ranks(names: list[int]) -> str:
    shown = ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if names[8:] else "")
    return f"rank{'s' if len(names) > 1 else ''} {shown}"


def _gone(error: RuntimeError) -> str:
    text = " ".join(str(error).split())
    return (
        "the process group's store cannot be reached; the process that holds it (rank 0, or "
        f"torchrun) has died or ended ({text})"
    )


def store_of(name: str) -> Store | None:
    """The part of the default group's store below a name; None if torch does not expose the
    store."""
    find: Callable[[], Store] | None = getattr(c10d, "_get_default_store", None)
    return None if find is None else PrefixStore(f"forkpoint/{name}", find())


def described(error: BaseException) -> str:
    """Describe an error in one line, for other ranks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}."


def leave(message: str) -> None:
    """End this process at once, because its main thread waits in a collective and cannot be
    woken."""
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)
