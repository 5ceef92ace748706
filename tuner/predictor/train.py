"""Training of a predictor from logged answers: networks by Adam, each stopped when prompts held out gain no
more.

The prompts are dealt into as many folds as there are networks. Each network learns from the other folds; its
own fold decides when to stop and, since the network never learnt from it, at which price of room (see
`distribution`) how many answers are held. The same examples and seed give the same bits on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.features import N_FIGURES, N_ROWS, bag_of, figures_of, learn_rarity
from phasewise.tuner.predictor.log import Example, place_of
from phasewise.tuner.predictor.model import LengthPredictor, Scaling
from phasewise.tuner.predictor.network import FeatureBatch, Params, Targets, loss_and_gradient

FEWEST_EXAMPLES = 40
FEWEST_PROMPTS = 20
MOST_PRICES = 8192

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TrainOptions:
    seed: int = 0
    members: int = 5
    """Networks whose forecasts are averaged."""
    n_bins: int = 24
    width: int = 8
    hidden: int = 32
    batch: int = 64
    epochs: int = 30
    patience: int = 4
    """Epochs without a gain before a network stops."""
    learning_rate: float = 3e-3
    decay: float = 0.1
    kept_pieces: float = 0.7
    """Share of the prompts' pieces that each epoch uses."""


@dataclass(frozen=True)
class Epoch:
    """The progress of a network: its mean losses on training examples and on its own fold."""

    member: int
    number: int
    loss: float
    unseen_loss: float


def train(
    examples: Sequence[Example],
    model_name: str,
    options: TrainOptions = TrainOptions(),
    report: Callable[[Epoch], None] = lambda _: None,
    bounds: Sequence[int] | None = None,
) -> LengthPredictor:
    """A predictor trained on these answers' lengths. PredictorError where there are too few. `bounds`: of the
    length bins, ascending; None: equally many answers per bin."""
    folds = np.array(
        [int(place_of(example, options.seed, b"fold") * options.members) for example in examples]
    )
    n_prompts = len({example.prompt_key for example in examples})
    if len(examples) < FEWEST_EXAMPLES or n_prompts < FEWEST_PROMPTS or len(set(folds)) < options.members:
        raise PredictorError(
            f"{counted(len(examples), 'answer')} to {counted(n_prompts, 'prompt')}: too few to learn from,"
            f" at least {FEWEST_EXAMPLES} answers to {FEWEST_PROMPTS} prompts are needed; collect more"
        )
    edges = _bin_bounds(examples, options.n_bins) if bounds is None else np.array(bounds, np.float32)
    untrained = _untrained(examples, model_name, edges)
    samples = _Samples.of(untrained, examples)
    members: list[Params] = []
    prices: list[float] = []
    for member in range(options.members):
        unseen = np.flatnonzero(folds == member)
        unseen_examples = [examples[int(index)] for index in unseen]
        fit = _Fit(samples.pick(np.flatnonzero(folds != member)), samples.pick(unseen), options)
        members.append(fit.run(member, untrained.bounds, report))
        alone = replace(untrained, members=(members[-1],))
        prices += [
            alone.distribution(example.facts).price_of(example.output_tokens) for example in unseen_examples
        ]
    counts = {
        "answers": len(examples),
        "prompts": n_prompts,
        "cut": sum(example.was_cut for example in examples),
    }
    return replace(untrained, members=tuple(members), prices=_thinned(prices), trained_on=counts)


def _untrained(examples: Sequence[Example], model_name: str, bounds: Floats) -> LengthPredictor:
    """A predictor without networks: its rarities, scaling and bounds."""
    prompts = {example.prompt_key: example.facts for example in examples}
    return LengthPredictor(
        model_name,
        rarity=learn_rarity(list(prompts.values())),
        scaling=Scaling.of(np.stack([figures_of(example.facts) for example in examples])),
        bounds=bounds,
        members=(),
    )


def _bin_bounds(examples: Sequence[Example], n_bins: int) -> Floats:
    """Upper bounds of bins with equally many answers of known length; the last is the longest."""
    lengths = [example.output_tokens for example in examples if not example.was_cut]
    if not lengths:
        raise PredictorError("every answer was cut at its max_tokens, so that none has a length: allow more")
    levels = np.arange(1, n_bins) / (n_bins - 1)
    return np.unique(np.quantile(np.array(lengths), levels, method="higher")).astype(np.float32)


