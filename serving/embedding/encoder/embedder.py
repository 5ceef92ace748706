"""An embedding model on one team of threads: tokens in, vectors or scores out.

The default arithmetic: an encoder multiplies many rows at a time, so that arithmetic bounds its speed, not
the bytes of weights. Weights of eight and four bits are therefore widened where that is faster than integer
dot products with quantised rows: to bfloat16 for a tile unit, and to float32 on x86 without VNNI. Both are
nearer to float32 as well, since rows are not quantised (benchmarks/notes/embeddings.md).

In inputs of at most SHORT_TOKENS the errors of quantised rows do not average out: their weights are widened
everywhere (`NEAREST`). `CANONICAL` gives the same bits on every CPU: integer dot products without 16-bit
ones, and weights widened to float32 for inputs of at most SHORT_TOKENS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from phasewise._words import counted
from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import Program, Team, compute_paths
from phasewise.cython_kernels.packing import DENSE_KINDS, PackedWeight, pack_dense
from phasewise.cython_kernels.schedules import ScheduleLookup, canonical_path
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.encoder.pooling import Floats, pooled, score
from phasewise.serving.errors import ModelError, RanksError
from phasewise.serving.loaders.adapter_files import adapter_of
from phasewise.serving.loaders.layout import task_shapes
from phasewise.serving.models.arena import rounded
from phasewise.serving.models.decoder_layer import add_layer_norm
from phasewise.serving.models.encoding import Embedding, EncoderTasks
from phasewise.serving.models.forward import Capacity, build_program
from phasewise.serving.models.linears import Adapter, Linears, LowRank, Update, update_of
from phasewise.serving.models.packed_model import ModelConfig, PackedModel
from phasewise.serving.models.parts.site import ActivationArena
from phasewise.serving.processes.headroom import check_memory
from phasewise.serving.ranks.rank_teams import TABLES, keeping_affinity, open_teams, tell_if_moved

EMBED = "embed"
"""The name of the op that reads the adapters' embedding table."""


@dataclass(frozen=True)
class TaskAdapters:
    """Low-rank adapters of a model's tasks, added to every product; for embeddings they are rows of A times
    B. `adapters`: one for each task, in order. `table` [vocab, numbers]: A of every token for task after
    task, and a 1 for the addition to segment embeddings. `nothing` [hidden, numbers]: zeros, the base weight
    of the op that reads the table, so that only the adapters contribute."""

    adapters: tuple[Adapter, ...]
    table: PackedWeight
    nothing: PackedWeight


def task_adapters(model: PackedModel) -> TaskAdapters | None:
    """The low-rank adapters of a model's tasks; None for a model without tasks."""
    config = model.config
    tasks = None if config.encoder is None else config.encoder.tasks
    if tasks is None:
        return None
    stacks = {name: model.vectors[name].reshape(shape) for name, shape in task_shapes(config, tasks).items()}
    embed = stacks["task_embed_a"].transpose(1, 0, 2).reshape(config.vocab_size, -1)
    table = np.concatenate([embed, np.ones((config.vocab_size, 1), np.float32)], axis=1)
    adapters = []
    for number, name in enumerate(tasks.names):
        adapter = adapter_of(name, _products(stacks, number, config, tasks.scale), config)
        added = _of_embeddings(stacks, number, tasks)
        adapters.append(replace(adapter, updates={**adapter.updates, EMBED: added}))
    nothing = np.zeros((config.hidden, table.shape[1]), np.float32)
    return TaskAdapters(tuple(adapters), pack_dense(table, "f32"), pack_dense(nothing, "f32"))


def _products(stacks: dict[str, Floats], task: int, config: ModelConfig, scale: float) -> dict[str, LowRank]:
    """A task's low-rank factors of every product, by phasewise's names of the weights."""
    parts = {}
    for index, layer in enumerate(config.layers):
        for product in layer.products:
            stem = f"layers.{index}.task_{product.reader}"
            a, b = stacks[f"{stem}_a"][task], stacks[f"{stem}_b"][task]
            for name, first in product.columns():
                rows = b[first : first + product.outputs[name]]
                parts[f"layers.{index}.{name}"] = LowRank(a, rows, scale)
    return parts


def _of_embeddings(stacks: dict[str, Floats], number: int, tasks: EncoderTasks) -> Update:
    """A task's update of embeddings: its columns of the table times B, and what it adds to segments."""
    first, width = number * tasks.rank, tasks.numbers
    places = np.eye(width, dtype=np.float32)
    own = LowRank(places[first : first + tasks.rank], stacks["task_embed_b"][number].T, tasks.scale)
    a, b = (stacks[f"task_segments_{which}"][number].astype(np.float64) for which in "ab")
    segments = LowRank(places[-1:], (tasks.scale * (a @ b)).astype(np.float32).T, 1.0)
    down = np.concatenate([own.a, segments.a])
    scales = [own.scale] * own.rank + [segments.scale]
    whole = update_of([(0, LowRank(down, np.concatenate([own.b, segments.b], axis=1), 1.0))])
    return replace(whole, scales=np.array(scales, np.float32))


