"""Time that keys and values take from one machine to another (Splitwise IV-C, Fig. 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phasewise.serving.scheduling.scheduler_terms import LAYERWISE_ABOVE_TOKENS


@dataclass(frozen=True, slots=True)
class Link:
    """The outgoing link of a machine. Transfers follow one another; each has the whole bandwidth."""

    bytes_per_s: float
    latency_s: float = 0.0
    layerwise_above_tokens: int = LAYERWISE_ABOVE_TOKENS
    """Prompt tokens above which keys and values are sent layer by layer while they are computed; shorter
    prompts are sent when they are done. The paper has 512 (VI-A)."""

    def to(self, other: Link) -> Link:
        """The link between two machines: the slower of their two decides."""
        return Link(
            min(self.bytes_per_s, other.bytes_per_s),
            max(self.latency_s, other.latency_s),
            self.layerwise_above_tokens,
        )


class Prompt(NamedTuple):
    """A prompt to send: its length, and when it was computed."""

    n_tokens: int
    n_bytes: int
    n_layers: int
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """The instants of a transfer: when the link is taken, and when the last byte has arrived."""

    begin_s: float
    link_free_s: float
    arrival_s: float


def transfer(link: Link, prompt: Prompt, granted_s: float, free_s: float) -> Transfer:
    """The transfer of a computed prompt whose target had a block from `granted_s`, on a link free at
    `free_s`.

    Layer by layer: layer i of L is there to be sent when i / L of the prompt's time has passed. The
    layers leave in order, so the last byte leaves when the link has sent all of them, and not
    before the last layer has been computed and sent.
    """
    whole_s = prompt.n_bytes / link.bytes_per_s
    if prompt.n_tokens <= link.layerwise_above_tokens:
        begin_s = max(prompt.end_s, granted_s, free_s)
        left_s = begin_s + whole_s
    else:
        first_layer_s = prompt.start_s + (prompt.end_s - prompt.start_s) / prompt.n_layers
        begin_s = max(first_layer_s, granted_s, free_s)
        left_s = max(begin_s + whole_s, prompt.end_s + whole_s / prompt.n_layers)
    return Transfer(begin_s, left_s, left_s + link.latency_s)
