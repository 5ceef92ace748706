"""A model as the engine sees it: its shape, its packed weights, its tokenizer text. Every loader ends in a
`PackedModel`; nothing after it knows GGUF or safetensors. A `ModelConfig` has been checked when it is made,
so that products of its numbers do not overflow."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

from phasewise._words import counted
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.encoding import MOST_POSITIONS, Embedding, Encoder
from phasewise.serving.models.fields import LATER, check_factor, check_whole
from phasewise.serving.models.linears import Adapter, Linears
from phasewise.serving.models.mapped_file import MappedFile
from phasewise.serving.models.parts.attention import STACKS as HEAD_STACKS
from phasewise.serving.models.parts.attention import (
    Attending,
    Attention,
    AttentionForm,
    HeadShape,
    LatentMixer,
    first_head,
)
from phasewise.serving.models.parts.experts import Experts
from phasewise.serving.models.parts.feed_forward import MOST_WIDTH, FeedForward, FeedForwardForm
from phasewise.serving.models.parts.mixture import STACKS, Mixture, first_expert
from phasewise.serving.models.parts.site import (
    NO_FACTORS,
    LayerPart,
    Mixer,
    Product,
    ProductFactors,
    Site,
    Vector,
)
from phasewise.serving.models.parts.states import (
    DELTA,
    KDA,
    MAMBA2,
    SHORT_CONV,
    Convolving,
    Delta,
    KimiDelta,
    Mamba2,
    ShortConv,
    StateForm,
)
from phasewise.serving.models.parts.streams import InputsOfLayer, LayerInputs, Streams, StreamsOfLayer
from phasewise.serving.models.rope import RopeSpec
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults

FORMATS = ("native", "f32", "bf16", "int8", "int4")

# Far beyond any published model, small enough that no product below leaves 63 bits.
LARGEST = {
    "n_layers": 1 << 10,
    "hidden": 1 << 17,
    "n_heads": 1 << 10,
    "n_kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "vocab_size": 1 << 22,
    "context_length": MOST_POSITIONS,
}
MOST_KINDS = 4
MOST_DENSE = 2

Form = TypeVar("Form", AttentionForm, FeedForwardForm)

LAYER_TABLE = "layer_table"
"""The name of the table of layer inputs, whose rows are looked up and never multiplied."""


@dataclass(frozen=True)
class Layer:
    """One layer: h += A(norm(h)), h += F(norm(h)), A the sum of its mixers, F its feed-forward half."""

    hidden: int
    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    """The feed-forward layer that computes every row, beside experts where there are any."""
    mixture: Mixture | None
    streams: StreamsOfLayer | None
    inputs: InputsOfLayer | None
    norms: tuple[str, ...]
    """Vectors of the stream's norms, their biases among them."""
    scaled: bool
    """True if the stream is multiplied by a number behind the layer."""

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        """The parts, in the order in which a forward pass reads their weights."""
        all_parts = (self.streams, *self.mixers, self.feed_forward, self.inputs, self.mixture)
        return tuple(part for part in all_parts if part is not None)

    @property
    def products(self) -> Iterator[Product]:
        return (product for part in self.parts for product in part.products)

    @property
    def attention(self) -> Attending | None:
        """The mixer that keeps keys and values, or reads those of another layer; None for a state alone."""
        return next((part for part in self.mixers if isinstance(part, Attending)), None)

    def vectors(self, has_bias: bool) -> dict[str, int]:
        """Lengths of vectors by name, before any are joined. `has_bias`: queries, keys and values have
        biases."""
        lengths = dict.fromkeys(self.norms, self.hidden)
        if self.scaled:
            lengths["out_scale"] = 1
        for part in self.parts:
            lengths |= part.vectors
            if has_bias and isinstance(part, Attention):
                lengths |= part.biases
        return lengths

    @property
    def joined(self) -> dict[str, tuple[str, ...]]:
        """Names of vectors that are packed as one, by the name of the whole."""
        return {name: parts for part in self.parts for name, parts in part.joined.items()}


@dataclass(frozen=True)
class LayerKind:
    """The settings of attention in which layers of one model differ."""

    window: int | None
    """Positions that a token sees, itself included; None: all. Half on each side where `sees_ahead`."""
    rope: RopeSpec | None
    """RoPE of queries and keys; None: queries and keys carry no positions."""
    heads: HeadShape | None = field(default=None, metadata=LATER)
    """The KV heads of the layer; None: the model's."""
    in_chunks: bool = field(default=False, metadata=LATER)
    """True if `window` positions each are a chunk, and a token sees those of its own alone, up to itself."""


