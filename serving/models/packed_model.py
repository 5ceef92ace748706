"""A model as the engine sees it: its shape, its packed weights, its tokenizer text.

Every loader ends in a `PackedModel`; nothing after it knows GGUF or safetensors. A `ModelConfig` that
exists has been checked, so the engine may multiply its numbers without fear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.cython_kernels.division import columns
from phasewise.cython_kernels.exact import logarithm, power
from phasewise.cython_kernels.packing import PANEL, PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.encoding import MOST_POSITIONS, Embedding, Encoder, encoder_to_json
from phasewise.serving.models.experts import STACKS, Experts, experts_from_json, experts_to_json
from phasewise.serving.models.latent import STACKS as HEAD_STACKS
from phasewise.serving.models.latent import LatentAttention, latent_from_json, latent_to_json
from phasewise.serving.models.low_rank import Adapter
from phasewise.serving.models.mapped_file import MappedFile
from phasewise.serving.models.query_growth import QueryGrowth
from phasewise.serving.models.state_layers import StateLayers, state_from_json, state_to_json
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
GATE_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu", "gelu")
PLAIN_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "relu2")
"""Activations of feed-forward layers without a gate; "gelu" is that of the error function, "relu2" the square
of "relu". The kernels have both lists in cython_kernels/ops.h."""

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies; `original_context` in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class FrequencyFactors:
    """One divisor per frequency, as GGUF files store Llama 3.1's scaling."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, section 3): frequencies that turn often within `original_context` tokens are
    kept, those that turn seldom divided by `factor`, with a ramp from `beta_fast` to `beta_slow` turns
    between them.

    magnitude: what cosines and sines are multiplied by. truncate: whether the ramp's ends are whole pairs.
    """

    factor: float
    original_context: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (Ding et al. 2024): a divisor per frequency, of two lists. The long one holds for every
    position where a service takes more than `original_context` tokens, the short one elsewhere."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    magnitude: float


Scaling = Llama3Scaling | LinearScaling | FrequencyFactors | YarnScaling | LongScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the first `dim` of a head, half-split pairs (i, i + dim/2)."""

    theta: float
    dim: int
    scaling: Scaling | None = None

    def inv_freq(self, context_length: int = 0) -> npt.NDArray[np.float64]:
        """Radians per position, float64 [dim / 2], for a context of that many tokens."""
        plain = np.array([power(self.theta, -pair, self.dim) for pair in range(0, self.dim, 2)])
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return plain / factor
            case FrequencyFactors(factors):
                return plain / np.asarray(factors, dtype=np.float64)
            case LongScaling(short, long, original_context):
                factors = long if context_length > original_context else short
                return plain / np.asarray(factors, dtype=np.float64)
            case Llama3Scaling():
                return _llama3(plain, self.scaling)
            case YarnScaling():
                return _yarn(plain, self.theta, self.dim, self.scaling)

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines."""
        return self.scaling.magnitude if isinstance(self.scaling, YarnScaling | LongScaling) else 1.0


def _llama3(plain: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    """Keep short wavelengths, divide long ones by the factor, blend between (Llama 3.1's reference code)."""
    rotations = scaling.original_context * plain / (2 * math.pi)  # whole turns within the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    blended: npt.NDArray[np.float64] = keep * plain + (1 - keep) * plain / scaling.factor
    return blended


def _yarn(
    plain: npt.NDArray[np.float64], theta: float, dim: int, scaling: YarnScaling
) -> npt.NDArray[np.float64]:
    """Pair i makes r turns within the original context at i = dim log(context / (2 pi r)) / (2 log theta)."""

    def pair_of(turns: float) -> float:
        turned = logarithm(scaling.original_context / (turns * 2 * math.pi))
        return dim * turned / (2 * logarithm(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    divided = np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)
    blended: npt.NDArray[np.float64] = (1 - divided) * plain + divided * plain / scaling.factor
    return blended


@dataclass(frozen=True)
class LayerKind:
    """The settings in which layers of one model differ."""

    window: int | None
    """Positions that a token sees, itself included; None: all. Of an encoder half of them on each side."""
    rope: RopeSpec | None
    """None: positions leave no trace in queries and keys."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Construction refuses shapes that no model can have. Without `encoder` a decoder:

    A layer is h += r A(norm(h)), h += r F(norm(h)): attention A, feed-forward F, r the residual scale. Where
    `pre_norms` is false their inputs are h itself; with `post_norms` their outputs are normalised.
    """

    architecture: str
    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    qk_norm: bool
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    layer_kinds: tuple[LayerKind, ...] = ()
    """One for each layer; none: all layers have `rope` and `sliding_window`."""
    activation: str = "silu"
    gated: bool = True
    """True if the feed-forward layer is down(act(gate(x)) * up(x)), else down(act(up(x)))."""
    pre_norms: bool = True
    post_norms: bool = False
    whole_qk_norm: bool = False
    """True if `qk_norm` is over the whole of a row's queries, and of its keys, rather than over each head."""
    out_bias: bool = False
    """True if the projection after attention has a bias."""
    sinks: bool = False
    """True if each head has a score of its own beside those of positions, which takes weight and gives no
    value.
    """
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    """The factor of scores; None: 1 / sqrt(head_dim)."""
    attention_cap: float | None = None
    """c: scores are c tanh(score / c)."""
    logit_cap: float | None = None
    experts: Experts | None = None
    encoder: Encoder | None = None
    gated_attention: bool = False
    """True if what attention gives is multiplied by the logistic of one more product of the stream."""
    state: StateLayers | None = None
    """Layers that keep a state in place of keys and values."""
    last_row_scores: bool = False
    """True if a decoder gives a pair of texts one score: the product of the last row with a vector."""
    layer_norms: bool = False
    """True if norms of the stream are LayerNorms."""
    norm_biases: bool = False
    """True if these have biases."""
    parallel: bool = False
    """True if a layer is h += A(n) + F(n), n = norm(h): both halves read one norm of the same stream."""
    ffn_biases: bool = False
    """True if the products of feed-forward layers without a gate have biases."""
    query_growth: QueryGrowth | None = None
    """The growth of queries with their positions."""
    latent: LatentAttention | None = None
    """Attention over one vector of each token; `head_dim` are then the vector's numbers, in one KV head."""

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise ModelError(f"{name} is {value!r:.80}: a whole number from 1 to {largest} expected")
        if self.n_heads % self.n_kv_heads:
            raise ModelError(f"{self.n_heads} attention heads do not divide into {self.n_kv_heads} KV heads")
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"the norm epsilon is {self.norm_eps!r:.80}: a number between 0 and 1 expected")
        activations = GATE_ACTIVATIONS if self.gated else PLAIN_ACTIVATIONS
        if self.activation not in activations:
            raise ModelError(f"activation {self.activation!r:.80} is not one of {', '.join(activations)}")
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
        if self.experts is not None:
            if not self.gated:
                raise ModelError("experts whose feed-forward layers have no gate cannot run")
            self.experts.check(self.n_layers)
        self._check_form()
        if self.state is not None:
            self.state.check(self.n_layers)
        if self.latent is not None:
            self._check_latent(self.latent)
        self._check_tokens()

    def _check_latent(self, latent: LatentAttention) -> None:
        latent.check(self.n_kv_heads, self.head_dim)
        if self.state or self.sinks or self.qk_norm or self.out_bias or self.gated_attention:
            raise ModelError(
                "latent attention beside states, sinks, norms of heads, biases or gates cannot run"
            )
        if any(kind.rope is None or kind.rope.dim != latent.rope_dim for kind in self.kinds):
            raise ModelError(f"latent attention turns {latent.rope_dim} numbers of every layer, no others")

    def _check_kind(self, kind: LayerKind) -> None:
        if kind.window is not None and (type(kind.window) is not int or not 1 <= kind.window <= 1 << 30):
            raise ModelError(f"the sliding window is {kind.window!r:.80} tokens")
        if kind.rope is not None:
            self._check_rope(kind.rope)

    def _check_rope(self, rope: RopeSpec) -> None:
        if (
            type(rope.dim) is not int
            or self.head_dim % 2
            or rope.dim % 2
            or not 2 <= rope.dim <= self.head_dim
        ):
            raise ModelError(f"RoPE over {rope.dim} of {self.head_dim} head dimensions is not supported")
        for context_length in (0, 1 << 62):
            with np.errstate(all="ignore"):
                try:
                    inv_freq = rope.inv_freq(context_length)
                except (ArithmeticError, ValueError):
                    inv_freq = np.array([math.nan])
            if inv_freq.shape != (rope.dim // 2,) or not (np.isfinite(inv_freq) & (inv_freq > 0)).all():
                raise ModelError(f"these RoPE parameters give no usable frequencies: {_brief(rope)}")
        if not 0 < rope.magnitude < 1e3:
            raise ModelError(
                f"the RoPE scaling multiplies by {rope.magnitude!r:.80}: a number from 0 to 1000 expected"
            )

    def _check_scales(self) -> None:
        for name in (
            "embed_scale",
            "residual_scale",
            "logit_scale",
            "attention_scale",
            "attention_cap",
            "logit_cap",
        ):
            value = getattr(self, name)
            if value is not None and not 1e-6 <= value <= 1e6:
                raise ModelError(
                    f"the {name.replace('_', ' ')} is {value!r:.80}: a number from 1e-6 to 1e6 expected"
                )
        if self.norm_eps / self.residual_scale**2 >= 1:
            raise ModelError(
                f"a norm epsilon of {self.norm_eps!r} with a residual scale of {self.residual_scale!r}"
            )

    def _check_form(self) -> None:
        if self.norm_biases and not self.layer_norms:
            raise ModelError("norms with biases that are no LayerNorms cannot run")
        if self.parallel and not self.layer_norms:
            raise ModelError("layers whose halves read one norm that is no LayerNorm cannot run")
        if self.parallel and (self.post_norms or not self.pre_norms or self.experts or self.state):
            raise ModelError(
                "layers whose halves read one norm, with norms behind them, experts or a state, cannot run"
            )
        if self.ffn_biases and (self.gated or self.experts is not None):
            raise ModelError("feed-forward layers with biases and a gate cannot run")
        if self.layer_norms and (self.post_norms or self.state is not None or self.experts is not None):
            raise ModelError("LayerNorms in layers with norms behind them, a state or experts cannot run")
        if self.query_growth is not None:
            self.query_growth.check(self.context_length)

    def _check_tokens(self) -> None:
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and not 0 <= token < self.vocab_size:
                raise ModelError(f"special token {token} is outside the vocabulary of {self.vocab_size}")

    @property
    def scores(self) -> bool:
        """True if pairs of texts get one score each, rather than a text its vector."""
        return self.last_row_scores or (self.encoder is not None and self.encoder.scores)

    def kind_of(self, layer: int) -> LayerKind:
        return self.layer_kinds[layer] if self.layer_kinds else LayerKind(self.sliding_window, self.rope)

    def experts_of(self, layer: int) -> Experts | None:
        """The mixture of a layer; None where one feed-forward layer computes every token."""
        if self.experts is None or layer in self.experts.dense_layers:
            return None
        return self.experts

    def ffn_of(self, layer: int) -> int:
        """The width of the feed-forward layer that every token of a layer goes through; 0: there is none."""
        if self.experts is None:
            return self.ffn
        return self.experts.dense_ffn if layer in self.experts.dense_layers else self.experts.shared_ffn

    def keeps_state(self, layer: int) -> bool:
        return self.state is not None and layer in self.state.layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values."""
        return tuple(layer for layer in range(self.n_layers) if not self.keeps_state(layer))

    @property
    def turns(self) -> dict[str, int]:
        """Runs of rows in which tensors hold several of ours (`loaders.families.family.TensorCut`)."""
        groups = 1 if self.state is None else max(self.state.groups, 1)
        turned = 0 if self.latent is None else self.latent.rope_dim
        return {"n_heads": self.n_heads, "groups": groups, "turned": turned}

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence takes beside its keys and values, however long it is."""
        return 0 if self.state is None else self.state.state_bytes(self.hidden)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of its layers."""
        return tuple(dict.fromkeys(self.layer_kinds)) or (self.kind_of(0),)

    @property
    def n_into_ffn(self) -> int:
        """Weights of a feed-forward layer that read the stream: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def q_rows(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class PackedModel:
    """A model ready to run; weights and vectors are views over a file mapped read-only.

    An encoder's names are in `loaders.encoders.encoder_layout`.

    weights: "embed" [vocab, hidden]; "lm_head" unless tied; per layer i "layers.{i}.qkv" (q, k, v rows),
    ".o", ".gate_up" (gate rows, then up rows) or, without a gate, ".up", and ".down". Parts whose packed
    kinds differ stay separate: ".q", ".k", ".v" or ".gate", ".up". With a mixture of experts ".router"
    [experts, hidden] and, one expert below the other, ".experts_gate_up" (of each expert gate rows, then up
    rows) and ".experts_down"; ".gate_up" and ".down" are then the shared expert's, where there is one.
    vectors, float32: "final_norm"; per layer, as the config says, ".attn_norm", ".ffn_norm",
    ".attn_post_norm", ".ffn_post_norm", ".qkv_bias", ".q_norm", ".k_norm", ".o_bias", ".sinks" [n_heads],
    ".router_bias", ".gate_up_bias", ".up_bias", ".down_bias", ".choice_bias" [experts], biases of LayerNorms
    (".attn_norm_bias"). Layers with a state have what `state_layers` lists in place of attention's.
    content_hash names the source's content and the format, so equal models hash alike on every machine.
    """

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
    """None: the arrays are this process's own."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """The sampling that the model's files ask for."""
    embedding: Embedding | None = None
    """The pooling of texts to vectors; None for a model that is not made for that."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that requests may have on top; a slice names them by their numbers, from 1 on."""

    def products(self) -> dict[str, PackedWeight]:
        """The arrays that products read, by name: of a stack of experts the first one's weight, elsewhere
        the weight.
        """
        return {
            name: self.one_expert(name) or self.one_head(name) or weight
            for name, weight in self.weights.items()
        }

    def one_head(self, name: str) -> PackedWeight | None:
        """The first head's weight of a stack of latent attention; None where `name` is no such stack."""
        if self.config.latent is None or not name.endswith(HEAD_STACKS):
            return None
        stack = self.weights[name]
        return columns(stack, 0, stack.n // self.config.n_heads // PANEL)

    def one_expert(self, name: str) -> PackedWeight | None:
        """The first expert's weight of a stack; None where `name` is no stack."""
        experts = self.config.experts
        if experts is None or not name.endswith(STACKS):
            return None
        stack = self.weights[name]
        if stack.n % (experts.count * PANEL):
            raise ModelError(
                f"{self.name} has {experts.count} experts with {stack.n} outputs in all in {name}:"
                f" a multiple of {PANEL} for each can run"
            )
        return columns(stack, 0, stack.n // experts.count // PANEL)


USUAL = {"gated": True, "state": None, "latent": None, "query_growth": None} | dict.fromkeys(
    ("gated_attention", "last_row_scores", "layer_norms", "norm_biases", "parallel", "ffn_biases"), False
)
"""Values that most models have: `config_to_json` does not mention them."""


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Plain JSON values; `config_from_json` is the inverse.

    What is `USUAL` is not mentioned: files and fingerprints of before others were read stay as they are.
    """
    fields = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}
    for name, usual in USUAL.items():
        if fields[name] == usual:
            del fields[name]
    if config.latent is not None:
        fields["latent"] = latent_to_json(config.latent)
    if config.state is not None:
        fields["state"] = state_to_json(config.state)
    if config.query_growth is not None:
        fields["query_growth"] = dict(vars(config.query_growth))
    kinds = config.kinds if config.layer_kinds else ()
    return {
        **fields,
        "rope": _rope_to_json(config.rope),
        "experts": experts_to_json(config.experts),
        "encoder": None if config.encoder is None else encoder_to_json(config.encoder),
        "kinds": [{"window": kind.window, "rope": _rope_to_json(kind.rope)} for kind in kinds],
        "layer_kinds": [kinds.index(kind) for kind in config.layer_kinds],
    }


def config_from_json(fields: Mapping[str, Any]) -> ModelConfig:
    """The config that `config_to_json` wrote; KeyError or TypeError for anything else."""
    values = dict(fields)
    kinds = [LayerKind(kind["window"], _rope_from_json(kind["rope"])) for kind in values.pop("kinds")]
    values["layer_kinds"] = tuple(kinds[index] for index in values["layer_kinds"])
    values["experts"] = experts_from_json(values["experts"])
    values["state"] = state_from_json(values.get("state"))
    growth = values.get("query_growth")
    values["query_growth"] = None if growth is None else QueryGrowth(**growth)
    values["latent"] = latent_from_json(values.get("latent"))
    values["encoder"] = None if values["encoder"] is None else Encoder(**values["encoder"])
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    rope = _rope_from_json(values.pop("rope"))
    if rope is None:
        raise TypeError("a config without RoPE parameters")
    return ModelConfig(rope=rope, **values)


SCALINGS: dict[str, Callable[..., Scaling]] = {
    kind.__name__: kind for kind in (Llama3Scaling, LinearScaling, FrequencyFactors, YarnScaling, LongScaling)
}


def _rope_to_json(rope: RopeSpec | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    scaling = rope.scaling
    kind = None if scaling is None else {"kind": type(scaling).__name__, **vars(scaling)}
    return {"theta": rope.theta, "dim": rope.dim, "scaling": kind}


def _rope_from_json(fields: Mapping[str, Any] | None) -> RopeSpec | None:
    if fields is None:
        return None
    values, scaling = dict(fields), None
    if values["scaling"] is not None:
        own: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in values["scaling"].items()
        }
        scaling = SCALINGS[own.pop("kind")](**own)
    return RopeSpec(values["theta"], values["dim"], scaling)


def _brief(rope: RopeSpec) -> str:
    text = str(rope)
    return text if len(text) < 200 else f"{text[:200]}..."