def _thinned(prices: Sequence[float]) -> Floats:
    """The prices in order, thinned to at most MOST_PRICES."""
    ordered = np.sort(np.array(prices, np.float32))
    return ordered[:: -(-len(ordered) // MOST_PRICES)]


@dataclass(frozen=True)
class _Samples:
    """Training examples as arrays."""

    batch: FeatureBatch
    targets: Targets

    @classmethod
    def of(cls, predictor: LengthPredictor, examples: Sequence[Example]) -> _Samples:
        bags = [bag_of(example.facts, predictor.rarity) for example in examples]
        lengths = np.array([example.output_tokens for example in examples], dtype=np.float32)
        batch = FeatureBatch(
            rows=np.concatenate([bag.rows for bag in bags]),
            weights=np.concatenate([bag.weights for bag in bags]),
            starts=np.cumsum([0, *(len(bag.rows) for bag in bags)]),
            figures=np.stack([predictor.scaling.apply(figures_of(example.facts)) for example in examples]),
        )
        was_cut = np.array([example.was_cut for example in examples])
        return cls(batch, Targets(np.searchsorted(predictor.bounds, lengths), np.log(lengths), was_cut))

    def __len__(self) -> int:
        return len(self.targets.bins)

    def pick(self, chosen: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_] | None = None) -> _Samples:
        """Some of the samples, with only the pieces in `kept`."""
        whole = self.batch
        lengths = np.diff(whole.starts)[chosen]
        firsts = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) + np.repeat(whole.starts[chosen] - firsts, lengths)
        owners = np.repeat(np.arange(len(chosen)), lengths)
        if kept is not None:
            places, owners = places[kept[places]], owners[kept[places]]
        starts = np.searchsorted(owners, np.arange(len(chosen) + 1))
        batch = FeatureBatch(whole.rows[places], whole.weights[places], starts, whole.figures[chosen])
        return _Samples(batch, Targets(*(column[chosen] for column in vars(self.targets).values())))


@dataclass(frozen=True)
class _Fit:
    """The training of one network."""

    seen: _Samples
    unseen: _Samples
    options: TrainOptions

    def run(self, member: int, bounds: Floats, report: Callable[[Epoch], None]) -> Params:
        """The weights of the epoch with the least loss on the unseen fold."""
        rng = np.random.default_rng([self.options.seed, member])
        adam = _Adam(self._start(len(bounds) + 1, rng), self.options)
        best, best_loss, best_number = adam.params(), np.inf, 0
        for number in range(1, self.options.epochs + 1):
            losses = [adam.step(part) for part in self._batches(rng)]
            params = adam.params()
            unseen_loss, _ = loss_and_gradient(params, self.unseen.batch, self.unseen.targets)
            report(Epoch(member, number, float(np.mean(losses)), unseen_loss))
            if unseen_loss < best_loss:
                best, best_loss, best_number = params, unseen_loss, number
            elif number - best_number >= self.options.patience:
                break
        return best

    def _start(self, n_bins: int, rng: np.random.Generator) -> Params:
        """Initial weights, whose forecast is the same for every prompt."""
        width, hidden = self.options.width, self.options.hidden
        w1 = rng.standard_normal((width + N_FIGURES, hidden), dtype=np.float32)
        return Params(
            table=np.zeros((N_ROWS, width), np.float32),  # a piece that training never saw says nothing
            w1=w1 / np.float32(np.sqrt(width + N_FIGURES)),
            b1=np.zeros(hidden, np.float32),
            w2=np.zeros((hidden, n_bins), np.float32),
            b2=np.zeros(n_bins, np.float32),
            w3=np.zeros(hidden, np.float32),
            b3=self.seen.targets.log_lengths.mean(keepdims=True),
        )

    def _batches(self, rng: np.random.Generator) -> Iterator[_Samples]:
        order = rng.permutation(len(self.seen))
        kept = rng.random(len(self.seen.batch.rows)) < self.options.kept_pieces
        for start in range(0, len(order), self.options.batch):
            yield self.seen.pick(order[start : start + self.options.batch], kept)


class _Adam:
    """Adam with decoupled decay (Loshchilov and Hutter 2019); only the table rows of a batch are updated."""

    MOMENTUM, MEMORY, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, params: Params, options: TrainOptions) -> None:
        self._now = params.arrays()
        self._first = {name: np.zeros_like(array) for name, array in self._now.items()}
        self._second = {name: np.zeros_like(array) for name, array in self._now.items()}
        self._options = options
        self._n_steps = 0

    def step(self, samples: _Samples) -> float:
        """Take one step of descent; returns the loss before the step."""
        self._n_steps += 1
        loss, gradient = loss_and_gradient(Params(**self._now), samples.batch, samples.targets)
        for name, (rows, by) in gradient.items():
            self._move(name, rows, by)
        return loss

    def params(self) -> Params:
        """A copy of the present weights."""
        return Params(**{name: array.copy() for name, array in self._now.items()})

    def _move(self, name: str, rows: Any, by: npt.NDArray[Any]) -> None:
        first, second, now = self._first[name], self._second[name], self._now[name]
        first[rows] = self.MOMENTUM * first[rows] + (1 - self.MOMENTUM) * by
        second[rows] = self.MEMORY * second[rows] + (1 - self.MEMORY) * by * by
        mean = first[rows] / (1 - self.MOMENTUM**self._n_steps)
        deviation = np.sqrt(second[rows] / (1 - self.MEMORY**self._n_steps))
        decay = 0.0 if name.startswith("b") else self._options.decay
        change = mean / (deviation + self.EPSILON) + decay * now[rows]
        now[rows] -= (self._options.learning_rate * change).astype(now.dtype)
