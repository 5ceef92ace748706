"""Settings that a model cannot have: one line, in every way of running, before any model is packed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import command
from tests.support.models import family_models as families

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from phasewise.serving.errors import ModelError
from phasewise.workflows.opening.drafts import check_draft
from phasewise.workflows.opening.settings import NATIVE
from phasewise.workflows.serve.model_folder import model_folder
from phasewise.workflows.serve.opened_models import Opener
from phasewise.workflows.serve.settings import KeysAndValues, Residency, ServeSettings

WAYS = {
    "generate": ("generate", "MODEL", "hello", "-n", "1"),
    "chat": ("chat", "MODEL"),
    "eval": ("eval", "MODEL"),
    "bench run": ("bench", "run", "MODEL", "-p", "8", "-n", "0"),
    "batch": ("batch", "FOLDER/in.jsonl", "-o", "FOLDER/out.jsonl", "MODEL"),
    "serve": ("serve", "MODEL", "--port", "0"),
    "serve --also": ("serve", "OTHER", "--also", "MODEL", "--port", "0"),
    "serve --models": ("serve", "--models", "FOLDER", "--port", "0"),
    "serve in pools": ("serve", "MODEL", "--mixed-pool", "0", "--port", "0"),
    "serve on a cluster": (
        "serve",
        "MODEL",
        "--cluster",
        "127.0.0.1:1",
        "--mixed-pool",
        "1x1",
        "--port",
        "0",
    ),
}
WITH_ADAPTERS = ("generate", "chat", "bench run", "batch", "serve", "serve in pools", "serve on a cluster")
WITH_DRAFTS = ("generate", "batch", "serve", "serve --also", "serve --models")
OF_ONE_MODEL = tuple(way for way in WAYS if way != "serve --models")


@pytest.fixture
def cache(own_places: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of packed models, where none is yet."""
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refusal(way: str, folder: Path, cache: Path, *options: object) -> str:
    """The one line that a command says; nothing was packed."""
    latent = families.write_family_hf(folder / "latent", "deepseek3")
    other = families.write_family_hf(folder / "other", "olmo2")
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello"}}
    (folder / "in.jsonl").write_text(json.dumps(request))
    places = {"MODEL": str(latent), "OTHER": str(other)}
    words = [places.get(word, word.replace("FOLDER", str(folder))) for word in WAYS[way]]

    done = command.run_process(*words, *options)

    assert not list(cache.glob("packed/*"))
    assert len(done.refusal.splitlines()) == 1
    return done.refusal


@pytest.mark.many
@pytest.mark.parametrize("way", OF_ONE_MODEL)
def test_latent_vectors_in_a_format_with_scales_are_refused(way: str, tmp_path: Path, cache: Path) -> None:
    line = refusal(way, tmp_path, cache, "--kv-format", "int8")

    assert "latent keeps latent vectors, which cannot be int8: --kv-format f32, f16 or bf16 can" in line


@pytest.mark.many
@pytest.mark.parametrize("way", WITH_ADAPTERS)
def test_adapters_of_latent_attention_are_refused(way: str, tmp_path: Path, cache: Path) -> None:
    line = refusal(way, tmp_path, cache, "--lora", "mine=/nowhere")

    assert "/nowhere: deepseek3 models, whose attention is over latent vectors, take no adapters" in line


@pytest.mark.many
@pytest.mark.parametrize("way", WITH_DRAFTS)
def test_drafts_of_what_is_not_there_are_refused(way: str, tmp_path: Path, cache: Path) -> None:
    line = refusal(way, tmp_path, cache, "--draft", "/nowhere/model.gguf")

    assert "there is no file or folder '/nowhere/model.gguf'" in line


def test_a_folder_of_models_refuses_what_a_model_cannot_have(tmp_path: Path, cache: Path) -> None:
    families.write_family_hf(tmp_path / "models" / "latent", "deepseek3")
    settings = ServeSettings(
        coming=Residency(tmp_path / "models", 1 << 30), kv=KeysAndValues(kv_format="int4")
    )

    with pytest.raises(ModelError, match="latent keeps latent vectors, which cannot be int4"):
        model_folder(Opener(settings)).measure("latent")

    assert not list(cache.glob("packed/*"))


@pytest.mark.parametrize("kv_format", ["auto", "f32", "f16", "bf16"])
def test_no_file_is_read_for_settings_that_every_model_can_have(kv_format: str) -> None:
    from phasewise.workflows.opening.open_model import check_settings

    check_settings("/nowhere", NATIVE, kv_format)
    for named in (None, "auto", "off", "lookup", "mtp"):
        check_draft(named)
