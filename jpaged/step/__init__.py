"""All traced control of the engine: pure functions of fixed shapes.

state = make_state(config, layers=..., kv_heads=..., head_dim=...)
state = submit(state, batch)
state = step(decoder, params, state, budget=16)
"""

from jpaged.step.check import violations
from jpaged.step.init import make_state
from jpaged.step.record import StepRecord
from jpaged.step.scheduling.evict import evict
from jpaged.step.sharing.beam import advance
from jpaged.step.sharing.fork import fork
from jpaged.step.state import EngineState, Requests, Slots
from jpaged.step.status import NO_REQUEST, Finish, Status
from jpaged.step.step import demand, run, step
from jpaged.step.submission import Submission, abort, submit
from jpaged.step.swap.exchange import exchange
from jpaged.step.swap.table import Moves

__all__ = [
    "NO_REQUEST", "EngineState", "Finish", "Moves", "Requests", "Slots", "Status", "StepRecord", "Submission", "abort",
    "advance", "demand", "evict", "exchange", "fork", "make_state", "run", "step", "submit", "violations",
]  # fmt: skip
