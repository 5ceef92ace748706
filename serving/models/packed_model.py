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
from phasewise.serving.models.later import LATER
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
from phasewise.serving.models.parts.feed_forward import FeedForward, FeedForwardForm
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
    StateLayers,
)
from phasewise.serving.models.parts.streams import InputsOfLayer, LayerInputs, Streams, StreamsOfLayer
from phasewise.serving.models.rope import RopeSpec
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults

FORMATS = ("native", "f32", "bf16", "int8", "int4")

# Far beyond any published model, small enough that no product below leaves 63 bits.
LARGEST = {
    "n_layers": 1 << 10,
    "hidden": 1 << 17,
    "ffn": 1 << 20,
    "n_heads": 1 << 10,
    "n_kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "vocab_size": 1 << 22,
    "context_length": MOST_POSITIONS,
}
MOST_KINDS = 4

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
class SingleHalves:
    """The layers that have one half only, and one norm, which is called `attn_norm` in all of them."""

    mixing: tuple[int, ...] = ()
    """Layers without a feed-forward layer, ascending."""
    feed_forward: tuple[int, ...] = ()
    """Layers that are a feed-forward layer, ascending."""

    def check(self, n_layers: int) -> None:
        """Raise ModelError if none of `n_layers` layers mixes tokens."""
        if len(self.feed_forward) >= n_layers:
            raise ModelError("a model in which no token reads others cannot run")


BOTH_HALVES = SingleHalves()
"""The halves of a model whose layers all have both."""