def _add_embedding(
    model: PackedModel, added: TaskAdapters | None, linears: Linears, arena: ActivationArena
) -> None:
    vectors, program, stream = model.vectors, linears.program, arena.hidden
    positions, segments = vectors.get("positions"), vectors.get("segments")
    program.embed(model.weight("embed"), *stream, positions=positions, segments=segments)
    if added is not None:
        place = arena.gate_up[0], rounded(added.table.k)
        program.embed(added.table, *place)
        linears.add([(added.nothing, 0)], {"source": "rows"}, place, stream, EMBED, add=True)
    add_layer_norm(program, model, "embed_norm", stream, stream, "every")


SHORT_TOKENS = 8
TILES = "bf16_tile"
WIDENED = "fma"
_WIDE = (TILES, "bf16_dot", WIDENED)
"""Arithmetic that does not quantise rows, the fastest first."""
_WITHOUT_INTEGER_DOTS = ("avx2", "avx512")


@dataclass(frozen=True)
class EncoderDefaults(ScheduleLookup):
    """The schedules of an encoder that was not tuned. `widens`: quantised weights are always widened.
    `is_canonical`: only arithmetic that gives the same bits on every CPU."""

    widens: bool = False
    is_canonical: bool = False

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        """The arithmetic of a weight: a widened one, or None for that of the instruction set."""
        if self.is_canonical:
            widens = self.widens and weight.kind not in DENSE_KINDS
            return (WIDENED if widens else canonical_path(weight)), 1
        if weight.kind in DENSE_KINDS:
            return None, 1
        paths = compute_paths(weight.kind, weight.group or 32)
        if TILES in paths:
            return TILES, 1
        if self.widens:
            return next((path for path in _WIDE if path in paths), None), 1
        return (WIDENED if isa.active() in _WITHOUT_INTEGER_DOTS and WIDENED in paths else None), 1


FASTEST = EncoderDefaults()
NEAREST = EncoderDefaults(widens=True)
CANONICAL = EncoderDefaults(is_canonical=True)


def for_short_inputs(defaults: EncoderDefaults, weights: Iterable[PackedWeight]) -> EncoderDefaults | None:
    """The defaults for inputs of at most SHORT_TOKENS; None: they choose the arithmetic of `defaults`."""
    short = replace(defaults, widens=True)
    differ = any(defaults.arithmetic(weight) != short.arithmetic(weight) for weight in weights)
    return short if differ else None


STEP_TOKENS = 512
"""Rows that pass through the model at once; an input with more rows is computed alone."""
MOST_SEQUENCES = 128
_PANEL = 16  # slots of a panel of keys


@dataclass(frozen=True, slots=True)
class _Slice:
    """One input of a program's step, as `Program.run` takes inputs."""

    token_ids: Sequence[int]
    slot_base: int
    second: int | None
    start: int = 0
    wants_logits: bool = True
    table: None = None
    n_drafted: int = 0
    ring: None = None
    adapter: int = 0
    state: int = 0
    keeps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Way:
    """A program, its output rows, and the most tokens of several inputs that it computes at once."""

    program: Program
    rows: Floats
    step_tokens: int


