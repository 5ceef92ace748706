"""docs/reference/http-api.md says what the server has now."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from phasewise.serving.engine.messages import Answer, EngineLoad, StepStats, Submit
from phasewise.serving.http.answers.client import RequestLife
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from tests.serving.drafts.test_draft_laws import lookup_drafter
from tests.support.models.encoder_models import write_encoder
from tests.support.scripts import script
from tests.support.servers.fake_embedding import embedding_server
from tests.support.servers.fake_server import fake_server

MODELS = ("one", "other")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script("docs/make_http_reference.py")


def rows(generator: ModuleType) -> dict[str, set[str]]:
    """Metrics of the page, with their labels."""
    table = generator.page().split("## Metrics\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): set(re.findall(r"`(\w+)`", row[2])) for row in cells}


def exposed(text: str) -> dict[str, set[str]]:
    """Metrics of an answer of /metrics, with the labels that their samples have."""
    metrics: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        metrics[name] = labels - {"le"}
    return metrics


def test_no_part_of_a_load_is_left_out(generator: ModuleType) -> None:
    """A part that only some engines have is None where they have not: the page shows metrics of all."""
    for field in EngineLoad._fields:
        assert getattr(generator.LOAD, field) is not None, field


def test_every_metric_of_a_running_server_is_on_the_page(generator: ModuleType, tmp_path: Path) -> None:
    page = rows(generator)
    with (
        embedding_server(write_encoder(tmp_path / "bert", "bert")) as beside,
        fake_server(drafter=lookup_drafter(), embeddings=beside.served) as server,
    ):
        body = {"model": "fake", "prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json={}).status_code == 400
        server.wait_until_idle()
        sampled = exposed(httpx.get(f"{server.url}/metrics").text)
    assert {"phasewise_drafted_tokens_total", "phasewise_embedding_up"} < sampled.keys()
    for name, labels in sampled.items():
        assert labels == page[name] - ({"model"} - labels), name


def test_with_several_models_what_each_does_has_its_label(generator: ModuleType) -> None:
    loads = {
        name: generator.LOAD._replace(kv_slots=index, by_model=None) for index, name in enumerate(MODELS, 3)
    }
    products = {name: {"tuned": index} for index, name in enumerate(MODELS, 3)}
    metrics = Metrics(Gauges(lambda: generator.LOAD._replace(by_model=loads), products=products), MODELS)
    for n_tokens, name in enumerate(MODELS, 1):
        life, piece = (
            RequestLife(Submit(name, (1,) * n_tokens, model=name)),
            Answer(name, "", (), n_tokens, 0, "stop"),
        )
        metrics.sent(life)
        metrics.came(life, piece)
        life.add(piece)
        life.reason = "stop"
        metrics.ended(life)
        metrics.stepped(StepStats("decode", 1, 1, 1, name))
    text = metrics.exposition().decode()
    page, sampled = rows(generator), exposed(text)
    assert {name for name, labels in sampled.items() if "model" in labels} == {
        name for name, labels in page.items() if "model" in labels
    }
    for index, name in enumerate(MODELS):
        for line in (
            f'phasewise_prompt_tokens_total{{model="{name}"}} {index + 1}.0',
            f'phasewise_generated_tokens_total{{model="{name}"}} {index + 1}.0',
            f'phasewise_requests_total{{model="{name}",reason="stop"}} 1.0',
            f'phasewise_ttft_seconds_count{{model="{name}"}} 1.0',
            f'phasewise_step_seconds_count{{model="{name}",phase="decode"}} 1.0',
            f'phasewise_kv_slots{{model="{name}"}} {index + 3}.0',
            f'phasewise_products{{model="{name}",state="tuned"}} {index + 3}.0',
        ):
            assert line in text.splitlines(), line


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "run make docs"
    for needed in ("`tool_choice`", "`previous_response_id`", "`queue_full` | 429", "phasewise_ttft_seconds"):
        assert needed in generator.page(), needed
