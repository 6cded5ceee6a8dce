"""What computing and moving cost, by a few numbers of the machine: to choose between recomputing and swapping, and as
the clock of a simulation. An estimate, never a measurement."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.models.spec import ModelConfig
from jpaged.runtime import sizing
from pallas_kernels.cards import CARDS, card_of_device

_LOG = logging.getLogger("jpaged")


@dataclass(frozen=True)
class Machine:
    """A card, or a CPU, by what it does at best.

    Attributes:
        flops_per_s: of dense products.
        bytes_per_s: of the memory that holds weights and pool.
        bus_bytes_per_s: between that memory and the host's, one way.
        call_s: what a call of a compiled program takes beside its work.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    bus_bytes_per_s: float
    call_s: float


#: GPUs by their data sheets; 16 lanes of PCIe carry about four fifths of what they are named for. The CPU is the
#: two-core one that the numbers of ARCHITECTURE.md come from.
MACHINES = {
    **{
        name: Machine(name, card.flops_per_s, card.bytes_per_s, 25e9 if name == "a100" else 50e9, 2e-4)
        for name, card in CARDS.items()
    },
    "cpu": Machine("cpu", 1.4e11, 1.8e10, 5e9, 1e-3),
}


#: Bytes a second that a lane of PCIe carries, by generation: four fifths of what it is named for.
_LANE_BYTES_PER_S = {1: 0.2e9, 2: 0.4e9, 3: 0.79e9, 4: 1.57e9, 5: 3.15e9, 6: 6.3e9}


def machine_of(device: jax.Device) -> Machine:
    """The machine of a JAX device: one of `MACHINES`, or for another NVIDIA GPU what the driver tells of its memory and
    bus, with the rate of products that cards of its compute capability have.

    Raises:
        ValueError: the device is neither a CPU nor an NVIDIA GPU.
    """
    if device.platform == "cpu":
        return MACHINES["cpu"]
    card = card_of_device(device)
    if card is None:
        raise ValueError(
            f"what moving and computing cost is known of CPUs and of NVIDIA's GPUs, and {device.device_kind!r} is "
            "neither: give swap_page_cost"
        )
    if not card.estimated:
        return MACHINES[card.name]
    memory, bus = _driver_says(card.name)
    machine = Machine(card.name, card.flops_per_s, memory or card.bytes_per_s, bus or 12.5e9, 2e-4)
    estimated = [name for name, told in (("its memory's bandwidth", memory), ("its bus", bus)) if told is None]
    _LOG.log(
        logging.WARNING if estimated else logging.INFO,
        "costs on %s: %.0f GB/s of memory, %.0f GB/s of bus, %.0f TFLOP/s; estimated from compute capability %s: %s",
        card.name, machine.bytes_per_s / 1e9, machine.bus_bytes_per_s / 1e9, machine.flops_per_s / 1e12,
        ".".join(map(str, card.capability)), ", ".join([*estimated, "its rate of products"]),
    )  # fmt: skip
    return machine


def _driver_says(name: str) -> tuple[float | None, float | None]:
    """Bytes a second of the memory of the card called `name`, and of its bus, one way, as NVIDIA's driver tells them;
    None for what it does not tell. Cards of one name are alike, so the first of them is asked."""
    try:
        import pynvml
    except ImportError:  # a machine with JAX alone, as `jpaged.bench.gpu_check` needs
        return None, None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, None

    def ask(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except pynvml.NVMLError:  # not supported by this card
            return None

    try:
        cards = (ask(pynvml.nvmlDeviceGetHandleByIndex, i) for i in range(pynvml.nvmlDeviceGetCount()))
        card = next((card for card in cards if card is not None and ask(pynvml.nvmlDeviceGetName, card) == name), None)
        if card is None:
            return None, None
        bits = ask(pynvml.nvmlDeviceGetMemoryBusWidth, card)
        megahertz = ask(pynvml.nvmlDeviceGetMaxClockInfo, card, pynvml.NVML_CLOCK_MEM)
        generation = ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, card)
        lanes = ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, card)
    finally:
        pynvml.nvmlShutdown()
    memory = 2 * megahertz * 1e6 * bits / 8 if bits and megahertz else None  # two transfers a cycle
    bus = lanes * _LANE_BYTES_PER_S.get(generation, 6.3e9) if generation and lanes else None
    return memory, bus


@dataclass(frozen=True)
class CostModel:
    """Seconds on one machine with one model: what takes longer of computing and of reading, as in a roofline."""

    machine: Machine
    weight_bytes: int  # that every step reads
    flops_per_token: float  # in products with weights
    flops_per_key: float  # of a token, for each key that it attends to
    bytes_per_token: int  # keys and values of one token

    @classmethod
    def of(cls, model: ModelConfig, dtype: str, machine: Machine, *, kv_cache_dtype: str | None = None) -> CostModel:
        """Of a model whose weights are of `dtype` and whose pool is of `kv_cache_dtype` (None: of `dtype` too). Every
        token attends to all before it, also where the model has a sliding window, and has logits: both are more than
        is computed."""
        # Of a table of embeddings that is not the head as well, a step reads a row for each token.
        table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        return cls(
            machine,
            weight_bytes=sizing.weight_bytes(model, dtype) - table * sizing.dtype_bytes(dtype),
            flops_per_token=2.0 * (model.num_parameters - table),
            flops_per_key=4.0 * model.num_layers * model.num_heads * model.head_dim,
            bytes_per_token=sizing.bytes_per_token(model, kv_cache_dtype or dtype),
        )

    def step(self, tokens: Any, keys_read: Any, pairs: Any) -> Any:
        """Seconds of a step; arrays of float32 or numbers.

        Args:
            tokens: that it computes, padding included.
            keys_read: tokens whose keys and values its rows read, each row's counted once.
            pairs: of a query and a key that it attends to.
        """
        computing = (tokens * self.flops_per_token + pairs * self.flops_per_key) / self.machine.flops_per_s
        reading = (float(self.weight_bytes) + keys_read * self.bytes_per_token) / self.machine.bytes_per_s
        return self.machine.call_s + jnp.maximum(computing, reading)

    def recompute_token(self) -> float:
        """Seconds to compute a token again, in a step that is bound by computing."""
        return self.flops_per_token / self.machine.flops_per_s

    def move_page(self, page_size: int) -> float:
        """Seconds to move a page to the host or back."""
        return page_size * self.bytes_per_token / self.machine.bus_bytes_per_s
