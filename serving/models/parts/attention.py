"""Attention over keys and values of the positions before, or of a whole text; and latent attention: one
vector of each token that all heads share, in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.division import Teams, columns, head_copies
from phasewise.cython_kernels.exact import logarithm, power
from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.fields import LATER, check_factor, check_whole
from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.site import Mixer, MixingRows, Product, ReadRows, Site

MOST_GROWTH_STEPS = 1 << 16


@dataclass(frozen=True)
class QueryGrowth:
    """Growth of queries: at position p they are multiplied by 1 + beta log(1 + (p + shift) // span)."""

    beta: float
    span: int
    shift: int = field(default=0, metadata=LATER)
    unrotated: bool = field(default=False, metadata=LATER)
    """True if queries grow in layers without RoPE alone."""

    def factors(self, context_length: int) -> npt.NDArray[np.float32]:
        """The factors of queries in a context, one for each `span` positions, float32."""
        steps = -(-(context_length + self.shift) // self.span)
        return np.array([1 + self.beta * logarithm(1 + step) for step in range(steps)], np.float32)

    def check(self, context_length: int) -> None:
        """Raise ModelError unless the factors are numbers, and few enough to be kept."""
        check_whole("the span after which queries grow", self.span, 1, 1 << 30)
        if not 0 <= self.beta <= 1e3:
            raise ModelError(f"queries that grow by {self.beta!r:.80}: a number from 0 to 1000 expected")
        if context_length > MOST_GROWTH_STEPS * self.span:
            raise ModelError(
                f"queries that grow every {self.span} positions of {context_length}: at most"
                f" {MOST_GROWTH_STEPS} times can run"
            )


@dataclass(frozen=True)
class HeadShape:
    """Heads of a layer's keys and values."""

    n_kv_heads: int
    head_dim: int
    keys_are_values: bool = False
    """True if one product gives keys and values, which differ in their norms, and RoPE rotates keys alone."""

    def check(self, n_kv_heads: int, head_dim: int) -> None:
        """Raise ModelError for more KV heads than `n_kv_heads` or heads larger than `head_dim`."""
        check_whole("a layer's number of KV heads", self.n_kv_heads, 1, n_kv_heads)
        check_whole("a layer's size of heads", self.head_dim, 1, head_dim)


MOST_NUMBERS, MOST_INDEX_NUMBERS, PANEL = 576, 128, 16
LARGEST_RANK, LARGEST_DIM = 1 << 15, 1 << 10
STACKS = (".k_b", ".v_b")  # weights of all heads of a layer
LATENT_KV_FORMATS = ("f32", "f16", "bf16")


INDEX_EPS = 1e-6
"""The epsilon of the LayerNorm of an indexer's keys, which no file states."""


@dataclass(frozen=True)
class Indexer:
    """Chooses the positions that a token sees (DeepSeek-V3.2, 2025, eq. 1 and 2): those of the `chosen`
    largest scores, the earlier of equals. A score is the sum over `heads` of weight times
    max(0, query . key), over queries and one key of `dim` numbers, the first ones rotated."""

    heads: int
    dim: int
    chosen: int

    def check(self) -> None:
        """Raise ModelError unless the kernels can run it."""
        check_whole("the indexer's number of heads", self.heads, 1, 1 << 10)
        check_whole("the indexer's size of heads", self.dim, 2, MOST_INDEX_NUMBERS)
        check_whole("index_topk", self.chosen, 1, 1 << 20)

    @property
    def numbers(self) -> int:
        """Numbers of the queries of all heads."""
        return self.heads * self.dim


@dataclass(frozen=True)
class LatentAttention:
    """Attention of the config's heads over one vector of each token, of `vector` numbers (the config's
    `head_dim`).

    The vector is the first `kv_rank` numbers of a product of the stream, normalised, and `rope_dim` numbers
    more, rotated. A head's query meets the first numbers after a product with the head's weight `k_b`, and
    the others as it is; the head's result over the first numbers goes through its weight `v_b`."""

    kv_rank: int
    rope_dim: int
    key_dim: int
    """Numbers of a head's query that are not rotated."""
    value_dim: int
    """Numbers of a head's value."""
    q_rank: int = 0
    """Width of the normalised product of which queries are a product; 0: queries are one of the stream."""
    norm_eps: float = 1e-6
    indexer: Indexer | None = field(default=None, metadata=LATER)
    """The choice of the positions that a token sees; None: all."""

    def check(self, heads: HeadShape) -> None:
        """Raise ModelError unless the kernels can run this attention."""
        sizes = {
            "kv_rank": (PANEL, MOST_NUMBERS),
            "rope_dim": (2, MOST_NUMBERS),
            "key_dim": (1, LARGEST_DIM),
            "value_dim": (PANEL, LARGEST_DIM),
            "q_rank": (0, LARGEST_RANK),
        }
        for name, (least, most) in sizes.items():
            check_whole(f"latent attention's {name}", getattr(self, name), least, most)
        if self.kv_rank % PANEL or self.value_dim % PANEL or self.rope_dim % 2:
            raise ModelError(
                f"latent vectors of {self.kv_rank} and {self.rope_dim} numbers with values of"
                f" {self.value_dim}: multiples of {PANEL}, 2 and {PANEL} can run"
            )
        if self.vector > MOST_NUMBERS:
            raise ModelError(f"latent vectors of {self.vector} numbers; at most {MOST_NUMBERS} can run")
        if (heads.n_kv_heads, heads.head_dim) != (1, self.kept):
            kept = f"{heads.n_kv_heads} KV heads of {heads.head_dim} numbers"
            raise ModelError(f"{kept} with latent vectors of {self.kept}")
        if self.indexer is not None:
            self.indexer.check()
            if not self.q_rank or self.indexer.dim < self.rope_dim:
                raise ModelError(
                    "an indexer reads queries behind their first product, and turns as many numbers"
                )
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"the norm epsilon of latent vectors is {self.norm_eps!r:.80}")

    @property
    def vector(self) -> int:
        """Numbers of a token that all heads meet."""
        return self.kv_rank + self.rope_dim

    @property
    def kept(self) -> int:
        """Numbers that a token keeps in a layer, an indexer's key among them."""
        return self.vector + (self.indexer.dim if self.indexer else 0)

    @property
    def query(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """The settings that the attention of all layers of a model has; layers differ in their kind alone."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    """True if queries and keys are normalised by heads."""
    whole_qk_norm: bool = False
    """True if `qk_norm` is over the whole of a row's queries, and of its keys, rather than over each head."""
    norm_last: bool = field(default=False, metadata=LATER)
    """True if `qk_norm` is behind the rotation of queries and keys."""
    plain_qk_norm: bool = field(default=False, metadata=LATER)
    """True if queries and keys that RoPE rotates are normalised by heads behind it, without weights."""
    value_norms: bool = field(default=False, metadata=LATER)
    """True if values are normalised by heads, without weights."""
    out_bias: bool = False
    """True if the projection after attention has a bias."""
    sinks: bool = False
    """True if each head has a score of its own beside those of positions, which takes weight and gives no
    value."""
    attention_scale: float | None = None
    """The factor of scores; None: 1 / sqrt(head_dim)."""
    attention_cap: float | None = None
    """The bound c of scores, which become c tanh(score / c)."""
    gated_attention: bool = field(default=False, metadata=LATER)
    """True if the output is multiplied by the logistic of one more product of the stream."""
    query_growth: QueryGrowth | None = field(default=None, metadata=LATER)
    """The growth of queries with their positions."""
    latent: LatentAttention | None = field(default=None, metadata=LATER)
    """Attention over one vector of each token; `head_dim` are then the vector's numbers, in one KV head."""

    def in_layer(self, *, has_rope: bool) -> AttentionForm:
        """The form in a layer with or without RoPE."""
        if not has_rope:
            return replace(self, plain_qk_norm=False) if self.plain_qk_norm else self
        grows_elsewhere = self.query_growth is not None and self.query_growth.unrotated
        return replace(self, query_growth=None) if grows_elsewhere else self


def seen(first: int, n: int, most: int | None = None) -> int:
    """Positions that rows at `n` positions from `first` on see, of all rows: each itself and those before it,
    at most `most`."""
    return sum(min(count, most or count) for count in range(first + 1, first + n + 1))


@dataclass(frozen=True)
class Attending(Mixer):
    """A mixer that reads what a layer keeps of every token: keys and values, or one vector. `kind`: index of
    the layer's kind (window, RoPE, heads) in `ModelConfig.kinds`."""

    hidden: int
    form: AttentionForm
    heads: HeadShape
    """Heads of the kept keys and values."""
    kind: int
    window: int | None

    is_latent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.n_heads % self.heads.n_kv_heads:
            raise ModelError(
                f"{self.n_heads} attention heads do not divide into {self.heads.n_kv_heads} KV heads"
            )
        check_factor("the attention scale", self.form.attention_scale)
        check_factor("the attention cap", self.form.attention_cap)

    @property
    def n_heads(self) -> int:
        return self.form.n_heads

    @property
    def numbers(self) -> int:
        """Numbers of one position that a head multiplies, for its score and for its result."""
        return 2 * self.heads.head_dim

    def slots_read(self, first: int, n: int) -> float:
        """Slots of the layer that rows at `n` positions from `first` on read."""
        return seen(first, n, self.window)

    def multiplications(self, first: int, n: int) -> int:
        """Multiplications of scores and results of rows at `n` positions from `first` on."""
        return self.n_heads * self.numbers * seen(first, n, self.window)

    def copies(self, teams: Teams) -> tuple[int, ...]:
        """Copies of each KV head that the ranks keep; latent vectors are kept once for all ranks. `teams`:
        the ranks' teams (`Division.teams`); (): one rank."""
        return head_copies(self.n_heads, self.heads.n_kv_heads, () if self.is_latent else teams)

    def slot_bytes(self, kv_format: str, teams: Teams = ()) -> int:
        """Bytes that the layer keeps of one token, copies for ranks included."""
        return sum(self.copies(teams)) * kv_slot_bytes(kv_format, self.heads.head_dim, self.is_latent)


@dataclass(frozen=True)
class Attention(Attending):
    """The attention of one layer over keys and values."""

    reads_others: bool = False
    """True if keys and values are those that an earlier layer keeps."""
    factor: float = 1.0
    context_length: int = 0
    """Positions for which queries grow."""
    distances: bool = False
    """True if scores fall with the distance of their positions (ALiBi)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form.query_growth is not None:
            self.form.query_growth.check(self.context_length)

    @property
    def q_rows(self) -> int:
        return self.n_heads * self.heads.head_dim

    @property
    def kv_rows(self) -> int:
        return self.heads.n_kv_heads * self.heads.head_dim

    @property
    def into(self) -> Product:
        """The product that gives queries, and the keys and values that the layer keeps."""
        rows = {"q": self.q_rows, "k": self.kv_rows, "v": self.kv_rows}
        letters = "q" if self.reads_others else "qk" if self.heads.keys_are_values else "qkv"
        return Product(letters, self.hidden, {letter: rows[letter] for letter in letters}, reader="qkv")

    @property
    def gate(self) -> Product:
        return Product.alone("attn_gate", self.q_rows, self.hidden)

    @property
    def back(self) -> Product:
        return Product.alone("o", self.hidden, self.q_rows, reader="o")

    @property
    def products(self) -> tuple[Product, ...]:
        return (self.into, *((self.gate,) if self.form.gated_attention else ()), self.back)

    @property
    def vectors(self) -> dict[str, int]:
        lengths: dict[str, int] = {}
        if self.form.qk_norm:
            rows = {"q": self.q_rows, "k": self.kv_rows}
            for part in rows.keys() & self.into.outputs.keys():
                lengths[f"{part}_norm"] = rows[part] if self.form.whole_qk_norm else self.heads.head_dim
        if self.form.out_bias:
            lengths["o_bias"] = self.hidden
        if self.form.sinks:
            lengths["sinks"] = self.n_heads
        return lengths

    @property
    def biases(self) -> dict[str, int]:
        """Lengths by name of the biases of queries, keys and values."""
        return {f"{part}_bias": rows for part, rows in self.into.outputs.items()}

    @property
    def widths(self) -> MixingRows[int]:
        own = self.q_rows if self.form.gated_attention else 0
        return MixingRows(self.q_rows + 2 * self.kv_rows, own, 0, self.q_rows)

    def add(self, site: Site, reads: ReadRows, places: MixingRows[Place], kept_as: int, rows: Rows) -> Place:
        qkv, mixed, program, form = places.products, places.mixed, site.program, self.form
        site.add(self.into, reads, qkv, factor=self.factor)
        ones = np.ones(self.heads.head_dim, np.float32)
        q_norm, k_norm = (ones if form.plain_qk_norm else site.vector(f"{part}_norm") for part in "qk")
        if form.whole_qk_norm:
            keys = qkv[0] + self.q_rows, qkv[1]
            program.adjust(self.q_rows, *qkv, *qkv, norm=q_norm)
            program.adjust(self.kv_rows, *keys, *keys, norm=k_norm)
            q_norm = k_norm = None
        program.attend(
            kept_as,
            *qkv,
            *mixed,
            bias=site.vector("qkv_bias"),
            rows=rows,
            kind=self.kind,
            scale=form.attention_scale,
            cap=form.attention_cap or 0.0,
            sinks=site.vector("sinks"),
            q_norm=q_norm,
            k_norm=k_norm,
            only_reads=self.reads_others,
            norm_last=form.norm_last or form.plain_qk_norm,
            keys_are_values=self.heads.keys_are_values,
            v_norm=ones if form.value_norms else None,
            slopes=slopes_of(self.n_heads) if self.distances else None,
            **self._growth(),
        )
        if form.gated_attention:
            site.add(self.gate, reads, places.own)
            program.gate_rows(self.q_rows, *mixed, *mixed, places.own, gate="logistic")
        return mixed

    def _growth(self) -> dict[str, Any]:
        growth = self.form.query_growth
        if growth is None:
            return {}
        return {
            "growth": growth.factors(self.context_length),
            "growth_span": growth.span,
            "growth_shift": growth.shift,
        }


def slopes_of(n_heads: int) -> np.ndarray:
    """Slopes of ALiBi (Press et al. 2022), float32 [n_heads]: the loss of each head's scores for each
    position of distance. Powers of 2^(-8 / n) for n heads, n a power of two; for other numbers those of the
    next lower power of two, then every other slope of the next higher one."""
    lower = 1 << (n_heads.bit_length() - 1)
    powers = [power(2.0, -8 * index, lower) for index in range(1, lower + 1)]
    powers += [power(2.0, -4 * index, lower) for index in range(1, 2 * (n_heads - lower), 2)]
    return np.array(powers, np.float32)


@dataclass(frozen=True)
class LatentMixer(Attending):
    """The latent attention of one layer, in the absorbed form in every phase (decision 0112): a product by
    head takes queries to the space of the vectors, and another one takes results from there to values."""

    reuses_choice: bool = False
    """True if tokens see the positions that the indexer of an earlier layer chose."""

    is_latent = True
    takes_no_adapters = "whose attention is over latent vectors"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.latent.check(self.heads)

    @property
    def latent(self) -> LatentAttention:
        assert self.form.latent is not None
        return self.form.latent

    @property
    def numbers(self) -> int:
        return self.latent.vector + self.latent.kv_rank

    @property
    def indexer(self) -> Indexer | None:
        """The layer's own indexer."""
        return None if self.reuses_choice else self.latent.indexer

    def slots_read(self, first: int, n: int) -> float:
        """With an indexer the vectors that it chose, and its keys of all positions."""
        if self.latent.indexer is None:
            return super().slots_read(first, n)
        keys = self.indexer.dim * seen(first, n) if self.indexer else 0
        return (self.latent.vector * seen(first, n, self.latent.indexer.chosen) + keys) / self.latent.kept

    def multiplications(self, first: int, n: int) -> int:
        if self.latent.indexer is None:
            return super().multiplications(first, n)
        own = self.indexer.numbers * seen(first, n) if self.indexer else 0
        return self.n_heads * self.numbers * seen(first, n, self.latent.indexer.chosen) + own

    @property
    def _queries(self) -> int:
        return self.n_heads * self.latent.query

    @property
    def into(self) -> Product:
        """The product that gives queries, or the `q_rank` numbers before them, and vectors."""
        latent = self.latent
        if latent.q_rank:
            return Product("q_a_kv_a", self.hidden, {"q_a": latent.q_rank, "kv_a": latent.vector})
        return Product("q_kv_a", self.hidden, {"q": self._queries, "kv_a": latent.vector})

    @property
    def queries(self) -> Product:
        return Product.alone("q_b", self._queries, self.latent.q_rank)

    def _indexing(self, indexer: Indexer) -> tuple[Product, Product, Product]:
        """The products of an indexer: of the stream its keys, and its weights, which keep the file's format;
        of the rows that queries are a product of, its queries."""
        return (
            Product.alone("index_k", indexer.dim, self.hidden),
            Product("index_w", self.hidden, {"index_w": indexer.heads}, is_native=True),
            Product.alone("index_q", indexer.numbers, self.latent.q_rank),
        )

    @property
    def back(self) -> Product:
        return Product.alone("o", self.hidden, self.n_heads * self.latent.value_dim, reader="o")

    @property
    def products(self) -> tuple[Product, ...]:
        latent = self.latent
        return (
            self.into,
            *(self._indexing(self.indexer) if self.indexer else ()),
            *((self.queries,) if latent.q_rank else ()),
            Product.alone("k_b", self.n_heads * latent.kv_rank, latent.key_dim),
            Product.alone("v_b", self.n_heads * latent.value_dim, latent.kv_rank),
            self.back,
        )

    @property
    def vectors(self) -> dict[str, int]:
        own = {"kv_a_norm": self.latent.kv_rank}
        if self.indexer is not None:
            own |= dict.fromkeys(("index_k_norm", "index_k_norm_bias"), self.indexer.dim)
        return {"q_a_norm": self.latent.q_rank, **own} if self.latent.q_rank else own

    @property
    def widths(self) -> MixingRows[int]:
        latent, heads, indexer = self.latent, self.n_heads, self.indexer
        of_index = (indexer.dim + indexer.heads, indexer.numbers) if indexer else (0, 0)
        return MixingRows(
            products=sum(self.into.outputs.values()) + of_index[0],
            own=self._queries if latent.q_rank else 0,
            gates=max(heads * max(latent.kv_rank, latent.value_dim), of_index[1]),
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
            if self.indexer is not None:
                self._choose(site, self.indexer, (reads, normed), places, kept_as, rows)
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
            latent.query**-0.5 if self.form.attention_scale is None else self.form.attention_scale,
            rows=rows,
            kind=self.kind,
            cap=self.form.attention_cap or 0.0,
        )
        # of rows that want no logits, whatever is there
        linears.add_heads(
            heads, values, first_head(values, heads), places.mixed, places.gates, latent.kv_rank
        )
        return places.gates

    def _choose(
        self,
        site: Site,
        indexer: Indexer,
        reads: tuple[ReadRows, ReadRows],
        places: MixingRows[Place],
        kept_as: int,
        rows: Rows,
    ) -> None:
        """Add the choice of positions. `reads`: the stream, and the rows that queries are a product of."""
        (begin, stride), column = places.products, sum(self.into.outputs.values())
        keys, weights = (begin + column, stride), (begin + column + indexer.dim, stride)
        stream, normed = reads
        of_key, of_weight, of_query = self._indexing(indexer)
        site.add(of_key, stream, places.products, column)
        site.add(of_weight, stream, places.products, column + indexer.dim)
        site.add(of_query, normed, places.gates)
        norm, bias = site.needed("index_k_norm"), site.needed("index_k_norm_bias")
        of_row = places.gates, keys, weights, indexer.heads
        site.program.choose(kept_as, *of_row, norm, bias, INDEX_EPS, rows=rows, kind=self.kind)


def first_head(stack: PackedWeight, n_heads: int) -> PackedWeight:
    """The first head's weight of a stack."""
    first = columns(stack, 0, stack.n // n_heads // PANEL)
    assert first is not None
    return first


def check_kv_format(latent: LatentAttention | None, name: str, kv_format: str) -> None:
    """Raise ModelError for a format that latent vectors of the model `name` cannot have."""
    if latent is not None and kv_format not in LATENT_KV_FORMATS:
        raise ModelError(
            f"{name} keeps latent vectors, which cannot be {kv_format}: --kv-format"
            f" {', '.join(LATENT_KV_FORMATS[:-1])} or {LATENT_KV_FORMATS[-1]} can"
        )
