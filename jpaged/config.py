"""The engine's fixed sizes: everything that decides a compiled shape."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from jpaged.checks import integer, number
from jpaged.policy import Policy, by_priority, name_of

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine. All of them are static shapes of the compiled step; None means "choose for me",
    and `LLM` and `Engine` fill it in from the model and the device before anything is compiled.

    Args:
        page_size: token slots in a page.
        num_pages: pages of the pool that requests can use (one scratch page is added); None: from
            `pool_bytes`, or from the device's memory.
        pool_bytes: bytes for keys and values, an alternative to `num_pages`.
        max_num_seqs: slots, that is, requests that run at the same time; None: 64 on a CPU, and on a GPU as many as its
            memory and the model suggest, up to 1,024; see `jpaged.runtime.resolve`.
        max_num_batched_tokens: the most tokens one step computes; None: 256 on a CPU, up to 16,384 on a GPU.
        max_model_len: the most tokens (prompt and output) of one request; None: what the model allows, or
            what the pool holds where that is less.
        max_queue: requests that can wait on the device beside those that run; more wait on the host. None: as many as
            there are slots, at least 64.
        dtype: of weights and activations: "float32", "bfloat16", "float16", or "auto" (float32 on a CPU, bfloat16
            elsewhere).
        kv_cache_dtype: of the keys and values in the pool: "float32", "bfloat16", "float16", or "auto", as `dtype`.
            Attention's products are computed in it.
        seed: from which requests without a seed of their own draw one.
        gpu_memory_utilization: on a GPU, the share of its memory that weights, pool and the compiled step's
            temporaries may take together; in (0, 1].
        token_budgets: sizes that the step can be compiled for; one that holds the work is run. None: 1, 4, and 2 or 3
            times a power of two from 8 (8, 16, 24, 32, 48, 64, ...), up to `max_num_batched_tokens`.
        steps_per_burst: steps that one device call runs where no long prompt is waiting; None: 8 on a GPU, where a
            call costs more than a small step, and 1 on a CPU.
        async_scheduling: choose the size of the next step before the last has ended, from what the host foresees, so
            that the device waits for nothing; else the device says how much there is to do when a burst ends. None:
            True, but on a CPU, where a step that is larger than needed costs more than the wait. It changes no token.
        enable_prefix_caching: whether requests use full pages that others, or earlier ones, have computed. It
            changes no token.
        preemption: what becomes of the pages of a request that must make room. "recompute": nothing, it computes them
            again; "swap": they wait in a pool on the host, as long as there is room; "auto": what costs less, for each
            request. It changes no token.
        swap_space_bytes: of the host's pool, where preemption is not "recompute"; None: those of the device's, at most
            4 GiB. It is pinned where the platform does that.
        swap_page_cost: with "auto", what moving a page to the host and back costs, in tokens that are computed in the
            same time; None: by what is known of the machine and the model, see `jpaged.runtime.costs`.
        admission: which request of the queue is admitted first, a policy of `jpaged.policy` or your own.
        victim: which running request is preempted last, and is served first; a policy as well.
        trace: keep what every step decides, and all inputs of the engine, in `LLM.trace`: for pictures, and to
            replay it. It changes no token, and grows with every step.
        compilation_cache: keep compiled programs for the next process, in the user's cache directory, where JAX's own
            settings do not name another place or switch this off; see `jpaged.runtime.compilation_cache`.

    Raises:
        ValueError: naming the field, the value given, and what is allowed.
    """

    page_size: int = 16
    num_pages: int | None = None
    pool_bytes: int | None = None
    max_num_seqs: int = None  # type: ignore[assignment]
    max_num_batched_tokens: int = None  # type: ignore[assignment]
    max_model_len: int | None = None
    max_queue: int = None  # type: ignore[assignment]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    token_budgets: tuple[int, ...] | None = None
    steps_per_burst: int | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool = True
    preemption: Literal["recompute", "swap", "auto"] = "recompute"
    swap_space_bytes: int | None = None
    swap_page_cost: float | None = None
    admission: Policy = by_priority
    victim: Policy = by_priority
    trace: bool = False
    compilation_cache: bool = True

    def __post_init__(self):
        self._check("page_size", 1, optional=False)
        for name in (
            "num_pages", "pool_bytes", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queue",
            "steps_per_burst", "swap_space_bytes",
        ):  # fmt: skip
            self._check(name, 1, optional=True)
        self._check("seed", 0, optional=False)
        if self.num_pages is not None and self.pool_bytes is not None:
            raise ValueError(f"give num_pages ({self.num_pages}) or pool_bytes ({self.pool_bytes}), not both")
        for name in ("dtype", "kv_cache_dtype"):
            if (value := getattr(self, name)) not in ("auto", *DTYPES):
                raise ValueError(f"{name} must be 'auto' or one of {DTYPES}, got {value!r}")
        for name in ("enable_prefix_caching", "trace", "compilation_cache"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.async_scheduling not in (None, True, False):
            raise ValueError(f"async_scheduling must be True, False or None, got {self.async_scheduling!r}")
        self._check_preemption()
        for name in ("admission", "victim"):
            if not callable(policy := getattr(self, name)):
                raise ValueError(f"{name} must be a policy, a function as in jpaged.policy; got {policy!r}")
        share = self._number("gpu_memory_utilization")
        if share is None or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.token_budgets is not None:
            try:
                budgets = tuple(integer(size) for size in self.token_budgets)
            except TypeError:
                raise ValueError(f"token_budgets must be increasing counts, got {self.token_budgets!r}") from None
            object.__setattr__(self, "token_budgets", budgets)
            if not budgets or list(budgets) != sorted(set(budgets)) or budgets[0] < 1:
                raise ValueError(f"token_budgets must be increasing counts, got {budgets}")
            if self.max_num_batched_tokens is None:
                object.__setattr__(self, "max_num_batched_tokens", budgets[-1])
            if budgets[-1] != self.max_num_batched_tokens:
                raise ValueError(
                    f"the last of token_budgets ({budgets[-1]}) must be max_num_batched_tokens "
                    f"({self.max_num_batched_tokens})"
                )

    def _check_preemption(self):
        if self.preemption not in (kinds := ("recompute", "swap", "auto")):
            raise ValueError(f"preemption must be one of {kinds}, got {self.preemption!r}")
        if self.preemption == "recompute" and self.swap_space_bytes is not None:
            raise ValueError(
                f"swap_space_bytes={self.swap_space_bytes} is of use with preemption='swap' or 'auto' only; it is "
                "'recompute'"
            )
        if self.swap_page_cost is None:
            return
        if (cost := self._number("swap_page_cost")) is None or not cost >= 0:
            raise ValueError(f"swap_page_cost must be a number of at least 0 or None, got {self.swap_page_cost!r}")
        if self.preemption != "auto":
            raise ValueError(f"swap_page_cost={cost} is of use with preemption='auto' only; it is {self.preemption!r}")

    def _number(self, name: str) -> float | None:
        """The field as a Python float; None: it is no number."""
        try:
            found = number(getattr(self, name))
        except TypeError:
            return None
        object.__setattr__(self, name, found)
        return found

    def _check(self, name: str, least: int, *, optional: bool):
        value = getattr(self, name)
        if optional and value is None:
            return
        allowed = f"an integer of at least {least}" + (" or None" if optional else "")
        try:
            found = integer(value)
        except TypeError:
            found = None
        if found is None or found < least:
            raise ValueError(f"{name} must be {allowed}, got {value!r}")
        object.__setattr__(self, name, found)

    def for_platform(self, platform: str) -> EngineConfig:
        """This with what depends on the platform ("cpu", "gpu") filled in: `dtype`, `steps_per_burst`
        and `async_scheduling`; on a CPU also the sizes of a step, to which its memory and the model do not matter."""
        on_cpu = platform == "cpu"
        if on_cpu:
            slots = self.max_num_seqs or min(64, self.max_num_batched_tokens or 64)
            tokens = self.max_num_batched_tokens or max(256, slots)
            self = replace(
                self, max_num_seqs=slots, max_num_batched_tokens=tokens, max_queue=self.max_queue or max(64, slots)
            )
        dtype = self.dtype if self.dtype != "auto" else "float32" if on_cpu else "bfloat16"
        return replace(
            self,
            dtype=dtype,
            steps_per_burst=self.steps_per_burst or (1 if on_cpu else 8),
            async_scheduling=not on_cpu if self.async_scheduling is None else self.async_scheduling,
        )

    @property
    def pool_dtype(self) -> str:
        """The dtype of the pool. Needs `dtype` to be set where `kv_cache_dtype` is "auto"."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def budgets(self) -> tuple[int, ...]:
        """The compiled token budgets, smallest first."""
        if self.token_budgets is not None:
            return self.token_budgets
        if (top := self.max_num_batched_tokens) is None:
            raise ValueError("max_num_batched_tokens is not set yet; LLM and Engine set it for the device")
        # Multiples of 8 above the smallest: a product with 12 columns takes longer than one with 16.
        sizes = {1, 4, 8} | {times * 2**e for e in range(3, top.bit_length()) for times in (2, 3)}
        return (*sorted(size for size in sizes if size < top), top)

    @property
    def max_pages_per_seq(self) -> int:
        """Columns of the page table. Needs `max_model_len` to be set."""
        if self.max_model_len is None:
            raise ValueError("max_model_len is not set yet; LLM and Engine set it from the model and the pool")
        return -(-self.max_model_len // self.page_size)

    def to_json(self) -> dict[str, Any]:
        """The fields, in values that JSON has: policies by their full names."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: name_of(value) if callable(value) else value for name, value in values.items()}

    def __repr__(self) -> str:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        shown = ", ".join(f"{name}={getattr(v, '__name__', repr(v)) if callable(v) else repr(v)}" for name, v in values)
        return f"EngineConfig({shown})"