@dataclass(frozen=True)
class LayerForm:
    """The form of one layer: attention, a state or both, and a feed-forward half."""

    attention: LayerKind | None
    """None: the layer has no attention."""
    feed_forward: int | Experts | None
    """The width of the feed-forward layer, or the mixture in its place; None: the layer has neither."""
    state: StateForm | None = field(default=None, metadata=LATER)
    """The state that the layer keeps of each sequence."""
    shares: bool = field(default=False, metadata=LATER)
    """True if attention reads the keys and values that the last layer of its kind before it keeps."""
    sparsity: float = field(default=0.0, metadata=LATER)
    """Standard deviations above their mean at which gates begin to count; 0: all count."""
    reuses_choice: bool = field(default=False, metadata=LATER)
    """True if tokens see the positions that the indexer of an earlier layer chose."""

    def __post_init__(self) -> None:
        if not self.mixes and self.feed_forward is None:
            raise ModelError("a layer has no attention, no state and no feed-forward half")
        if self.shares and self.attention is None:
            raise ModelError("a layer without attention reads keys and values of another one")
        if self.attention is not None and self.state is not None and self.state.kind != MAMBA2:
            raise ModelError(f"a layer has attention beside a state: {MAMBA2} can run, not {self.state.kind}")
        if not -10 < self.sparsity < 10:
            raise ModelError(f"a layer has sparse activations of {self.sparsity!r:.80}: -10 to 10 expected")

    @property
    def mixes(self) -> bool:
        """True if tokens read others."""
        return self.attention is not None or self.state is not None

    @property
    def keeps(self) -> bool:
        """True if the layer keeps keys and values."""
        return self.attention is not None and not self.shares

    @property
    def experts(self) -> Experts | None:
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None

    @property
    def width(self) -> int | None:
        """The width of the feed-forward layer that computes every row, beside experts where there are any."""
        own = self.feed_forward
        return (own.shared_ffn or None) if isinstance(own, Experts) else own


def alike(n_layers: int, kind: LayerKind, width: int) -> tuple[LayerForm, ...]:
    """The forms of layers that are alike. Raises ModelError for numbers that no model has."""
    check_whole("n_layers", n_layers, 1, LARGEST["n_layers"])
    check_whole("ffn", width, 1, MOST_WIDTH)
    return (LayerForm(kind, width),) * n_layers


