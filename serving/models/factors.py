"""Numbers that products of a layer are multiplied by, as models have them whose widths were scaled."""

from __future__ import annotations

from dataclasses import dataclass, fields

from phasewise.serving.errors import ModelError


@dataclass(frozen=True)
class ProductFactors:
    """One factor for the outputs of each product of a layer; 1 changes nothing.

    No weight is multiplied by them: products of the stream read a norm that is, convolutions have taps that
    are, and what is read of a state is multiplied on its way back.
    """

    qkv: float = 1.0
    state_gate: float = 1.0
    state_values: float = 1.0
    state_keys: float = 1.0
    state_queries: float = 1.0
    state_times: float = 1.0
    state_out: float = 1.0
    gate: float = 1.0
    up: float = 1.0

    def check(self) -> None:
        """ModelError unless all are numbers that kernels can take."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 1e-6 <= value <= 1e6:
                raise ModelError(
                    f"the product {field.name} is multiplied by {value!r:.80}: a number from 1e-6 to 1e6"
                    " expected"
                )


NO_FACTORS = ProductFactors()
