"""Adapters as requests see them: their names, their parent, and the messages that reach the engine."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.models.served_models import ListedModel
from phasewise.serving.model_table import with_adapters
from phasewise.serving.models.low_rank import Adapter
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece

FINGERPRINT = Fingerprint("a" * 64, "b" * 64, "c" * 64, "", "native", "f16", "1/portable/0", "1/0")
MODEL = ServedModel(("tiny",), 0, 500, VOCAB_SIZE, frozenset({END}), encode, piece, None)
ADAPTERS = (Adapter("poet", "a" * 64, {}), Adapter("fake", "b" * 64, {}))


def test_adapters_are_named_by_their_model_and_alone_where_that_is_clear() -> None:
    own = replace(MODEL, names=("tiny", "models/tiny"), fingerprint=lambda: FINGERPRINT)
    poet, fake = with_adapters(own, ADAPTERS, {"tiny", "models/tiny", "fake"})

    assert poet.names == ("tiny:poet", "models/tiny:poet", "poet")
    assert fake.names == ("tiny:fake", "models/tiny:fake")
    assert (poet.engine_id, poet.adapter, poet.parent) == ("tiny", "poet", "tiny")
    cards = [ListedModel(model.model_id, model.names, 0, 0, None, model).card() for model in (poet, own)]
    assert cards[0]["parent"] == "tiny"
    assert "parent" not in cards[1]


def test_each_adapter_has_a_fingerprint_of_its_own() -> None:
    own = replace(MODEL, names=("tiny",), fingerprint=lambda: FINGERPRINT)
    told = {model.system_fingerprint for model in (own, *with_adapters(own, ADAPTERS, {"tiny"}))}

    assert len(told) == 3
