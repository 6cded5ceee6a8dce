"""The scheduler again, in lists and dicts: what `jpaged.step` says it does, written without an array.

evict     what ended leaves its slot and row
          of those that are to begin with its pages the first gets the slot, and the pages of what it knows
exchange  before a burst, with a pool on the host: as preempt, but for pages that the burst may need; who goes keeps its
          pages there if that costs less and there is room; then the first of the queue who are there come in
preempt   the largest number of first requests stays whose new pages nobody holds, or only those who go; then the
          largest number with which the head of the queue comes in, if those who go all stand behind it
admit     in the order of the admission policy, while there are slots, something of the budget, and pages; with the
          pages that hold its first tokens; a fork when its parent has computed all that it knows but the last token,
          with the parent's full pages
schedule  one token each, in the order of the victim policy, then the rest of the budget, in that order; nothing for one
          who is about to compute the page that one before it has to compute; pages that hold nothing first, lowest
          first, then those used longest ago, the deepest first
sample    what the decoder prefers, unless it is banned
enter     full pages can be found; of equal ones, one, and who has another gives it back
attach    who runs and is at the end of a page gets the pages that hold its next tokens

No hashes here: pages are found by what they and all before them hold.
"""

from __future__ import annotations

import itertools
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace

from jpaged.config import EngineConfig
from jpaged.policy import by_priority, first_come_first_served, longest_prefix_hit_first, shortest_prompt_first
from jpaged.pool import CHUNK_PAGES
from jpaged.step import NO_REQUEST, Finish, Status
from jpaged.step.sharing.fork import COPIES
from jpaged.step.sharing.lookup import LOOKUP_PAGES
from support.stubs import HistoryDecoder


@dataclass
class OracleRequest:
    uid: int
    arrival: int
    tokens: list[int]
    max_len: int
    min_len: int
    stop_ids: tuple[int, ...]
    namespace: int = 0
    priority: int = 0
    num_prompt_tokens: int = 0
    status: Status = Status.WAITING
    cached_tokens: int = 0
    preempted: bool = False
    failed: bool = False
    parent: OracleRequest | None = None
    chunks: list[int] = field(default_factory=list)  # of the host's pool
    stored: int = 0  # tokens in them


@dataclass
class OracleSlot:
    request: OracleRequest
    num_computed_tokens: int = 0
    entered: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def want(self) -> int:
        return len(self.request.tokens) - self.num_computed_tokens


@dataclass
class OracleRecord:
    """As `StepRecord`; lists by slot."""

    uid: list[int]
    scheduled: list[int]
    sampled: list[bool]
    token: list[int]
    finish: list[int]
    cached_tokens: list[int]
    running: int = 0
    waiting: int = 0
    admitted: int = 0
    preempted: int = 0
    discarded: int = 0
    restored: int = 0
    left: dict[int, tuple[int, bool]] = field(default_factory=dict)  # by slot: uid, and whether its pages are kept
    recovered: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    pages_in_use: int = 0
    pages_cached: int = 0
    tokens_stored: int = 0


@dataclass
class OracleNotes:
    """What an exchange did."""

    left: dict[int, tuple[int, bool]] = field(default_factory=dict)
    discarded: int = 0
    restored: int = 0


@dataclass(frozen=True)
class Identity:
    """What a page holds that can be found: its request's tokens from the first to the end of the page."""

    namespace: int
    tokens: tuple[int, ...]


#: What policies say of a request, again.
POLICIES = {
    by_priority: lambda engine, request: request.priority,
    first_come_first_served: lambda engine, request: request.arrival,
    shortest_prompt_first: lambda engine, request: request.num_prompt_tokens,
    longest_prefix_hit_first: lambda engine, request: -engine.cached_tokens(request),
}


