"""Where a request is in its life, why it ended, and what stands where there is none."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Where a row of `Requests` is in its life."""

    FREE = 0  # no request; the tokens of the last one can still be read
    WAITING = 1  # in the queue, new or preempted
    RUNNING = 2  # has a slot
    FINISHED = 3  # has a slot until the next eviction
    ABORTED = 4  # the caller gave it up; has a slot until the next eviction


class Finish(IntEnum):
    """Why a request ended, as the step records it."""

    NOT = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


#: No request: in place of a uid, and in place of a row of `Requests`. Uids are 0 or more.
NO_REQUEST = -1