@dataclass(frozen=True, kw_only=True)
class ModelConfig(AttentionForm, FeedForwardForm):
    """The shape of a model: what its attention and feed-forward layers have in all layers, and what is the
    model's alone. Construction refuses shapes that no model can have. Without `encoder` a decoder:
    A layer is h += r A(norm(h)), h += r F(norm(h)): attention A, feed-forward F, r the residual scale.
    Without `pre_norms` A and F read h itself; with `post_norms` their outputs are normalised."""

    architecture: str
    forms: tuple[LayerForm, ...]
    """The form of each layer, the first layer first."""
    hidden: int
    vocab_size: int
    context_length: int
    norm_eps: float
    tied_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    encoder: Encoder | None = None
    last_row_scores: bool = field(default=False, metadata=LATER)
    """True if a decoder gives a pair of texts one score: the product of the last row with a vector."""
    layer_norms: bool = field(default=False, metadata=LATER)
    """True if norms of the stream are LayerNorms."""
    norm_biases: bool = field(default=False, metadata=LATER)
    """True if norms of the stream have biases."""
    logit_biases: bool = field(default=False, metadata=LATER)
    """True if the output head has biases."""
    parallel: bool = field(default=False, metadata=LATER)
    """True if a layer is h += A(n) + F(n), n = norm(h): both halves read one norm of the same stream."""
    factors: ProductFactors = field(default=NO_FACTORS, metadata=LATER)
    layer_scales: bool = field(default=False, metadata=LATER)
    """True if each layer has a number by which the stream is multiplied behind the layer."""
    layer_inputs: LayerInputs | None = field(default=None, metadata=LATER)
    streams: Streams | None = field(default=None, metadata=LATER)
    drafts: str = field(default="", metadata=LATER)
    """"mtp": a head that drafts, one layer over embeddings of tokens and rows of another model."""
    bidirectional: bool = field(default=False, metadata=LATER)
    """True if tokens of a decoder's layers see those after them."""
    dense: tuple[int, ...] = field(default=(), metadata=LATER)
    """Widths of the products, one behind the other, that make a vector of a text's row."""

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            check_whole(name, getattr(self, name), 1, largest)
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"the norm epsilon is {self.norm_eps!r:.80}: a number between 0 and 1 expected")
        self._check_kinds()
        self._check_scales()
        self._check_tokens()
        if not self.attention_layers:
            raise ModelError("a model whose layers keep no keys and values cannot run")
        for layer, _ in enumerate(self.layers):
            self.kept_by(layer)
        if self.forms[self.attention_layers[0]].reuses_choice:
            raise ModelError("the first layer's tokens see positions that no layer before it chose")
        if len({form.experts for form in self.forms} - {None}) > 1:
            raise ModelError("a model whose layers have experts that differ cannot run")
        if len({form.state for form in self.forms} - {None}) > 1:
            raise ModelError("a model whose layers have states that differ cannot run")
        if self.layer_inputs is not None:
            self.layer_inputs.check(self.n_layers, self.vocab_size)
        widths = all(type(width) is int and 1 <= width <= LARGEST["hidden"] for width in self.dense)
        if not widths or len(self.dense) > MOST_DENSE or (self.dense and self.scores):
            raise ModelError(
                f"dense layers of {self.dense!r:.80} behind the last norm: at most {MOST_DENSE}, of vectors,"
                " can run"
            )

    def _check_kinds(self) -> None:
        for kind in self.kinds:
            if kind.window is not None:
                check_whole("the sliding window", kind.window, 1, 1 << 30)
            if kind.in_chunks and (kind.window is None or self.sees_ahead):
                raise ModelError("attention in chunks of no length, or of both ways, cannot run")
            if kind.heads is not None:
                kind.heads.check(self.n_kv_heads, self.head_dim)
            if kind.rope is not None:
                kind.rope.check(kind.heads.head_dim if kind.heads else self.head_dim)
        if len(self.kinds) > MOST_KINDS:
            raise ModelError(
                f"{counted(len(self.kinds), 'kind')} of attention in one model; at most {MOST_KINDS} can run"
            )

    def _check_scales(self) -> None:
        for name in ("embed_scale", "residual_scale", "logit_scale", "logit_cap"):
            check_factor(f"the {name.replace('_', ' ')}", getattr(self, name))
        if self.norm_eps / self.residual_scale**2 >= 1:
            raise ModelError(
                f"a norm epsilon of {self.norm_eps!r} with a residual scale of {self.residual_scale!r}"
            )

    def _check_tokens(self) -> None:
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and not 0 <= token < self.vocab_size:
                raise ModelError(f"special token {token} is outside the vocabulary of {self.vocab_size}")

    @property
    def scores(self) -> bool:
        """True if pairs of texts get one score each, rather than a text its vector."""
        return self.last_row_scores or (self.encoder is not None and self.encoder.scores)

    @property
    def sees_ahead(self) -> bool:
        """True if tokens see those after them, so that rows can make vectors and no text."""
        return self.bidirectional or self.encoder is not None

    @property
    def vector_width(self) -> int:
        """Numbers of a text's vector."""
        return self.dense[-1] if self.dense else self.hidden

    @property
    def result_width(self) -> int:
        """Numbers of what is made of a text: of its vector, or 1 for the score of a pair."""
        return 1 if self.scores else self.vector_width

    @property
    def n_layers(self) -> int:
        return len(self.forms)

    @functools.cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of attention, in the order of their first layers."""
        return tuple(dict.fromkeys(form.attention for form in self.forms if form.attention is not None))

    @property
    def rope(self) -> RopeSpec:
        """RoPE of layers that see all positions, or else of others; of whole heads where no layer has any."""
        by_reach = sorted(self.kinds, key=lambda kind: kind.window is not None)
        return next((kind.rope for kind in by_reach if kind.rope), RopeSpec(10000.0, self.head_dim))

    @property
    def experts(self) -> Experts | None:
        """The mixture of the layers that have one."""
        return next((form.experts for form in self.forms if form.experts), None)

    @property
    def state(self) -> StateForm | None:
        """The state of the layers that keep one."""
        return next((form.state for form in self.forms if form.state), None)

    @property
    def ffn(self) -> int:
        """The width of an expert, or of the widest feed-forward layer; 1 where there is none."""
        widest = max(form.width or 1 for form in self.forms)
        return widest if self.experts is None else self.experts.width

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The parts of every layer. Raises ModelError for parts that cannot run, alone or together."""
        by_form = {form: _layer(self, form) for form in dict.fromkeys(self.forms)}
        first, *others = (by_form[form] for form in self.forms)
        if self.encoder is not None and self.encoder.pre_norms:  # its attention reads the stream as it is
            first = replace(first, norms=first.norms[1:])
        return (first, *others)

    @property
    def has_layer_norms(self) -> bool:
        """True if norms of the stream are LayerNorms, as those of all encoders are."""
        return self.layer_norms or self.encoder is not None

    @property
    def norms_sums(self) -> bool:
        """True if the stream is normalised after each half of a layer is added to it."""
        return self.encoder is not None and not self.encoder.pre_norms

    @property
    def stream_eps(self) -> float:
        """Epsilon for norms of the stream, which is kept divided by the residual scale."""
        return self.norm_eps / self.residual_scale**2

    @property
    def last_mixing(self) -> int:
        """The last layer in which tokens read others."""
        return max(number for number, form in enumerate(self.forms) if form.mixes)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values."""
        return tuple(number for number, form in enumerate(self.forms) if form.keeps)

    def kept_by(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or the last of its kind before it that keeps
        any. Raises ModelError where there is none."""
        form = self.forms[layer]
        if not form.shares:
            return layer
        for number in reversed(range(layer)):
            before = self.forms[number]
            if before.keeps and before.attention == form.attention:
                return number
        raise ModelError("layers that read keys and values of others have none of their kind before them")

    @property
    def keeping(self) -> tuple[Attending, ...]:
        """The attention of every layer that keeps keys and values."""
        parts = (self.layers[layer].attention for layer in self.attention_layers)
        return tuple(part for part in parts if part is not None)

    @property
    def plain_heads(self) -> HeadShape:
        """Heads of keys and values of layers that say nothing else."""
        return HeadShape(self.n_kv_heads, self.head_dim)

    @property
    def has_mixed_heads(self) -> bool:
        """True if heads of keys and values are not the same in all layers."""
        return any(kind.heads is not None for kind in self.kinds)

    @property
    def turns(self) -> dict[str, int]:
        """Counts by which a file's tensors are cut into ours (`loaders.cuts.CutFor.turns`)."""
        groups = 1 if self.state is None else max(self.state.groups, 1)
        turned = 0 if self.latent is None else self.latent.rope_dim
        indexer = self.latent and self.latent.indexer
        index_heads = indexer.heads if indexer else 1
        return {"n_heads": self.n_heads, "groups": groups, "turned": turned, "index_heads": index_heads}

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence's state takes beside keys and values, however long the sequence is."""
        return sum(form.state.n_bytes(self.hidden) for form in self.forms if form.state is not None)