@dataclass(frozen=True)
class LayerKind:
    """The settings of attention in which layers of one model differ."""

    window: int | None
    """Positions that a token sees, itself included; None: all. Of an encoder half of them on each side."""
    rope: RopeSpec | None
    """RoPE of queries and keys; None: queries and keys carry no positions."""
    heads: HeadShape | None = field(default=None, metadata=LATER)
    """The KV heads of the layer; None: the model's."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(AttentionForm, FeedForwardForm):
    """The shape of a model: what its attention and feed-forward layers have in all layers, and what is the
    model's alone. Construction refuses shapes that no model can have. Without `encoder` a decoder:
    A layer is h += r A(norm(h)), h += r F(norm(h)): attention A, feed-forward F, r the residual scale.
    Without `pre_norms` A and F read h itself; with `post_norms` their outputs are normalised."""

    architecture: str
    n_layers: int
    hidden: int
    ffn: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    layer_kinds: tuple[LayerKind, ...] = ()
    """The kind of each layer; (): all layers have `rope` and `sliding_window`."""
    pre_norms: bool = True
    post_norms: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    experts: Experts | None = None
    encoder: Encoder | None = None
    state: StateLayers | None = field(default=None, metadata=LATER)
    """Layers that keep a state in place of keys and values."""
    last_row_scores: bool = field(default=False, metadata=LATER)
    """True if a decoder gives a pair of texts one score: the product of the last row with a vector."""
    layer_norms: bool = field(default=False, metadata=LATER)
    """True if norms of the stream are LayerNorms."""
    norm_biases: bool = field(default=False, metadata=LATER)
    """True if norms of the stream have biases."""
    parallel: bool = field(default=False, metadata=LATER)
    """True if a layer is h += A(n) + F(n), n = norm(h): both halves read one norm of the same stream."""
    halves: SingleHalves = field(default=BOTH_HALVES, metadata=LATER)
    factors: ProductFactors = field(default=NO_FACTORS, metadata=LATER)
    layer_scales: bool = field(default=False, metadata=LATER)
    """True if each layer has a number by which the stream is multiplied behind the layer."""
    ffn_widths: tuple[int, ...] = field(default=(), metadata=LATER)
    """Widths of feed-forward layers where they differ: `ffn` is the largest."""
    shared_kv_layers: int = field(default=0, metadata=LATER)
    """Number of last layers that read keys and values of the last layer of their kind before them."""
    layer_inputs: LayerInputs | None = field(default=None, metadata=LATER)
    streams: Streams | None = field(default=None, metadata=LATER)
    drafts: str = field(default="", metadata=LATER)
    """"mtp": a head that drafts, one layer over embeddings of tokens and rows of another model."""

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise ModelError(f"{name} is {value!r:.80}: a whole number from 1 to {largest} expected")
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"the norm epsilon is {self.norm_eps!r:.80}: a number between 0 and 1 expected")
        if len(self.layer_kinds) not in (0, self.n_layers):
            raise ModelError(
                f"{counted(self.n_layers, 'layer')} with"
                f" {counted(len(self.layer_kinds), 'kind')} of attention"
            )
        for kind in self.kinds:
            self._check_kind(kind)
        if len(self.kinds) > MOST_KINDS:
            raise ModelError(
                f"{counted(len(self.kinds), 'kind')} of attention in one model; at most {MOST_KINDS} can run"
            )
        self._check_scales()
        if self.state is not None:
            self.state.check(self.n_layers)
        self._check_layers()
        self._check_own_layers()
        self._check_tokens()
        parts = [layer.feed_forward for layer in self.layers if layer.feed_forward]
        if self.layer_inputs is not None:
            self.layer_inputs.check(self.n_layers, self.vocab_size)
        if self.ffn_widths and max(part.width for part in parts) > self.ffn:
            raise ModelError(f"a feed-forward layer is wider than {self.ffn} numbers, the widest")

    def _check_layers(self) -> None:
        self.halves.check(self.n_layers)
        if not self.attention_layers or any(map(self.keeps_state, self.halves.feed_forward)):
            raise ModelError("a model whose layers keep no keys and values cannot run")

    def _check_own_layers(self) -> None:
        if type(self.shared_kv_layers) is not int or not 0 <= self.shared_kv_layers < self.n_layers:
            raise ModelError(
                f"layers that read others' keys and values: {self.shared_kv_layers!r:.80} of {self.n_layers}"
            )
        first = self.n_layers - self.shared_kv_layers
        if {self.kind_of(layer) for layer in range(first, self.n_layers)} - set(
            map(self.kind_of, range(first))
        ):
            raise ModelError("layers that read keys and values of others have none of their kind before them")
        if self.streams is not None:
            self.streams.check(self.n_layers)

    def _check_kind(self, kind: LayerKind) -> None:
        if kind.window is not None and (type(kind.window) is not int or not 1 <= kind.window <= 1 << 30):
            raise ModelError(f"the sliding window is {kind.window!r:.80} tokens")
        if kind.heads is not None:
            kind.heads.check(self.n_kv_heads, self.head_dim)
        if kind.rope is not None:
            kind.rope.check(kind.heads.head_dim if kind.heads else self.head_dim)

    def _check_scales(self) -> None:
        for name in ("embed_scale", "residual_scale", "logit_scale", "logit_cap"):
            value = getattr(self, name)
            if value is not None and not 1e-6 <= value <= 1e6:
                raise ModelError(
                    f"the {name.replace('_', ' ')} is {value!r:.80}: a number from 1e-6 to 1e6 expected"
                )
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

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        return layers_of(self)

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

    def kind_of(self, layer: int) -> LayerKind:
        return self.layer_kinds[layer] if self.layer_kinds else LayerKind(self.sliding_window, self.rope)

    def keeps_state(self, layer: int) -> bool:
        return self.state is not None and layer in self.state.layers

    def attends(self, layer: int) -> bool:
        """True if a layer keeps keys and values."""
        if layer in self.halves.feed_forward:
            return False
        return not self.keeps_state(layer) or (self.state is not None and self.state.beside)

    @property
    def last_mixing(self) -> int:
        """The last layer in which tokens read others."""
        return max(set(range(self.n_layers)) - set(self.halves.feed_forward))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values."""
        keeping = range(self.n_layers - self.shared_kv_layers)
        return tuple(layer for layer in keeping if self.attends(layer))

    def kept_by(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or the last of its kind that keeps any."""
        first_shared = self.n_layers - self.shared_kv_layers
        if layer < first_shared:
            return layer
        return max(before for before in range(first_shared) if self.kind_of(before) == self.kind_of(layer))

    @property
    def keeping(self) -> tuple[Attending, ...]:
        """The attention of every layer that keeps keys and values."""
        parts = (self.layers[layer].attention for layer in self.attention_layers)
        return tuple(part for part in parts if part is not None)

    @property
    def has_mixed_heads(self) -> bool:
        """True if heads of keys and values are not the same in all layers."""
        return any(kind.heads is not None for kind in self.kinds)

    @property
    def turns(self) -> dict[str, int]:
        """Counts by which a file's tensors are cut into ours (`loaders.cuts.CutFor.turns`)."""
        groups = 1 if self.state is None else max(self.state.groups, 1)
        turned = 0 if self.latent is None else self.latent.rope_dim
        return {"n_heads": self.n_heads, "groups": groups, "turned": turned}

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence's state takes beside keys and values, however long the sequence is."""
        return 0 if self.state is None else self.state.state_bytes(self.hidden)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layer_kinds)) or (self.kind_of(0),)


STATE_MIXERS: dict[str, type[Convolving]] = {
    SHORT_CONV: ShortConv, DELTA: Delta, MAMBA2: Mamba2, KDA: KimiDelta,
}  # fmt: skip


