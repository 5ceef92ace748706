"""Latent attention: one vector of each token that all heads share, in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.cython_kernels.division import columns
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.part import Product
from phasewise.serving.models.parts.site import Mixer, MixingRows, ReadRows, Site

MOST_NUMBERS, PANEL = 576, 16
LARGEST_RANK, LARGEST_DIM = 1 << 15, 1 << 10
STACKS = (".k_b", ".v_b")  # weights of all heads of a layer
LATENT_KV_FORMATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class LatentAttention:
    """Attention of the config's heads over vectors of `vector` numbers, which are its `head_dim`.

    What a token keeps is the first `kv_rank` numbers of a product of the stream, normalised, and `rope_dim`
    numbers more, turned. A head's query meets the first ones after a product with its own weight `k_b`, the
    others as it is; what it reads of the first ones goes through its weight `v_b`.
    """

    kv_rank: int
    rope_dim: int
    key_dim: int
    """Numbers of a head's query that are not turned."""
    value_dim: int
    """Numbers of a head's value."""
    q_rank: int = 0
    """Queries are a product of as many numbers, normalised, which are a product of the stream; 0: of the
    stream."""
    norm_eps: float = 1e-6

    def check(self, n_kv_heads: int, head_dim: int) -> None:
        """ModelError unless the kernels can run it."""
        sizes = {
            "kv_rank": (PANEL, MOST_NUMBERS),
            "rope_dim": (2, MOST_NUMBERS),
            "key_dim": (1, LARGEST_DIM),
            "value_dim": (PANEL, LARGEST_DIM),
            "q_rank": (0, LARGEST_RANK),
        }
        for name, (least, most) in sizes.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ModelError(
                    f"latent attention with {name} = {value!r:.80}: a whole number from {least} to {most}"
                    " expected"
                )
        if self.kv_rank % PANEL or self.value_dim % PANEL or self.rope_dim % 2:
            raise ModelError(
                f"latent vectors of {self.kv_rank} and {self.rope_dim} numbers with values of"
                f" {self.value_dim}: multiples of {PANEL}, 2 and {PANEL} can run"
            )
        if self.vector > MOST_NUMBERS:
            raise ModelError(f"latent vectors of {self.vector} numbers; at most {MOST_NUMBERS} can run")
        if n_kv_heads != 1 or head_dim != self.vector:
            raise ModelError(
                f"{n_kv_heads} KV heads of {head_dim} numbers with latent vectors of {self.vector}"
            )
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"the norm epsilon of latent vectors is {self.norm_eps!r:.80}")

    @property
    def vector(self) -> int:
        """Numbers that a token keeps in a layer."""
        return self.kv_rank + self.rope_dim

    @property
    def query(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rope_dim


@dataclass(frozen=True)
class LatentMixer(Mixer):
    """The latent attention of one layer. kind, scale, cap: as of `Attention`.

    The absorbed form in every phase (decision 0112): queries go through a product by head to where the
    vectors are, and what is read of these through another one to values.
    """

    latent: LatentAttention
    hidden: int
    n_heads: int
    kind: int = 0
    scale: float | None = None
    cap: float | None = None

    @property
    def _queries(self) -> int:
        return self.n_heads * self.latent.query

    @property
    def into(self) -> Product:
        """Queries, or what they are a product of, and vectors."""
        latent = self.latent
        if latent.q_rank:
            return Product("q_a_kv_a", self.hidden, {"q_a": latent.q_rank, "kv_a": latent.vector})
        return Product("q_kv_a", self.hidden, {"q": self._queries, "kv_a": latent.vector})

    @property
    def queries(self) -> Product:
        return Product.alone("q_b", self._queries, self.latent.q_rank)

    @property
    def back(self) -> Product:
        return Product.alone("o", self.hidden, self.n_heads * self.latent.value_dim, reader="o")

    @property
    def products(self) -> tuple[Product, ...]:
        latent = self.latent
        return (
            self.into,
            *((self.queries,) if latent.q_rank else ()),
            Product.alone("k_b", self.n_heads * latent.kv_rank, latent.key_dim),
            Product.alone("v_b", self.n_heads * latent.value_dim, latent.kv_rank),
            self.back,
        )

    @property
    def vectors(self) -> dict[str, int]:
        own = {"kv_a_norm": self.latent.kv_rank}
        return {"q_a_norm": self.latent.q_rank, **own} if self.latent.q_rank else own

    @property
    def widths(self) -> MixingRows[int]:
        latent, heads = self.latent, self.n_heads
        return MixingRows(
            products=sum(self.into.outputs.values()),
            own=self._queries if latent.q_rank else 0,
            gates=heads * max(latent.kv_rank, latent.value_dim),
            mixed=heads * latent.kv_rank,
        )

    def add(self, site: Site, reads: ReadRows, places: MixingRows[Place], kept_as: int, rows: Rows) -> Place:
        latent, linears, heads = self.latent, site.linears, self.n_heads
        products = queries = places.products
        keys, values = site.weight("k_b"), site.weight("v_b")
        site.add(self.into, reads, products)
        if latent.q_rank:
            queries = places.own
            normed = ReadRows(products, site.needed("q_a_norm"), latent.norm_eps)
            site.add(self.queries, normed, queries)
        linears.add_heads(heads, keys, first_head(keys, heads), queries, places.gates, latent.query)
        site.program.attend_latent(
            kept_as,
            *places.gates,
            *places.mixed,
            (*queries, latent.query, latent.key_dim),
            (products[0] + next(iter(self.into.outputs.values())), products[1]),
            site.needed("kv_a_norm"),
            latent.norm_eps,
            latent.query**-0.5 if self.scale is None else self.scale,
            rows=rows,
            kind=self.kind,
            cap=self.cap or 0.0,
        )
        # of rows that want no logits, whatever is there
        linears.add_heads(
            heads, values, first_head(values, heads), places.mixed, places.gates, latent.kv_rank
        )
        return places.gates


def first_head(stack: PackedWeight, n_heads: int) -> PackedWeight:
    """The first head's weight of a stack."""
    first = columns(stack, 0, stack.n // n_heads // PANEL)
    assert first is not None
    return first


def check_kv_format(latent: LatentAttention | None, name: str, kv_format: str) -> None:
    """ModelError for a format, one that is named, which latent vectors of the model `name` cannot have."""
    if latent is not None and kv_format not in LATENT_KV_FORMATS:
        raise ModelError(
            f"{name} keeps latent vectors, which cannot be {kv_format}: --kv-format"
            f" {', '.join(LATENT_KV_FORMATS[:-1])} or {LATENT_KV_FORMATS[-1]} can"
        )