class Embedder:
    """An embedding model with its team. One thread at a time may call it, which is pinned meanwhile."""

    def __init__(
        self,
        model: PackedModel,
        cores: Sequence[int],
        *,
        pinned: bool = True,
        step_tokens: int = STEP_TOKENS,
        schedules: tuple[ScheduleLookup, ...] | None = None,
        is_canonical: bool = False,
        most_threads: int = 0,
    ) -> None:
        """`cores`: the cores of the team's threads; where not `pinned`, only their number counts.
        `schedules`: None for the defaults of this module. `is_canonical`: defaults that give the same bits on
        every CPU. `most_threads`: the most threads that `move` has room for, if more than `cores`. ModelError
        for a model that makes no vectors or does not fit, RanksError where a core cannot be had."""
        if model.embedding is None:
            raise ModelError(
                f"{model.name} is no embedding model: its directory says nothing about pooling (modules.json)"
            )
        self.model = model
        self.embedding: Embedding = model.embedding
        self._every_row = self.embedding.pooling == "mean"
        self._pinned = pinned
        self._team = self._open_team(cores)
        self._told = not pinned
        self._threads = max(len(cores), most_threads)
        most = self.embedding.max_tokens
        try:
            defaults = CANONICAL if is_canonical else FASTEST
            self._added = task_adapters(model)
            self._way = self._build(schedules or (defaults,), step_tokens, most)
            self._short: _Way | None = None
            short = for_short_inputs(defaults, model.weights.values())
            if schedules is None and short is not None:
                self._short = self._build((short,), SHORT_TOKENS * MOST_SEQUENCES, SHORT_TOKENS)
        except BaseException:
            self._team.close()
            raise

    def _open_team(self, cores: Sequence[int]) -> Team:
        return open_teams({TABLES["prefill"]: tuple(cores)}, self._pinned)[TABLES["prefill"]]

    def _build(self, schedules: tuple[ScheduleLookup, ...], step_tokens: int, longest: int) -> _Way:
        tokens = max(step_tokens, longest)
        capacity = Capacity(
            kv_slots=tokens + _PANEL * MOST_SEQUENCES,  # every input begins at a panel of its own
            step_tokens=tokens,
            sequences=MOST_SEQUENCES,
            logit_rows=tokens if self._every_row else MOST_SEQUENCES,
            threads=self._threads,
        )
        model, added = self.model, self._added
        if added is not None:
            model = replace(model, adapters=added.adapters)
        embed = partial(_add_embedding, model, added) if model.config.encoder is not None else None
        program = build_program(model, capacity, check_memory, schedules, gives="rows", embed=embed)
        return _Way(program, np.asarray(program), step_tokens)

    def embed(self, inputs: Sequence[Tokens]) -> Floats:
        """Vectors or scores (logits) of the inputs in order, float32 [inputs, width]. ValueError for a token
        outside the vocabulary, an unknown task, or an input that is empty or too long."""
        for index, tokens in enumerate(inputs):
            if not 1 <= len(tokens.ids) <= self.embedding.max_tokens:
                raise ValueError(
                    f"input {index} has {counted(len(tokens.ids), 'token')}:"
                    f" 1 to {self.embedding.max_tokens} expected"
                )
        out = np.empty((len(inputs), self.model.config.result_width), np.float32)
        with keeping_affinity():
            for way, places in self._ways(inputs):
                for step in _steps(inputs, places, way.step_tokens):
                    self._run(way, [inputs[place] for place in step], step, out)
        return out

    def _ways(self, inputs: Sequence[Tokens]) -> list[tuple[_Way, Sequence[int]]]:
        """Programs with the indices of their inputs, by each one's length: others change none of its bits."""
        if self._short is None:
            return [(self._way, range(len(inputs)))]
        short = [index for index, tokens in enumerate(inputs) if len(tokens.ids) <= SHORT_TOKENS]
        others = [index for index, tokens in enumerate(inputs) if len(tokens.ids) > SHORT_TOKENS]
        return [(self._short, short), (self._way, others)]

    def _run(self, way: _Way, inputs: Sequence[Tokens], places: Sequence[int], out: Floats) -> None:
        slices, base = [], 0
        for tokens in inputs:
            slices.append(_Slice(tokens.ids, base, tokens.second, adapter=tokens.task))
            base += -(-len(tokens.ids) // _PANEL) * _PANEL
        way.program.run(
            self._team,
            slices,
            every_row=self._every_row,
            table=TABLES["prefill"],
            first_row=self.embedding.pooling == "first",
        )
        self._told = self._told or tell_if_moved(self._team)
        row = 0
        for tokens, place in zip(inputs, places, strict=True):
            n_rows = len(tokens.ids) if self._every_row else 1
            rows = way.rows[row : row + n_rows]
            scores = self.model.config.scores
            out[place] = score(rows, self.model, self.embedding) if scores else pooled(rows, self.embedding)
            row += n_rows

    def move(self, cores: Sequence[int]) -> None:
        """Compute on other cores from now on, with the same bits. RanksError, and no move, where there is no
        room for as many threads or a core cannot be had."""
        if len(cores) > self._threads:
            raise RanksError(f"{counted(len(cores), 'thread')} do not fit: there is room for {self._threads}")
        team = self._open_team(cores)
        self._team.close()
        self._team, self._told = team, not self._pinned

    def close(self) -> None:
        """End the threads. Closing twice is harmless."""
        self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _steps(inputs: Sequence[Tokens], places: Sequence[int], step_tokens: int) -> Iterator[list[int]]:
    """Indices of inputs that go through the model together: as many as fit, in order."""
    step: list[int] = []
    used = 0
    for place in places:
        size = len(inputs[place].ids)
        if step and (used + size > step_tokens or len(step) == MOST_SEQUENCES):
            yield step
            step, used = [], 0
        step.append(place)
        used += size
    if step:
        yield step