STATE_MIXERS: dict[str, type[Convolving]] = {
    SHORT_CONV: ShortConv, DELTA: Delta, MAMBA2: Mamba2, KDA: KimiDelta,
}  # fmt: skip


def _layer(config: ModelConfig, form: LayerForm) -> Layer:
    """The parts of a layer. Raises ModelError for parts that cannot run, alone or together."""
    experts, feed_forward, mixture, streams, inputs = form.experts, None, None, None, None
    if form.width is not None:
        weighed = experts is not None and experts.shared_gate
        feed_forward = _feed_forward(config, form.width, form.sparsity, weighed)
    if experts is not None:
        expert = replace(_feed_forward(config, experts.width), hidden=experts.latent or config.hidden)
        mixture = Mixture(experts, expert, config.hidden)
    if config.streams is not None:
        streams = StreamsOfLayer(config.streams, config.hidden, config.norm_eps)
    if config.layer_inputs is not None:
        inputs = InputsOfLayer(config.hidden, config.layer_inputs.size, config.activation)
    parts = _mixers(config, form), feed_forward, mixture, streams, inputs, _norms(config, form)
    return Layer(config.hidden, *parts, config.layer_scales)


def _mixers(config: ModelConfig, form: LayerForm) -> tuple[Mixer, ...]:
    """The mixers of a layer, a state before attention; both read the stream before either output is added."""
    mixers: list[Mixer] = []
    own, state = form.attention, form.state
    if state is not None:
        mixer = STATE_MIXERS[state.kind]
        mixers.append(mixer(state, config.hidden, config.factors, config.norm_eps, own is not None))
    if own is None:
        return tuple(mixers)
    heads = own.heads or config.plain_heads
    settings = form_in(config, AttentionForm).in_layer(has_rope=own.rope is not None)
    kept = config.hidden, settings, heads, config.kinds.index(own), own.window
    if config.latent is not None:
        return (*mixers, LatentMixer(*kept, form.reuses_choice))
    attention = Attention(
        *kept,
        form.shares,
        config.factors.qkv,
        config.context_length if settings.query_growth else 0,
        config.encoder is not None and config.encoder.distances,
    )
    return (*mixers, attention)


