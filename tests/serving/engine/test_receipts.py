"""Receipts: the same from every way of computing, confirmed by one prefill, refused once changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import compute_paths
from phasewise.serving.drafts.opening import DraftSource
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.fingerprint import digest_of, fingerprint_of
from phasewise.serving.engine.messages import Answer, Evidence, Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.engine.receipts import Receipt, ReceiptError, read_receipt, receipt_of
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.formats.gguf_file import read_header
from phasewise.serving.loaders.source import SourceFile
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.workflows.opening.open_model import OpenModel
from phasewise.workflows.replay.run import GivenReceipt, ReceiptVerdict, Replayer
from tests.support.servers.fake_engine import run_all
from tests.support.servers.pools import (
    guides_of,
    mixed_requests,
    open_alone,
    plans_of,
    pools,
    prompt,
    size_of,
    tiny_model,
)
from tests.support.tiers import isas, n_examples

N_CHANGES = 1000
SOAK_CHANGES = 9000
"""With SOAK_BYTES bytes, each for RECEIPTS_OF_A_BYTE receipts: 10,000 changed receipts."""
N_BYTES = 20
SOAK_BYTES = 250
RECEIPTS_OF_A_BYTE = 4


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, cache: object) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(path: Path) -> PackedModel:
    return load_model(str(path), "native")


@pytest.fixture(scope="module")
def asked(path: Path) -> list[Submit]:
    """Greedy, sampled, with penalties, bias, grammars and thoughts; with stop texts, and to an end token."""
    requests = mixed_requests(guides_of(path))
    free = SamplingParams(temperature=1.0, seed=8)
    requests.append(Submit("stop", prompt(40, 3), 60, free, stop=("a", "e", "Z")))
    requests.append(Submit("end", prompt(33, 4), 300, SamplingParams(logit_bias={2: 3.0}, seed=1)))
    own_end = SamplingParams(logit_bias={5: 3.0}, seed=2)
    requests.append(Submit("own end", prompt(33, 5), 300, own_end, ends=frozenset({5})))
    requests.append(Submit("long", prompt(20, 9) * 3, 100, SamplingParams(temperature=0.0), ignore_eos=True))
    return [replace(request, receipt=True) for request in requests]


def receipts(opened: OpenEngine, requests: list[Submit]) -> dict[str, Receipt]:
    outs = run_all(opened.engine, *requests)
    return {
        request.request_id: _receipt(opened, request, outs[request.request_id][-1]) for request in requests
    }


def _receipt(opened: OpenEngine, request: Submit, last: object) -> Receipt:
    assert isinstance(last, Answer), last
    assert last.evidence is not None
    assert last.finish_reason is not None
    return receipt_of(request, last.evidence, last.finish_reason, opened.fingerprint, "tiny")


def limited(size: EngineSize, **limits: Any) -> EngineSize:
    return replace(size, limits=replace(size.limits, **limits))


@pytest.fixture(scope="module")
def alone(path: Path, asked: list[Submit]) -> dict[str, Receipt]:
    """Of each request, computed when nothing else was."""
    by_name: dict[str, Receipt] = {}
    with open_alone(path, limited(size_of(path), prefix_reuse=False)) as opened:
        for request in asked:
            by_name |= receipts(opened, [request])
    return by_name


@pytest.fixture(scope="module")
def replay(model: PackedModel) -> Callable[..., list[ReceiptVerdict]]:
    return lambda some: replayed(model, some)


def replayed(model: PackedModel, some: Iterable[Receipt]) -> list[ReceiptVerdict]:
    plans = {plan.phase: plan for plan in plans_of(1)}
    with Replayer(OpenModel(model, plans, {}, StorageChoice()), pinned=False) as replayer:
        return [replayer.verdict(GivenReceipt(receipt.request_id, receipt)) for receipt in some]


def test_every_receipt_is_confirmed(
    alone: dict[str, Receipt], replay: Callable[..., list[ReceiptVerdict]]
) -> None:
    """Grammars, penalties, bias, thoughts, stop texts and end tokens included."""
    assert {receipt.finish_reason for receipt in alone.values()} == {"stop", "length"}
    for verdict in replay(alone.values()):
        assert verdict.problems == ()
        assert verdict.first_token is None


def test_receipts_are_the_same_in_company_and_in_pieces(
    path: Path, asked: list[Submit], alone: dict[str, Receipt]
) -> None:
    for size in (size_of(path), limited(size_of(path, kv_policy="paged"), max_batch_tokens=96)):
        with open_alone(path, size) as opened:
            assert receipts(opened, asked) == alone


def test_receipts_are_the_same_on_every_instruction_set(
    path: Path, asked: list[Submit], alone: dict[str, Receipt], replay: Callable[..., list[ReceiptVerdict]]
) -> None:
    """The fingerprint included: one made here is confirmed there."""
    for name in isas():
        with isa.using(name):
            with open_alone(path) as opened:
                assert receipts(opened, asked) == alone
            assert [verdict.problems for verdict in replay(alone.values())] == [()] * len(alone)


def test_receipts_are_the_same_with_drafts(
    path: Path, model: PackedModel, asked: list[Submit], alone: dict[str, Receipt]
) -> None:
    """A draft beyond a stop text was sampled and is no part of the answer."""
    plans = {plan.phase: plan for plan in plans_of(1)}
    with open_engine(model, plans, size_of(path), pinned=False, drafts=DraftSource()) as opened:
        assert receipts(opened, asked) == alone
        assert opened.engine.load().drafts is not None


def test_receipts_are_the_same_from_pools(path: Path, asked: list[Submit], alone: dict[str, Receipt]) -> None:
    with pools(path) as server:
        evidence: dict[str, Evidence] = {}
        take = server.take

        def watch(out: Answer) -> None:
            if out.evidence is not None:
                evidence[out.request_id] = out.evidence
            take(out)

        server.take = watch  # type: ignore[method-assign]
        server.run(asked)
        fingerprint = server.front.fingerprint()

    assert fingerprint is not None
    for name, receipt in alone.items():
        assert fingerprint == receipt.fingerprint
        assert evidence[name] == Evidence(receipt.token_ids, receipt.logit_digests)


# ---- changed receipts ------------------------------------------------------------------------------------


def _with_token(fields: dict[str, Any], rng: random.Random) -> int | None:
    """Change one token; its number."""
    ids, place = fields["token_ids"], rng.randrange(len(fields["token_ids"]))
    ids[place] = (ids[place] + rng.randrange(1, 272)) % 272
    return place + 1


def _with_order(fields: dict[str, Any], rng: random.Random) -> int | None:
    ids = fields["token_ids"]
    pairs = [place for place in range(len(ids) - 1) if ids[place] != ids[place + 1]]
    if not pairs:
        return _with_token(fields, rng)
    place = rng.choice(pairs)
    ids[place : place + 2] = reversed(ids[place : place + 2])
    return place + 1


def _with_digest(fields: dict[str, Any], rng: random.Random) -> int | None:
    digests, place = fields["logit_digests"], rng.randrange(len(fields["logit_digests"]))
    digests[place] = digest_of(rng.random())
    return None


def _with_prompt(fields: dict[str, Any], rng: random.Random) -> int | None:
    ids, place = fields["prompt_token_ids"], rng.randrange(len(fields["prompt_token_ids"]))
    ids[place] = (ids[place] + rng.randrange(1, 272)) % 272
    return None


def _with_component(fields: dict[str, Any], rng: random.Random) -> int | None:
    name = rng.choice(
        [component for component in fields["fingerprint"] if component not in ("defaults", "context")]
    )
    fields["fingerprint"][name] = "int8" if name == "kv_format" else "other"
    return None


def _cut(fields: dict[str, Any], rng: random.Random) -> int | None:
    """Leave the end out, with the digests that belong to the rest."""
    n_kept = rng.randrange(1, len(fields["token_ids"])) if len(fields["token_ids"]) > 1 else 1
    if n_kept == len(fields["token_ids"]):
        return _with_token(fields, rng)
    fields["token_ids"] = fields["token_ids"][:n_kept]
    fields["logit_digests"] = fields["logit_digests"][: -(-n_kept // 16)]
    return None


def _with_setting(fields: dict[str, Any], rng: random.Random) -> int | None:
    sampling = fields["settings"]["sampling"]
    name = rng.choice(["temperature", "top_p", "min_p", "seed", "repetition_penalty"])
    sampling[name] = {"temperature": 0.31, "top_p": 0.77, "min_p": 0.11, "seed": 4711}.get(name, 1.77)
    return None


def _with_fingerprint(fields: dict[str, Any], rng: random.Random) -> int | None:
    fields["system_fingerprint"] = f"fp_{rng.randrange(1 << 96):024x}"
    return None


FORGEABLE = [_with_token, _with_order, _with_digest, _with_prompt, _with_component, _cut]
"""Changes that the model itself finds out. Other settings may have led to the same tokens."""


def _forged(fields: dict[str, Any]) -> dict[str, Any]:
    """The same with every digest made anew that needs no model."""
    fields["prompt_digest"] = digest_of(fields["prompt_token_ids"])
    fields["settings_digest"] = digest_of(fields["settings"])
    fields["system_fingerprint"] = read_receipt(fields).fingerprint.short
    fields["digest"] = digest_of({name: value for name, value in fields.items() if name != "digest"})
    return fields


def test_a_receipt_with_anything_changed_is_refused(
    alone: dict[str, Receipt], replay: Callable[..., list[ReceiptVerdict]]
) -> None:
    """The first token that differs is named, also where every digest was made anew."""
    rng, names = random.Random(41), [name for name in alone if len(alone[name].prompt_token_ids) < 300]
    changed, wanted = [], []
    for _ in range(n_examples(N_CHANGES, soak=SOAK_CHANGES)):
        is_forged = rng.random() < 0.5
        change = rng.choice(FORGEABLE if is_forged else [*FORGEABLE, _with_setting, _with_fingerprint])
        fields = alone[rng.choice(names)].to_json()
        first = change(fields, rng)
        changed.append(read_receipt(_forged(fields) if is_forged else fields))
        wanted.append((change.__name__, is_forged, first))

    for verdict, (name, is_forged, first) in zip(replay(changed), wanted, strict=True):
        assert not verdict.is_confirmed, (name, is_forged, verdict)
        if first is not None:
            assert verdict.first_token == first, (name, is_forged, verdict)
            assert any(f"token {first} of" in problem for problem in verdict.problems)


def test_a_model_with_a_byte_changed_confirms_nothing(
    path: Path, tmp_path: Path, alone: dict[str, Receipt]
) -> None:
    """A bit of any tensor; and a sign, where a receipt says that it was made with that model: a rounding may
    leave nothing of a smaller bit."""
    rng, whole = random.Random(42), path.read_bytes()
    with SourceFile(path) as file:
        tensors = list(read_header(file).tensors.values())
    assert {entry.type_name for entry in tensors} == {"F32"}
    short = [receipt for receipt in alone.values() if len(receipt.prompt_token_ids) < 300]

    def changed(place: int, bit: int) -> PackedModel:
        data = bytearray(whole)
        data[place] ^= 1 << bit
        other = tmp_path / "other.gguf"
        other.write_bytes(data)
        return load_model(str(other), "native")

    for _ in range(n_examples(N_BYTES, soak=SOAK_BYTES)):
        tensor = rng.choice(tensors)
        place = tensor.offset + rng.randrange(tensor.n_bytes)
        some = rng.sample(short, RECEIPTS_OF_A_BYTE)
        honest, forged = some[::2], [receipt.to_json() for receipt in some[1::2]]
        bit = 7 if place % 4 == 3 else rng.randrange(8)  # no exponent of a number that is none
        for verdict in replayed(changed(place, bit), honest):
            assert any("another weights" in problem for problem in verdict.problems), (tensor, place)
        model = changed(place | 3, 7)  # the sign: offsets are whole float32
        for fields in forged:
            fields["fingerprint"]["weights"] = model.content_hash
        verdicts = replayed(model, [read_receipt(_forged(forgery)) for forgery in forged])
        assert not any(verdict.is_confirmed for verdict in verdicts), (tensor, place)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fields: fields.pop("settings"), "settings"),
        (lambda fields: fields.update(schema_version=2), "schema_version"),
        (lambda fields: fields.update(more=1), "fields that no receipt has"),
        (lambda fields: fields["settings"]["sampling"].update(top_p=7), "top_p"),
        (lambda fields: fields.update(token_ids=[]), "no tokens"),
        (lambda fields: fields.update(token_ids="abc"), "token_ids"),
    ],
)
def test_what_is_no_receipt_is_refused_in_one_line(
    alone: dict[str, Receipt], change: Callable[[dict[str, Any]], object], said: str
) -> None:
    fields = alone["s0"].to_json()
    change(fields)

    with pytest.raises(ReceiptError, match=said) as refusal:
        read_receipt(fields)

    assert "\n" not in str(refusal.value)


# ---- fingerprints ----------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_bits_alone(path: Path, model: PackedModel) -> None:
    """Storage, cores and context are none of it; the format of weights, and of keys and values, are."""
    plain = fingerprint_of(model, "f16", None, 256)

    sparse = load_model(str(path), "native", storage=StorageChoice("always"))
    assert fingerprint_of(sparse, "f16", None, 128) == plain
    assert plain.differences(fingerprint_of(model, "f32", None, 256)) == ["kv_format"]
    other = fingerprint_of(load_model(str(path), "int8"), "f16", None, 256)
    assert set(plain.differences(other)) == {"weights", "weight_format", "arithmetic"}
    changed = replace(model, tokenizer_json=model.tokenizer_json + " ", chat_template="{{ 1 }}")
    assert plain.differences(fingerprint_of(changed, "f16", None, 256)) == ["tokenizer", "template"]
    assert plain.short != plain.with_defaults({"temperature": 1}).short
    assert plain.differences(plain.with_defaults({"temperature": 1})) == []


@pytest.mark.parametrize("weight_format", ["f32", "int8", "int4", "bf16"])
def test_an_instruction_set_is_in_the_fingerprint_where_bits_depend_on_it(
    path: Path, weight_format: str
) -> None:
    model = load_model(str(path), weight_format)
    by_isa: dict[str, str] = {}
    for name in isa.usable():
        with isa.using(name):
            by_isa[name] = fingerprint_of(model, "int16", None, 256).arithmetic
            default = compute_paths("bf16", 0)[0]
            own = weight_format == "bf16" and default != "fma"
            place = "tiles" if default == "bf16_tile" else name
            assert by_isa[name].split("/")[1] == (place if own else "every")
    if weight_format != "bf16":
        assert len(set(by_isa.values())) == 1
