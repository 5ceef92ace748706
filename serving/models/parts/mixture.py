"""Mixtures of experts: a router gives each row to some of a layer's feed-forward layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phasewise.cython_kernels.division import columns
from phasewise.cython_kernels.packing import PANEL, PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.fields import check_factor, check_whole
from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.experts import LOGISTIC, SOFTMAX, SPARSE_MIXER, Experts
from phasewise.serving.models.parts.feed_forward import FeedForward
from phasewise.serving.models.parts.site import ActivationArena, LayerPart, Product, ReadRows, Site

STACKS = (".experts_gate_up", ".experts_down")  # weights of all experts of a layer
MOST_EXPERTS, MOST_CHOSEN = 1024, 32
EXPERT_NORMS = ("router_norm", "experts_norm", "shared_post_norm", "experts_post_norm")


@dataclass(frozen=True)
class Mixture(LayerPart):
    """The experts of one layer, each of which is a feed-forward layer like `expert`, of the stream's rows of
    `hidden` numbers, or of products of them."""

    experts: Experts
    expert: FeedForward
    hidden: int

    def __post_init__(self) -> None:
        experts, count, chosen = self.experts, self.experts.count, self.experts.chosen
        check_whole("the number of experts", count, 1, MOST_EXPERTS)
        check_whole(
            f"the number of experts, of {count}, that compute a token", chosen, 1, min(count, MOST_CHOSEN)
        )
        ways = SOFTMAX, LOGISTIC, SPARSE_MIXER
        if experts.scores not in ways:
            raise ModelError(f"scores of experts by {experts.scores!r:.60}: {', '.join(ways)} can run")
        if experts.scores == SPARSE_MIXER and (
            experts.choice_bias or experts.groups != 1 or experts.normalised
        ):
            raise ModelError("experts scored by sparse_mixer run without biases of choices, groups and sums")
        if experts.biases and not self.expert.form.gated:
            raise ModelError("experts with biases whose feed-forward layers have no gate cannot run")
        check_whole("the size of rows that experts read", experts.latent, 0, self.hidden)
        has_more = experts.biases or experts.shared_gate or experts.latent
        if experts.own_norms and (not experts.shared_ffn or has_more):
            raise ModelError(
                "experts with norms of their own run beside a shared one without a gate or widths"
            )
        check_factor("the factor of experts", experts.scale)
        if self.expert.vectors or len(self.expert.into) != 1:
            raise ModelError("experts whose products have biases, numbers or factors of their own cannot run")
        self._check_groups()

    def _check_groups(self) -> None:
        experts, groups, chosen = self.experts, self.experts.groups, self.experts.chosen_groups
        if type(groups) is not int or groups < 1 or experts.count % groups:
            raise ModelError(f"{experts.count} experts do not divide into {groups!r:.80} groups")
        check_whole(f"the number of groups, of {groups}, that are chosen", chosen, 1, groups)
        of_group = experts.count // groups
        if not 1 <= experts.group_best <= of_group or experts.chosen > chosen * of_group:
            raise ModelError(
                f"{experts.chosen} experts of the best {chosen} groups by their {experts.group_best} best:"
                f" a group has {of_group}"
            )

    @property
    def products(self) -> tuple[Product, ...]:
        expert = self.expert
        (into,), numbers = expert.into, range(self.experts.count)
        into_all = {f"experts.{e}.{part}": rows for e in numbers for part, rows in into.outputs.items()}
        down_all = {f"experts.{e}.down": expert.hidden for e in numbers}
        latent = (self.latent_in, self.latent_out) if self.experts.latent else ()
        return (
            Product("router", self.hidden, {"router": self.experts.count}, is_native=True),
            *latent,
            Product("experts_gate_up", expert.hidden, into_all, is_stack=True),
            Product("experts_down", expert.width, down_all, is_stack=True),
        )

    @property
    def latent_in(self) -> Product:
        return Product.alone("latent_in", self.experts.latent, self.hidden)

    @property
    def latent_out(self) -> Product:
        return Product.alone("latent_out", self.hidden, self.experts.latent)

    @property
    def vectors(self) -> dict[str, int]:
        experts, hidden, width = self.experts, self.expert.hidden, self.expert.width
        own = {"choice_bias": experts.count} if experts.choice_bias else {}
        if experts.own_norms:
            own |= {**dict.fromkeys(EXPERT_NORMS, hidden), "expert_factors": experts.count}
        if experts.biases:
            sizes = {"gate_bias": width, "up_bias": width, "down_bias": hidden}
            own["router_bias"] = experts.count
            own |= {f"experts.{e}.{name}": n for e in range(experts.count) for name, n in sizes.items()}
        return own

    @property
    def joined(self) -> dict[str, tuple[str, ...]]:
        if not self.experts.biases:
            return {}
        stacks = {"gate_up_bias": ("gate_bias", "up_bias"), "down_bias": ("down_bias",)}
        numbers = range(self.experts.count)
        return {
            whole: tuple(f"experts.{e}.{part}" for e in numbers for part in parts)
            for whole, parts in stacks.items()
        }

    def add(self, site: Site, reads: ReadRows, arena: ActivationArena, rows: Rows) -> None:
        """Add the operations that route rows and compute the outputs of their experts, into `arena.given`."""
        experts, program, router = self.experts, site.program, arena.router
        routed, own = reads, reads
        if experts.own_norms:
            routed = _normed(site, reads, "router_norm", 1 / math.sqrt(self.expert.hidden))
            own = _normed(site, reads, "experts_norm")
        site.add(self.products[0], routed, router, rows=rows)
        if experts.latent:
            site.add(self.latent_in, reads, arena.summed, rows=rows)
            own = ReadRows(arena.summed)
        if experts.biases:
            program.adjust(experts.count, *router, *router, bias=site.vector("router_bias"), rows=rows)
        choice_bias, factors = site.vector("choice_bias"), site.vector("expert_factors")
        program.route(experts, *router, rows=rows, choice_bias=choice_bias, factors=factors)
        up, down = (self._stack(site, name) for name in STACKS)
        site.linears.add_experts(experts, *up, own.options(), own.source, arena.gate_up, rows=rows)
        between = {**self.expert.between(site), "bias": site.vector("gate_up_bias")}
        between.pop("sparsity", None)
        site.linears.add_experts(experts, *down, between, arena.gate_up, arena.given, rows=rows)

    def add_sum(self, site: Site, arena: ActivationArena, stream: Place, rows: Rows) -> None:
        """Add the operations that add the sum of the experts' outputs, or a product of it, to the stream."""
        bias, latent, summed = site.vector("down_bias"), self.experts.latent, arena.summed
        target, given = summed if latent else stream, arena.given
        width = self.expert.hidden
        site.program.combine(self.experts, width, *given, *target, bias=bias, rows=rows, add=not latent)
        if latent:
            parts = site.parts(self.latent_out)
            site.linears.add(parts, ReadRows(summed).options(), summed, stream, add=True, rows=rows)

    def add_normed_sum(
        self, site: Site, given: Place, summed: Place, shared: Place, stream: Place, rows: Rows, scale: float
    ) -> None:
        """Add norm(norm(sum of the experts' outputs) + norm(shared output)) to the stream, all of it times
        `scale`. `shared`: the place of the shared layer's output, which the sum replaces."""
        hidden, program = self.expert.hidden, site.program
        program.combine(self.experts, hidden, *given, *summed, rows=rows, add=False)
        program.adjust(hidden, *shared, *shared, norm=site.vector("shared_post_norm"), rows=rows)
        norm = site.vector("experts_post_norm")
        program.adjust(hidden, *summed, *shared, norm=norm, add=True, rows=rows)
        norm = site.vector("ffn_post_norm")
        program.adjust(hidden, *shared, *stream, norm=norm, add=True, rows=rows, scale=scale)

    def _stack(self, site: Site, name: str) -> tuple[PackedWeight, PackedWeight]:
        """The weights of all experts, and of the first one."""
        stack = site.weight(name[1:])
        return stack, first_expert(stack, self.experts, site.stem + name[1:])


def first_expert(stack: PackedWeight, experts: Experts, name: str) -> PackedWeight:
    """The first expert's weight of a stack. Raises ModelError where experts begin within a panel."""
    if stack.n % (experts.count * PANEL):
        raise ModelError(
            f"a model has {experts.count} experts with {stack.n} outputs in all in {name}:"
            f" a multiple of {PANEL} for each can run"
        )
    first = columns(stack, 0, stack.n // experts.count // PANEL)
    assert first is not None
    return first


def _normed(site: Site, reads: ReadRows, name: str, factor: float = 1.0) -> ReadRows:
    """The stream behind the norm `name`, times `factor`."""
    weights = site.needed(name)
    return ReadRows(reads.source, weights * np.float32(factor) if factor != 1 else weights, reads.eps)
