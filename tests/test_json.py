"""JSON of others: one reader; a hostile number at any place of any file is read or refused in one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise._json import MOST_CONTAINERS, MOST_DEPTH, MOST_VALUES, is_flood, read_json
from phasewise.kerneldb.remote_index import read_index
from phasewise.serving.batches.lines import read_line
from phasewise.serving.embedding.plan import stored_places
from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.receipts import AskedSettings, Receipt
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.adapter_files import load_parts
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.topology import read_machine
from phasewise.tuner.config.sharing import read_hidden
from phasewise.tuner.config.trace_files import read_trace
from phasewise.tuner.predictor import log
from phasewise.workflows.capacity.simulate import arrivals_of
from phasewise.workflows.replay.run import read_receipts
from phasewise.workflows.topo.plan_json import read_plans
from tests.support import ROOT
from tests.support.models.adapters import drawn_pairs, write_peft
from tests.support.models.reference_forward import tiny_config
from tests.support.models.tiny_models import TinyShape, tiny_weights, write_tiny_hf
from tests.support.tiers import examples

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
UNHELD = (
    *("1" + "0" * 30, "1" + "0" * 400, "-" + "9" * 400, "9" * 5000, "NaN", "Infinity", "-Infinity", "1e400"),
    *("-1e400", "-9223372036854775809", "18446744073709551616"),
)
HOSTILE = (
    *UNHELD,
    "1e308",
    "5e-324",
    "9223372036854775808",
    "-1",
    "0.5",
    "null",
    "true",
    '"\\ud800"',
    "[" * 250 + "]" * 250,
    '{"a":' * 250 + "1" + "}" * 250,
)
_SCALAR = re.compile(r'(?<=[:\[,])\s*("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)(?=\s*[,\]}])')
_OWN = frozenset(
    {
        *("kerneldb/connect.py", "kerneldb/portable.py", "kerneldb/shipped.py", "phasewise/_json.py"),
        *("phasewise/torch/distributed.py", "serving/batches/store.py", "serving/embedding/sample_worker.py"),
        *("serving/embedding/worker.py", "serving/grammar/grammar_job.py"),
        *("serving/http/models/served_models.py", "serving/http/routes/batch_runner.py"),
        *("serving/ranks/rank_instructions.py", "serving/sandbox/confined_process.py"),
        *("serving/text/chat_template.py", "serving/text/confined_tokenizer.py"),
        *("serving/text/conversation_shapes.py", "serving/text/turn_analysis.py", "serving/tools/values.py"),
        *("workflows/bench/peers/processes.py", "workflows/database/remote.py"),
        "workflows/serve/instance_process.py",
    }
)
"""Files that read by `json` itself: what processes of one server say to each other, files that come with the
program, values of a database, and calls that a model has written.
"""


@examples(200)
@given(VALUES)
def test_what_is_json_is_read_as_the_library_reads_it(value: Any) -> None:
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value).encode()) == value


def outcome_of(text: str) -> tuple[Any, str]:
    """The value of a text, or the line that refuses it."""
    try:
        return read_json(text), ""
    except ValueError as error:
        return None, str(error)


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return [number for item in inner for number in numbers_in(item)]
    return [value] if isinstance(value, int | float) else []


@examples(300)
@given(st.text(st.sampled_from('{}[]",:0123456789.-eEnaNIfity ') | st.characters(), max_size=60))
def test_any_text_is_a_value_of_bounded_numbers_or_one_line(text: str) -> None:
    value, error = outcome_of(text)
    assert "\n" not in error
    for number in numbers_in(value):
        assert math.isfinite(number)
        assert isinstance(number, float) or -(1 << 63) <= number < 1 << 64


@pytest.mark.parametrize("number", UNHELD)
def test_numbers_that_nothing_holds_are_floats_or_refused(number: str) -> None:
    value, error = outcome_of(number)
    assert len(error) < 100
    assert value is None or (isinstance(value, float) and math.isfinite(value))


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(begin: str, end: str) -> None:
    def nested(depth: int) -> str:
        return begin * depth + "1" + end * depth

    json.dumps(read_json(nested(MOST_DEPTH)))
    for depth in (MOST_DEPTH + 1, 900, 200_000):
        with pytest.raises(ValueError, match="nested deeper than"):
            read_json(nested(depth))


def test_floods_are_counted_before_they_are_read() -> None:
    assert not is_flood(b"[" + b"1," * (MOST_VALUES - 1) + b"1]")
    assert is_flood(b"[" + b"1," * MOST_VALUES + b"1]")
    assert not is_flood(b"[" * MOST_CONTAINERS)
    assert is_flood(b"[{" * (MOST_CONTAINERS // 2) + b"[")


def test_files_of_others_have_one_reader() -> None:
    """`json` itself has no bounds: a file that reads by it is listed, with the reason."""
    rooms = ("cli", "cluster", "cython_kernels", "ir", "kerneldb", "loadtest", "phasewise", "serving")
    paths = {
        str(path.relative_to(ROOT))
        for room in (*rooms, "topology", "tuner", "workflows")
        for path in (ROOT / room).rglob("*.py")
        if not any(part.is_symlink() for part in path.parents)
        and re.search(r"\bjson\.(loads?\(|loads,|JSONDecoder)", path.read_text())
    }

    assert paths <= _OWN


def _hf_file(name: str) -> tuple[Callable[[Path], Path], Callable[[Path], object]]:
    def write(folder: Path) -> Path:
        shards = 2 if "index" in name else 1
        return write_tiny_hf(folder / "hf", "llama", shape=TinyShape(), shards=shards) / name

    def read(path: Path) -> object:
        return load_model(str(path.parent), "native", path.parent.parent / "cache")

    return write, read


def _adapter(folder: Path) -> Path:
    pairs = drawn_pairs(tiny_weights("llama", SHAPE), "adapter", targets=("q_proj",))
    fields = {"alpha_pattern": {"q_proj": 2}, "rank_pattern": {"q_proj": 4}}
    return write_peft(folder / "adapter", pairs, **fields) / "adapter_config.json"


SHAPE = TinyShape()
CONFIG = tiny_config(
    n_layers=SHAPE.n_layers,
    hidden=SHAPE.hidden,
    ffn=SHAPE.ffn,
    n_heads=SHAPE.n_heads,
    n_kv_heads=SHAPE.n_kv_heads,
    head_dim=SHAPE.head_dim,
    vocab_size=SHAPE.vocab_size,
)
SETTINGS = AskedSettings(SamplingParams(seed=3, logit_bias={5: 1.5}), 4, ("stop",), False, (1,), None)
RECEIPT = Receipt(
    *(1, "id", "model", "short", Fingerprint("w", "c", "t", "", "native", "f32", "2/every/0", "2/0", 256)),
    *((1, 2), "digest", SETTINGS, "digest", (3, 4), "length", ("digest",)),
)
CONVERSATION = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}


def _texts(text: str, name: str = "given.jsonl") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_text(text)
        return path

    return write


FILES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    **{name: _hf_file(name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")},
    "model.safetensors.index.json": _hf_file("model.safetensors.index.json"),
    "adapter_config.json": (_adapter, lambda path: load_parts(path.parent, CONFIG)),
    "trace": (
        _texts('{"input_length": 5, "output_length": 3, "timestamp": 27, "hash_ids": [1]}\n'),
        lambda path: (read_trace(path), arrivals_of(str(path))),
    ),
    "conversations": (_texts(json.dumps([CONVERSATION]), "given.json"), read_trace),
    "length log": (_texts('{"output_tokens": 3, "prompt_token_ids": [1, 2], "model": "m"}\n'), log.read_log),
    "hidden": (
        _texts('[{"pus": [0], "read_gbps": 1.5, "lost_per_extra_pu": 0.1}]'),
        lambda path: read_hidden(path, read_machine()),
    ),
    "plans": (
        _texts('{"plans": {"prefill": {"ranks": [{"cores": [0], "numa_node": 0}], "bands": []}}}'),
        lambda path: read_plans(path, read_machine()),
    ),
    "stored places": (
        _texts('{"format": 1, "pus": [0], "instances": [{"places": [0]}]}'),
        lambda path: stored_places(path.read_text()),
    ),
    "index": (
        _texts(
            '{"file": "phasewise remote", "version": 1, "serial": 3, "bundles": [{"core": "c", "sha256": '
            f'"{"a" * 64}", "bytes": 3, "rows": 1}}]}}'
        ),
        lambda path: read_index(path.read_bytes(), "r"),
    ),
    "line of a batch": (
        _texts('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 3}}'),
        lambda path: read_line(1, path.read_bytes(), set()),
    ),
    "receipt": (_texts(json.dumps(RECEIPT.to_json())), lambda path: [*read_receipts(path)]),
}


def refusal_of(read: Callable[[Path], object], path: Path) -> Exception | None:
    try:
        read(path)
    except Exception as error:  # the law is about any of them
        return error
    return None


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_number_at_any_place_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    write, read = FILES[name]
    path = write(tmp_path)
    text = path.read_text()
    places = [match.span(1) for match in _SCALAR.finditer(text)][:60]
    assert places
    for start, end in places:
        for value in HOSTILE:
            path.write_text(text[:start] + value + text[end:])
            refusal = refusal_of(read, path)
            if refusal is not None:
                where = (text[max(0, start - 30) : end], value[:20], repr(refusal))
                assert getattr(refusal, "exit_code", None) in (1, 2), where
                assert "\n" not in str(refusal), where
    path.write_text(text)
    assert refusal_of(read, path) is None