class OracleEngine:
    """An engine of `config` over a `HistoryDecoder`. `lookup_pages` is `share.LOOKUP_PAGES`, `copies` `fork.COPIES`."""

    def __init__(
        self, config: EngineConfig, decoder: HistoryDecoder, lookup_pages: int = LOOKUP_PAGES, copies: int = COPIES,
        num_chunks: int = 0,
    ):  # fmt: skip
        assert config.num_pages is not None
        self.config, self.decoder, self.copies = config, decoder, copies
        self.rows: list[OracleRequest | None] = [None] * (config.max_num_seqs + config.max_queue)
        self.slots: list[OracleSlot | None] = [None] * config.max_num_seqs
        self.all_pages = range(1, config.num_pages + 1)
        self.found: dict[Identity, int] = {}
        self.last_used = dict.fromkeys(self.all_pages, 0)
        self.lookup_pages = lookup_pages
        self.submitted = self.steps = self.computed_tokens = self.padded_tokens = self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0
        self.free_chunks = list(range(num_chunks))
        self.notes = OracleNotes()
        self.seen: Counter[str] = Counter()  # how often what is rare has happened

    # The host's part

    @property
    def free_rows(self) -> int:
        return sum(row is None for row in self.rows)

    def submit(
        self, uid, prompt, *, max_len, min_len=0, stop_ids=(), namespace=0, priority=0, parent=NO_REQUEST
    ) -> None:
        row = self.rows.index(None)
        self.rows[row] = OracleRequest(
            uid, uid, list(prompt), max_len, min_len, tuple(stop_ids), namespace, priority, len(prompt),
            parent=self.live(parent),
        )  # fmt: skip
        self.submitted += 1

    def fork(self, uid: int, new_uid: int) -> None:
        if parent := self.live(uid):
            tokens = [*parent.tokens]
            new = replace(
                parent, uid=new_uid, arrival=new_uid, tokens=tokens, parent=parent, status=Status.WAITING,
                cached_tokens=0, preempted=False, chunks=[], stored=0,
            )  # fmt: skip
            self.rows[self.rows.index(None)] = new
            self.submitted += 1

    def live(self, uid: int) -> OracleRequest | None:
        live = (r for r in self.rows if r and r.status in (Status.WAITING, Status.RUNNING))
        return next((request for request in live if request.uid == uid), None)

    def abort(self, uid: int) -> None:
        if request := self.live(uid):
            request.status = Status.ABORTED

    # The step's parts

    def running(self) -> list[OracleSlot]:
        """In the order in which they are served."""
        return sorted((s for s in self.slots if s), key=lambda s: (self.stands(s.request), s.request.arrival))

    def stands(self, request: OracleRequest) -> float:
        return POLICIES[self.config.victim](self, request)

    def waiting(self) -> list[OracleRequest]:
        queue = [r for r in self.rows if r and r.status == Status.WAITING and self.ready(r)]
        return sorted(queue, key=self.queues)

    def queues(self, request: OracleRequest) -> tuple[float, int]:
        return POLICIES[self.config.admission](self, request), request.arrival

    def slot_of(self, request: OracleRequest | None) -> OracleSlot | None:
        return next((slot for slot in self.slots if slot and slot.request is request), None)

    def ready(self, request: OracleRequest) -> bool:
        if request.parent is None:
            return True
        slot = self.slot_of(request.parent)
        if slot is None or slot.num_computed_tokens < len(request.tokens) - 1:
            return False
        return (
            not self.config.enable_prefix_caching or slot.entered == slot.num_computed_tokens // self.config.page_size
        )

    def cached_tokens(self, request: OracleRequest) -> int:
        columns = range(self.shareable(request))
        found = itertools.takewhile(lambda column: self.prefix(request, column) in self.found, columns)
        return self.config.page_size * len(list(found))

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def new_pages(self, slot: OracleSlot, tokens: int) -> int:
        return max(self.pages_of(slot.num_computed_tokens + tokens) - len(slot.pages), 0)

    # Pages

    @property
    def in_use(self) -> set[int]:
        return {page for slot in self.slots if slot for page in slot.pages}

    @property
    def cached(self) -> set[int]:
        return set(self.found.values()) - self.in_use

    @property
    def available(self) -> list[int]:
        """Pages that nobody uses, in the order in which they are handed out."""
        identity = {page: identity for identity, page in self.found.items()}
        unused = [page for page in self.all_pages if page not in self.in_use]
        cached = [page for page in unused if page in identity]
        cached.sort(key=lambda page: (self.last_used[page], -len(identity[page].tokens)))
        return [page for page in unused if page not in identity] + cached

    def prefix(self, request: OracleRequest, column: int) -> Identity:
        return Identity(request.namespace, tuple(request.tokens[: (column + 1) * self.config.page_size]))

    def shareable(self, request: OracleRequest) -> int:
        looks = self.config.enable_prefix_caching or request.parent is not None
        return (len(request.tokens) - 1) // self.config.page_size if looks else 0

    def lookup(self, asks: list[tuple[OracleRequest, list[int], int]]) -> list[list[int]]:
        """For each request, the pages it has, and how many more it asks for: those that are found; of a fork, those
        that its parent has."""
        left, answers = self.lookup_pages, []
        for request, pages, more in asks:
            found: list[int] = []
            if slot := self.slot_of(request.parent):
                answers.append(slot.pages[:more])
                left = max(left - more, 0)
                continue
            for column in range(len(pages), len(pages) + min(more, left)):
                page = self.found.get(self.prefix(request, column))
                if page is None or (column and not found and not self.holds(pages[-1], request, column - 1)):
                    break
                found.append(page)
            left = max(left - more, 0)
            answers.append(found)
        return answers

    def holds(self, page: int, request: OracleRequest, column: int) -> bool:
        return self.found.get(self.prefix(request, column)) == page

    def pin(self, slot: OracleSlot, found: list[int], record: OracleRecord) -> None:
        if not found:
            return
        request, tokens = slot.request, len(found) * self.config.page_size
        slot.pages += found
        slot.num_computed_tokens += tokens
        slot.entered = len(slot.pages)
        if request.preempted:
            self.seen["recovered"] += tokens
            record.recovered += tokens
        elif request.parent is None:
            request.cached_tokens += tokens
            record.prefix_hits += tokens
            self.prefix_hits += tokens

    def attach(self, record: OracleRecord) -> None:
        page_size = self.config.page_size
        slots = [slot for slot in self.slots if slot and slot.request.status == Status.RUNNING]
        asks = []
        for slot in slots:
            more = 0 if slot.num_computed_tokens % page_size else max(self.shareable(slot.request) - len(slot.pages), 0)
            asks.append((slot.request, slot.pages, more))
        for slot, found in zip(slots, self.lookup(asks), strict=True):
            self.pin(slot, found, record)
            self.seen["attached"] += len(found)

    def waits(self, slot: OracleSlot) -> bool:
        page_size = self.config.page_size
        column = slot.num_computed_tokens // page_size
        if slot.num_computed_tokens % page_size or column >= self.shareable(slot.request):
            return False
        return any(
            other.num_computed_tokens // page_size == column < len(other.request.tokens) // page_size
            and self.prefix(other.request, column) == self.prefix(slot.request, column)
            for other in itertools.takewhile(lambda other: other is not slot, self.running())
        )

    def enter(self, most: int) -> None:
        page_size, new = self.config.page_size, set()
        before = dict(self.found)
        for slot in (slot for slot in self.slots if slot):
            full = slot.num_computed_tokens // page_size if self.config.enable_prefix_caching else 0
            if slot.request.failed:
                continue
            columns = range(slot.entered, min(full, slot.entered + most))
            most -= len(columns)
            meets, stuck = True, False
            for column in columns:
                prefix = self.prefix(slot.request, column)
                rooted = column == 0 or self.holds(slot.pages[column - 1], slot.request, column - 1)
                meets = meets and prefix in before and rooted
                if meets:
                    self.seen["given back"] += 1
                    slot.pages[column] = before[prefix]
                    slot.entered += 1
                    continue
                self.seen["filled twice in a step"] += prefix in new
                stuck = stuck or prefix in new
                new.add(prefix)
                if not stuck:
                    if rooted:
                        self.found[prefix] = slot.pages[column]
                    slot.entered += 1

    # The step's parts

    def grant(self, budget: int) -> list[tuple[OracleSlot, int]]:
        running = self.running()
        granted = [0] * len(running)
        for index, slot in enumerate(running):
            waits = self.waits(slot)
            self.seen["waited"] += waits
            if slot.want > 0 and budget > 0 and not waits:
                granted[index] = 1
                budget -= 1
        for index, slot in enumerate(running):
            if granted[index]:
                more = min(slot.want - 1, budget)
                granted[index] += more
                budget -= more
        return list(zip(running, granted, strict=True))

    def empty(self, slot: OracleSlot) -> None:
        self.slots[self.slots.index(slot)] = None

    def evict(self) -> None:
        over = (Status.FINISHED, Status.ABORTED)
        for slot in self.running():
            if slot.request.status in over:
                self.hand_on(slot)
        for row in self.rows:
            if row and row.status in over and (orphans := self.forks_of(row)):
                self.adopt(orphans)
        for row in self.rows:
            if row and row.status in over:
                self.drop_chunks(row)
        self.rows = [None if row and row.status in over else row for row in self.rows]

    def forks_of(self, parent: OracleRequest) -> list[OracleRequest]:
        """Those that have not begun, the first of them first."""
        waiting = (r for r in self.rows if r and r.status == Status.WAITING and r.parent is parent)
        return sorted(waiting, key=lambda request: request.arrival)

    def adopt(self, orphans: list[OracleRequest]) -> None:
        orphans[0].parent = None
        for other in orphans[1:]:
            other.parent = orphans[0]

    def hand_on(self, slot: OracleSlot) -> None:
        orphans = self.forks_of(slot.request)
        if not orphans:
            self.empty(slot)
            return
        self.seen["inherited"] += 1
        heir, page_size = orphans[0], self.config.page_size
        slot.num_computed_tokens = min(slot.num_computed_tokens, len(heir.tokens) - 1)
        full = slot.num_computed_tokens // page_size
        if slot.num_computed_tokens % page_size:
            last = slot.pages[full]
            others = (page for other in self.slots if other and other is not slot for page in other.pages)
            if last in self.found.values() or last in others:
                slot.num_computed_tokens = full * page_size
        slot.pages = slot.pages[: self.pages_of(slot.num_computed_tokens)]
        slot.entered = min(slot.entered, full)
        slot.request, heir.status = heir, Status.RUNNING
        self.adopt(orphans)

    # The host's pool

    def drop_chunks(self, request: OracleRequest) -> None:
        self.free_chunks = sorted(self.free_chunks + request.chunks)
        request.chunks, request.stored = [], 0

    def exchange(self, ahead: int) -> None:
        self.notes = OracleNotes()
        self.evict()
        before = {id(slot.request): (index, slot) for index, slot in enumerate(self.slots) if slot}
        order = [slot.request for slot in self.running()]
        named = Counter(page for slot in self.running() for page in slot.pages)
        wanted = []
        for slot in self.running():
            known = min(len(slot.request.tokens) + ahead - 1, slot.request.max_len)
            wanted.append((slot, max(known - slot.num_computed_tokens, 0)))
        lost = self.make_room(wanted)
        lost += self.make_way(self.unlimited, from_host=True)
        self.preemptions += len(lost)
        room = len(self.free_chunks)
        for request in reversed(order):
            index, slot = before[id(request)]
            if slot not in lost:
                continue
            page_size = self.config.page_size
            alone = sum(
                min(page_size, slot.num_computed_tokens - column * page_size)
                for column, page in enumerate(slot.pages)
                if named[page] == 1
            )
            count = -(-len(slot.pages) // CHUNK_PAGES)
            assert self.config.swap_page_cost is not None
            cheaper = self.config.swap_page_cost * len(slot.pages) <= alone
            if cheaper:
                room -= count  # also if it does not fit: nobody overtakes
            kept = cheaper and room >= 0 and count > 0
            if kept:
                request.chunks, self.free_chunks = self.free_chunks[:count], self.free_chunks[count:]
                request.stored = slot.num_computed_tokens
            else:
                self.notes.discarded += slot.num_computed_tokens
            self.seen["kept on the host"] += kept
            self.seen["too many for the host"] += cheaper and room < 0
            self.seen["cheaper to compute"] += not cheaper
            self.notes.left[index] = request.uid, kept
        self.bring_back()

    def bring_back(self) -> None:
        there = [slot for slot in self.slots if slot]
        self.admit(self.unlimited, OracleRecord([], [], [], [], [], []), from_host=True)
        for slot in self.slots:
            if slot is None or slot in there:
                continue
            stored = slot.request.stored
            need = max(self.pages_of(stored) - len(slot.pages), 0)
            taken = self.available[:need]
            assert len(taken) == need
            self.forget(taken)
            slot.pages += taken
            slot.num_computed_tokens = max(slot.num_computed_tokens, stored)
            self.drop_chunks(slot.request)
            self.notes.restored += 1
            self.seen["brought back"] += 1

    @property
    def unlimited(self) -> int:
        return len(self.rows) * (self.config.max_model_len or 0)

    # The step's parts, again

    def preempt(self, budget: int) -> tuple[int, int]:
        """How many lost their slots, and the tokens they had computed."""
        lost = self.make_room(self.grant(budget))
        lost += self.make_way(budget)
        self.preemptions += len(lost)
        return len(lost), sum(slot.num_computed_tokens for slot in lost)

    def make_room(self, granted: list[tuple[OracleSlot, int]]) -> list[OracleSlot]:
        stays = len(granted)
        while stays:
            need = sum(self.new_pages(slot, tokens) for slot, tokens in granted[:stays])
            if need <= len(self.all_pages) - len({page for slot, _ in granted[:stays] for page in slot.pages}):
                break
            stays -= 1
        assert stays or not granted, "the first request alone must always fit"
        lost = [slot for slot, _ in granted[stays:]]
        self.send_back(lost)
        return lost

    def make_way(self, budget: int, *, from_host: bool = False) -> list[OracleSlot]:
        if not from_host and any(request.stored for request in self.waiting()[:1]):
            return []
        lost = self.in_the_way(budget)
        self.seen["made way"] += len(lost)
        self.send_back(lost)
        return lost

    def send_back(self, slots: list[OracleSlot]) -> None:
        for slot in slots:
            self.empty(slot)
            slot.request.status, slot.request.preempted = Status.WAITING, True

    def in_the_way(self, budget: int) -> list[OracleSlot]:
        """The fewest without whom the head of the queue comes in, and who all stand behind it."""
        running, queue = self.running(), self.waiting()
        for stay in range(len(running), -1, -1) if queue else ():
            if any(slot.request is queue[0].parent for slot in running[stay:]):
                break
            if any(self.stands(slot.request) <= self.stands(queue[0]) for slot in running[stay:]):
                break
            if any(self.queues(slot.request) < self.queues(queue[0]) for slot in running[stay:]):
                self.seen["would come in again"] += 1
                break
            tokens = sum(slot.want for slot in running[:stay])
            pages = sum(self.new_pages(slot, slot.want) for slot in running[:stay])
            pages += stay + self.pages_of(len(queue[0].tokens))
            held = {page for slot in running[:stay] for page in slot.pages}
            if stay < len(self.slots) and tokens < budget and pages <= len(self.all_pages) - len(held):
                return running[stay:]
        return []

    def admit(self, budget: int, record: OracleRecord, *, from_host: bool = False) -> None:
        before = self.running()
        tokens = sum(slot.want for slot in before)
        spoken_for = sum(self.new_pages(slot, slot.want) for slot in before)
        in_use, asked = self.in_use, 0
        queue = self.waiting()[: len(self.slots)]
        answers = self.lookup([(request, [], self.shareable(request)) for request in queue])
        entering, copies = [], 0
        for request, found in zip(queue, answers, strict=True):
            asked += self.shareable(request)
            own = self.pages_of(len(request.tokens)) - len(set(found) & in_use)
            ahead = len(before) + len(entering)  # each may soon begin a page
            self.seen["left out of a lookup"] += asked > self.lookup_pages
            computed = len(found) * self.config.page_size if request.parent is None else len(request.tokens) - 1
            copies += computed % self.config.page_size > 0
            self.seen["too many copies"] += copies > self.copies
            if (request.stored > 0) != from_host:
                break
            looked_up = request is queue[0] or asked <= self.lookup_pages
            fits = ahead < len(self.slots) and tokens < budget and looked_up and copies <= self.copies
            if not fits or spoken_for + ahead + own > len(self.all_pages) - len(in_use):
                break
            tokens += len(request.tokens) - computed
            spoken_for += own
            entering.append((request, found))
        for request, found in entering:
            request.status = Status.RUNNING
            slot = OracleSlot(request)
            self.slots[self.slots.index(None)] = slot
            if not request.preempted and request.parent is None:
                record.prefix_queries += len(request.tokens)
                self.prefix_queries += len(request.tokens)
            self.pin(slot, found, record)
            if request.parent:
                slot.num_computed_tokens = len(request.tokens) - 1
                self.seen["forked"] += 1
                self.seen["copied"] += slot.num_computed_tokens % self.config.page_size > 0
                request.parent = None
        record.admitted = len(entering)

    def step(self, budget: int) -> OracleRecord:
        count = len(self.slots)
        record = OracleRecord(
            [NO_REQUEST] * count, [0] * count, [False] * count, [0] * count, [Finish.NOT] * count, [0] * count
        )  # fmt: skip
        self.evict()
        record.left, record.restored = self.notes.left, self.notes.restored
        record.preempted, record.discarded = self.preempt(budget)
        record.preempted += len(record.left)
        record.discarded += self.notes.discarded
        self.notes = OracleNotes()
        self.admit(budget, record)
        granted = self.within_pages(self.grant(budget))
        most = min(min(budget, count) + budget // self.config.page_size, len(self.all_pages))
        for index, slot in enumerate(self.slots):
            if slot is None:
                continue
            tokens = granted[id(slot)]
            need = self.new_pages(slot, tokens)
            taken = self.available[:need]
            self.seen["evicted"] += len(self.cached.intersection(taken))
            assert len(taken) == need, "pages were granted that are not there"
            self.forget(taken)
            slot.pages += taken
            slot.num_computed_tokens += tokens
            record.uid[index] = slot.request.uid
            record.scheduled[index] = tokens
            record.cached_tokens[index] = slot.request.cached_tokens
            if tokens:
                self.sample(slot, record, index)
        self.steps += 1
        self.computed_tokens += sum(record.scheduled)
        self.padded_tokens += budget - sum(record.scheduled)
        self.enter(most)
        self.attach(record)
        for page in self.in_use:
            self.last_used[page] = self.steps
        record.running = len(self.running())
        record.waiting = sum(row is not None and row.status == Status.WAITING for row in self.rows)
        record.pages_in_use = len(self.in_use)
        record.pages_cached = len(self.cached)
        fill = {
            page: min(self.config.page_size, slot.num_computed_tokens - column * self.config.page_size)
            for slot in self.running()
            for column, page in enumerate(slot.pages)
        }
        record.tokens_stored = sum(fill.values())
        return record

    def forget(self, pages: list[int]) -> None:
        self.found = {identity: page for identity, page in self.found.items() if page not in pages}

    def within_pages(self, granted: list[tuple[OracleSlot, int]]) -> dict[int, int]:
        """By slot's id, the tokens whose pages are there, first ones first."""
        left, tokens = len(self.available), {}
        for slot, granted_tokens in granted:
            pages = min(self.new_pages(slot, granted_tokens), left)
            left -= pages
            tokens[id(slot)] = min(
                granted_tokens, (len(slot.pages) + pages) * self.config.page_size - slot.num_computed_tokens
            )
            self.seen["cut for want of pages"] += tokens[id(slot)] < granted_tokens
        return tokens

    def sample(self, slot: OracleSlot, record: OracleRecord, index: int) -> None:
        request = slot.request
        preferred = self.decoder.following(request.tokens[: slot.num_computed_tokens])
        if preferred is None:
            finish, request.failed = Finish.ERROR, True
            for orphan in self.forks_of(request):
                orphan.parent = None
        elif slot.want:
            return
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
        other = deepcopy(self)
        other.admit(self.unlimited, OracleRecord([], [], [], [], [], []))
        return sum(tokens for _, tokens in other.grant(self.unlimited))
