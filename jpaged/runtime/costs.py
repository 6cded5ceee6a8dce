"""What computing and moving cost, by a few numbers of the machine: to choose between recomputing and swapping, and as
the clock of a simulation. An estimate, never a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.models.spec import ModelConfig
from jpaged.runtime import sizing
from pallas_kernels.cards import CARDS, card_of


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


def machine_of(device: jax.Device) -> Machine:
    """What is known of the machine of a JAX device.

    Raises:
        ValueError: nothing is.
    """
    if device.platform == "cpu":
        return MACHINES["cpu"]
    card = card_of(device.device_kind)
    if card is None:
        raise ValueError(
            f"what moving and computing cost on {device.device_kind!r} is not known here ({', '.join(MACHINES)} are): "
            "give swap_page_cost"
        )
    return MACHINES[card.name]


@dataclass(frozen=True)
class CostModel:
    """Seconds on one machine with one model: what takes longer of computing and of reading, as in a roofline."""

    machine: Machine
    weight_bytes: int  # that every step reads
    flops_per_token: float  # in products with weights
    flops_per_key: float  # of a token, for each key that it attends to
    bytes_per_token: int  # keys and values of one token

    @classmethod
    def of(cls, model: ModelConfig, dtype: str, machine: Machine) -> CostModel:
        """Of a model whose weights and pool are of `dtype`. Every token attends to all before it, also where the model
        has a sliding window, and has logits: both are more than is computed."""
        # Of a table of embeddings that is not the head as well, a step reads a row for each token.
        table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        return cls(
            machine,
            weight_bytes=sizing.weight_bytes(model, dtype) - table * sizing.dtype_bytes(dtype),
            flops_per_token=2.0 * (model.num_parameters - table),
            flops_per_key=4.0 * model.num_layers * model.num_heads * model.head_dim,
            bytes_per_token=sizing.bytes_per_token(model, dtype),
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