def layers_of(config: ModelConfig) -> tuple[Layer, ...]:
    """Make every layer of a model. Raises ModelError for parts that cannot run, alone or together."""
    _check_dense(config)
    alike: dict[tuple[object, ...], Layer] = {}
    layers = []
    for number in range(config.n_layers):
        mixers, feed_forward, mixture = _mixers(config, number), _dense(config, number), None
        experts = config.experts
        if experts is not None and number not in (*experts.dense_layers, *config.halves.mixing):
            mixture = Mixture(experts, _feed_forward(config, config.ffn))
        streams = inputs = None
        if config.streams is not None:
            streams = StreamsOfLayer(config.streams, config.hidden, config.norm_eps)
        if config.layer_inputs is not None:
            inputs = InputsOfLayer(config.hidden, config.layer_inputs.size, config.activation)
        parts = (mixers, feed_forward, mixture, streams, inputs, _norms(config, number))
        if parts not in alike:
            alike[parts] = Layer(config.hidden, *parts, config.layer_scales)
        layers.append(alike[parts])
    return tuple(layers)


def _mixers(config: ModelConfig, number: int) -> tuple[Mixer, ...]:
    """The mixers of a layer, a state before attention; both read the stream before either output is added."""
    mixers: list[Mixer] = []
    if config.state is not None and number in config.state.layers:
        mixer = STATE_MIXERS[config.state.kind]
        mixers.append(mixer(config.state, config.hidden, config.factors, config.norm_eps))
    if not config.attends(number):
        return tuple(mixers)
    own, encoder = config.kind_of(number), config.encoder
    heads, form = own.heads or HeadShape(config.n_kv_heads, config.head_dim), form_in(config, AttentionForm)
    if encoder is not None:
        form = replace(form, out_bias=form.out_bias or encoder.out_bias)
    kept = config.hidden, form, heads, config.kinds.index(own), own.window
    if config.latent is not None:
        return (*mixers, LatentMixer(*kept))
    attention = Attention(
        *kept,
        config.kept_by(number) != number,
        config.factors.qkv,
        config.context_length if config.query_growth else 0,
        encoder is not None and encoder.distances,
    )
    return (*mixers, attention)


def form_in(config: ModelConfig, kind: type[Form]) -> Form:
    """The part of a config that is the form of its attention, or of its feed-forward layers."""
    return kind(**{own.name: getattr(config, own.name) for own in fields(kind)})


def _feed_forward(
    config: ModelConfig, width: int, sparsity: float = 0.0, weighed: bool = False
) -> FeedForward:
    form, factors = form_in(config, FeedForwardForm), (config.factors.gate, config.factors.up)
    if config.encoder is not None:
        form = replace(form, ffn_biases=config.encoder.ffn_biases)
    return FeedForward(config.hidden, width, form, factors, sparsity, weighed)


def _dense(config: ModelConfig, number: int) -> FeedForward | None:
    """The feed-forward layer that computes every row; None where there is none."""
    experts, sparsity = config.experts, config.streams.sparsity[number] if config.streams else 0.0
    if number in config.halves.mixing:
        return None
    if experts is None:
        return _feed_forward(config, config.ffn_widths[number] if config.ffn_widths else config.ffn, sparsity)
    if number in experts.dense_layers:
        return _feed_forward(config, experts.dense_ffn)
    return (
        _feed_forward(config, experts.shared_ffn, weighed=experts.shared_gate) if experts.shared_ffn else None
    )


def _check_dense(config: ModelConfig) -> None:
    if config.ffn_widths and (len(config.ffn_widths) != config.n_layers or config.experts is not None):
        raise ModelError(
            f"widths of {counted(len(config.ffn_widths), 'feed-forward layer')} of {config.n_layers}"
        )
    if config.experts is None:
        return
    dense, n_layers = config.experts.dense_layers, config.n_layers
    if list(dense) != sorted(set(dense)) or (dense and not 0 <= dense[0] <= dense[-1] < n_layers):
        raise ModelError(f"layers {dense!r:.80} of {n_layers} have no experts")
    if len(dense) >= n_layers:
        raise ModelError(f"a mixture of experts in none of {counted(n_layers, 'layer')}")


def _norms(config: ModelConfig, number: int) -> tuple[str, ...]:
    """Names of the norms of the stream before a layer's halves and behind them, and of their biases."""
    if config.encoder is not None:
        norms = ["attn_norm", "ffn_norm"]
        if config.encoder.pre_norms:  # the first layer's attention reads the stream as it is
            return tuple(norms if number else norms[1:])
        return tuple(f"{norm}{ending}" for norm in norms for ending in ("", "_bias"))
    norms = []
    if config.pre_norms:
        halves = config.halves
        is_single = config.parallel or number in (*halves.mixing, *halves.feed_forward)
        norms = ["attn_norm"] if is_single else ["attn_norm", "ffn_norm"]
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
