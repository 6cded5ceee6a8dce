"""A lock whose waiters take their turns in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock for `with`. It is re-entrant, and fair: a thread that runs burst after burst cannot keep out one that
    wants to abort a request in between, as it could with a lock of `threading`."""

    def __init__(self):
        self._mutex = threading.Lock()  # held for a few instructions
        self._waiting: deque[threading.Lock] = deque()  # each is held until its thread's turn comes
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        with self._mutex:
            if self._depth == 0:
                self._owner, self._depth = me, 1
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # interrupted
            with self._mutex:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                else:  # the turn came at the same moment
                    self._pass_on()
            raise
        self._owner = me

    def __exit__(self, *exc: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        with self._mutex:
            self._pass_on()

    def _pass_on(self) -> None:
        self._owner = None
        if self._waiting:
            self._depth = 1  # of the next thread, before it runs
            self._waiting.popleft().release()
        else:
            self._depth = 0

    def take_if_free(self) -> bool:
        """Takes the turn unless some thread has it, this one included. Never waits: the garbage collector may call it
        at any place. `__exit__` gives the turn back."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self._depth:
                return False
            self._owner, self._depth = threading.get_ident(), 1
            return True
        finally:
            self._mutex.release()
