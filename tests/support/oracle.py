"""The scheduler again, in lists and dicts: what `jpaged.step` says it does, written without an array.

evict     what ended leaves its slot and row
preempt   the largest number of oldest requests stays whose new pages are free, or held by those who go
admit     in order of arrival, while there are slots, something of the budget, and pages
schedule  one token each, oldest first, then the rest of the budget, oldest first; lowest free page first
sample    what the decoder prefers, unless it is banned
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jpaged.config import EngineConfig
from jpaged.step import Finish, Status
from support.stubs import HistoryDecoder


@dataclass
class OracleRequest:
    uid: int
    arrival: int
    tokens: list[int]
    max_len: int
    min_len: int
    stop_ids: tuple[int, ...]
    status: Status = Status.WAITING


@dataclass
class OracleSlot:
    request: OracleRequest
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def want(self) -> int:
        return len(self.request.tokens) - self.computed


@dataclass
class OracleRecord:
    """As `StepRecord`; lists by slot."""

    uid: list[int]
    scheduled: list[int]
    sampled: list[bool]
    token: list[int]
    finish: list[int]
    running: int
    waiting: int
    admitted: int
    preempted: int
    discarded: int
    pages_in_use: int
    tokens_stored: int


class OracleEngine:
    """An engine of `config` over a `HistoryDecoder`."""

    def __init__(self, config: EngineConfig, decoder: HistoryDecoder):
        assert config.num_pages is not None
        self.config, self.decoder = config, decoder
        self.rows: list[OracleRequest | None] = [None] * (config.max_num_seqs + config.max_queue)
        self.slots: list[OracleSlot | None] = [None] * config.max_num_seqs
        self.free = set(range(1, config.num_pages + 1))
        self.submitted = self.steps = self.computed_tokens = self.padded_tokens = self.preemptions = 0

    # The host's part

    @property
    def free_rows(self) -> int:
        return sum(row is None for row in self.rows)

    def submit(self, uid, prompt, *, max_len, min_len=0, stop_ids=()) -> None:
        row = self.rows.index(None)
        self.rows[row] = OracleRequest(uid, self.submitted, list(prompt), max_len, min_len, tuple(stop_ids))
        self.submitted += 1

    def abort(self, uid: int) -> None:
        for request in self.rows:
            if request and request.uid == uid and request.status in (Status.WAITING, Status.RUNNING):
                request.status = Status.ABORTED

    # The step's parts

    def running(self) -> list[OracleSlot]:
        """Oldest first."""
        return sorted((s for s in self.slots if s), key=lambda s: s.request.arrival)

    def waiting(self) -> list[OracleRequest]:
        queue = [r for r in self.rows if r and r.status == Status.WAITING]
        return sorted(queue, key=lambda r: r.arrival)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def new_pages(self, slot: OracleSlot, tokens: int) -> int:
        return max(self.pages_of(slot.computed + tokens) - len(slot.pages), 0)

    def grant(self, budget: int) -> list[tuple[OracleSlot, int]]:
        running = self.running()
        granted = [0] * len(running)
        for index, slot in enumerate(running):
            if slot.want > 0 and budget > 0:
                granted[index] = 1
                budget -= 1
        for index, slot in enumerate(running):
            if granted[index]:
                more = min(slot.want - 1, budget)
                granted[index] += more
                budget -= more
        return list(zip(running, granted, strict=True))

    def empty(self, slot: OracleSlot) -> None:
        assert not self.free & set(slot.pages)
        self.free |= set(slot.pages)
        self.slots[self.slots.index(slot)] = None

    def evict(self) -> None:
        over = (Status.FINISHED, Status.ABORTED)
        for slot in self.running():
            if slot.request.status in over:
                self.empty(slot)
        self.rows = [None if row and row.status in over else row for row in self.rows]

    def preempt(self, budget: int) -> tuple[int, int]:
        """How many lost their slots, and the tokens they had computed."""
        granted = self.grant(budget)
        stays = len(granted)
        while stays:
            need = sum(self.new_pages(slot, tokens) for slot, tokens in granted[:stays])
            if need <= len(self.free) + sum(len(slot.pages) for slot, _ in granted[stays:]):
                break
            stays -= 1
        assert stays or not granted, "the oldest request alone must always fit"
        for slot, _ in granted[stays:]:
            self.empty(slot)
            slot.request.status = Status.WAITING
        self.preemptions += len(granted) - stays
        return len(granted) - stays, sum(slot.computed for slot, _ in granted[stays:])

    def admit(self, budget: int) -> int:
        before = self.running()
        tokens = sum(slot.want for slot in before)
        spoken_for = sum(self.new_pages(slot, slot.want) for slot in before)
        admitted = 0
        for request in self.waiting():
            own = self.pages_of(len(request.tokens))
            ahead = len(before) + admitted  # each may soon begin a page
            fits = None in self.slots and tokens < budget and spoken_for + ahead + own <= len(self.free)
            if not fits:
                break
            request.status = Status.RUNNING
            self.slots[self.slots.index(None)] = OracleSlot(request)
            tokens += len(request.tokens)
            spoken_for += own
            admitted += 1
        return admitted

    def step(self, budget: int) -> OracleRecord:
        self.evict()
        preempted, discarded = self.preempt(budget)
        admitted = self.admit(budget)
        granted = {id(slot): tokens for slot, tokens in self.grant(budget)}
        count = len(self.slots)
        record = OracleRecord(
            [0] * count, [0] * count, [False] * count, [0] * count, [Finish.NOT] * count, running=0, waiting=0,
            admitted=admitted, preempted=preempted, discarded=discarded, pages_in_use=0, tokens_stored=0,
        )  # fmt: skip
        for index, slot in enumerate(self.slots):
            if slot is None:
                continue
            tokens = granted[id(slot)]
            need = self.new_pages(slot, tokens)
            assert need <= len(self.free), "pages were granted that are not there"
            taken = sorted(self.free)[:need]
            self.free -= set(taken)
            slot.pages += taken
            slot.computed += tokens
            record.uid[index] = slot.request.uid
            record.scheduled[index] = tokens
            if tokens and slot.want == 0:
                self.sample(slot.request, record, index)
        self.steps += 1
        self.computed_tokens += sum(record.scheduled)
        self.padded_tokens += budget - sum(record.scheduled)
        record.running = len(self.running())
        record.waiting = len(self.waiting())
        record.pages_in_use = sum(len(slot.pages) for slot in self.running())
        record.tokens_stored = sum(slot.computed for slot in self.running())
        return record

    def sample(self, request: OracleRequest, record: OracleRecord, index: int) -> None:
        preferred = self.decoder.following(request.tokens)
        if preferred is None:
            finish = Finish.ERROR
        else:
            banned = set(request.stop_ids) if len(request.tokens) < request.min_len else set()
            around = ((preferred + i) % self.decoder.vocab for i in range(self.decoder.vocab))
            token = next(t for t in around if t not in banned)
            request.tokens.append(token)
            record.sampled[index], record.token[index] = True, token
            finish = Finish.NOT
            if len(request.tokens) >= request.max_len:
                finish = Finish.LENGTH
            if token in request.stop_ids:
                finish = Finish.STOP
        if finish != Finish.NOT:
            request.status = Status.FINISHED
        record.finish[index] = finish

    def demand(self) -> int:
        """Tokens that the next step computes if no budget limits it."""
        before, slots = {id(r): r.status for r in self.rows if r}, list(self.slots)
        unlimited = len(self.rows) * (self.config.max_model_len or 0)
        self.admit(unlimited)
        total = sum(tokens for _, tokens in self.grant(unlimited))
        self.slots = slots
        for row in self.rows:
            if row:
                row.status = before[id(row)]
        return total