def form_in(config: ModelConfig, kind: type[Form]) -> Form:
    """The part of a config that is the form of its attention, or of its feed-forward layers."""
    return kind(**{own.name: getattr(config, own.name) for own in fields(kind)})


def _feed_forward(
    config: ModelConfig, width: int, sparsity: float = 0.0, weighed: bool = False
) -> FeedForward:
    form, factors = form_in(config, FeedForwardForm), (config.factors.gate, config.factors.up)
    return FeedForward(config.hidden, width, form, factors, sparsity, weighed)


def _norms(config: ModelConfig, form: LayerForm) -> tuple[str, ...]:
    """Names of the norms of the stream before a layer's halves and behind them, and of their biases."""
    both = form.mixes and form.feed_forward is not None and not config.parallel
    norms = ["attn_norm", "ffn_norm"] if both else ["attn_norm"]
    if config.norms_sums:
        return tuple(f"{norm}{ending}" for norm in norms for ending in ("", "_bias"))
    if not config.pre_norms:
        norms = []
    if config.norm_biases:
        norms += [f"{norm}_bias" for norm in norms]
    return (*norms, "attn_post_norm", "ffn_post_norm") if config.post_norms else tuple(norms)


@dataclass(frozen=True)
class PackedModel:
    """A model ready to run; weights and vectors are views over a file mapped read-only.

    `weights`: "embed" [vocab, hidden]; "lm_head" unless tied; per layer i "layers.{i}." and the products of
    its parts, fused ("qkv") or, where their packed kinds differ, each part alone ("q"); `loaders.layout`
    lists the weights outside layers. `vectors`: float32, per layer its parts' vectors, joined as
    `Layer.joined` says. `content_hash`: names the source's content and the format, so equal models hash alike
    on every machine."""

    config: ModelConfig
    format: str
    name: str
    source: Path | str
    content_hash: str
    weights: Mapping[str, PackedWeight]
    vectors: Mapping[str, Vector]
    tokenizer_json: str
    chat_template: str | None
    weight_bytes: int
    file: MappedFile | None = None
    """The mapped file; None: the arrays are in this process's own memory."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """The sampling that the model's files ask for."""
    embedding: Embedding | None = None
    """The pooling of texts to vectors; None for a model that is not made for that."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that requests may have on top; a slice names them by their numbers, from 1 on."""

    @property
    def is_in_memory(self) -> bool:
        """True if this process packed the model into memory, and no cache holds it."""
        return self.file is not None and self.file.memory is not None

    def ref_here(self, ref: str) -> str:
        """The reference by which other processes of this machine open the model: `ref`, or its file in
        memory, which they map."""
        return str(self.file.path) if self.file is not None and self.file.memory is not None else ref

    def site(self, linears: Linears, stem: str = "") -> Site:
        """The site in a program of a layer (`stem` "layers.3."), or of what is outside layers ("")."""
        return Site(linears, self.weights, self.vectors, stem)

    def weight(self, name: str) -> PackedWeight:
        """Raises ModelError for an unknown name."""
        try:
            return self.weights[name]
        except KeyError:
            raise ModelError(f"{self.name} has no weight {name!r}") from None

    def products(self) -> dict[str, PackedWeight]:
        """The weights that products read, by name: of a stack of experts or heads the first one's weight."""
        return {
            name: self.one_expert(name) or self.one_head(name) or weight
            for name, weight in self.weights.items()
            if name != LAYER_TABLE
        }

    def one_head(self, name: str) -> PackedWeight | None:
        """The first head's weight of a stack of latent attention; None where `name` is no such stack."""
        if self.config.latent is None or not name.endswith(HEAD_STACKS):
            return None
        return first_head(self.weights[name], self.config.n_heads)

    def one_expert(self, name: str) -> PackedWeight | None:
        """The first expert's weight of a stack; None where `name` is no stack."""
        experts = self.config.experts
        if experts is None or not name.endswith(STACKS):
            return None
        return first_expert(self.weights[name], experts, name)
