"""`phasewise models`: what is fetched, what is here, what is inside."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from phasewise.cli.commands.models import DownloadBar
from phasewise.serving.loaders import load_head, load_model
from phasewise.serving.loaders.fetching.hub import folder_of
from phasewise.serving.loaders.fetching.registry import KNOWN, known_path
from phasewise.serving.models.packed_model import FORMATS
from phasewise.workflows.options import WEIGHT_FORMATS
from tests.cli import command
from tests.support.models import family_models as families
from tests.support.models.head_models import write_with_head
from tests.support.models.stand_in_hub import serving
from tests.support.models.tiny_models import TinyShape, write_tiny_gguf, write_tiny_hf

run = partial(command.text_of, "models")
fields_of = partial(command.fields_of, "models")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_list_shows_what_is_known_and_how_to_get_it() -> None:
    text = run("list")

    assert "smollm2-135m-instruct" in text
    assert "phasewise models pull smollm2-135m-instruct" in text
    assert max(map(len, text.splitlines())) <= 80


def test_list_json_tells_present_from_absent_and_shows_packed_files(tmp_path: Path, cache: Path) -> None:
    model = KNOWN["smollm2-135m-instruct"]
    known_path(model, cache).parent.mkdir(parents=True)
    known_path(model, cache).write_bytes(b"")
    packed = load_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")), "int8", cache)
    (cache / "packed" / "damaged.packed").write_bytes(b"no")

    listing = fields_of("list")

    assert listing["models"][0]["path"] == str(known_path(model, cache))
    (listed,) = listing["packed"]
    assert (listed["name"], listed["format"]) == ("tiny", "int8")
    assert listed["content_hash"] == packed.content_hash
    assert "int8" in run("list")


def test_pack_writes_a_file_that_is_a_model_of_its_own(tmp_path: Path, cache: Path) -> None:
    model, out = write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "m.packed"

    assert run("pack", str(model), "-o", str(out)).strip() == str(out)

    model.unlink()
    assert load_model(str(out), "native", cache).name == "m"
    assert out.stat().st_mode & 0o777 == 0o644
    assert not (cache / "packed").exists()


def _fetched(root: Path) -> tuple[Path, str]:
    """A tiny GGUF as `models pull` keeps it, and the name that it was pulled by."""
    name = "org/tiny-GGUF:Q8_0"
    folder = folder_of(name, root)
    folder.mkdir(parents=True)
    path = write_tiny_gguf(folder / "tiny-Q8_0.gguf", "qwen3", "Q8_0")
    (folder / ".whole").write_text(json.dumps({"main": path.name, "commit": "", "name": name}))
    return path, name


def test_list_tells_models_from_what_is_packed_from_them(cache: Path) -> None:
    path, name = _fetched(cache)
    load_model(name, "native", cache)

    listing, text = fields_of("list"), run("list")

    (stored,), (packed,) = listing["stored"], listing["packed"]
    assert (stored["name"], stored["format"], stored["path"]) == (name, "GGUF", str(path))
    assert (packed["name"], packed["source"], packed["is_orphan"]) == (name, str(path), False)
    here, packed_part = text.index("models here"), text.index("packed from models")
    assert text.index("known names") < here < text.index(name) < packed_part < text.rindex(name)


def test_rm_takes_a_model_and_what_was_packed_from_it(cache: Path) -> None:
    path, name = _fetched(cache)
    load_model(name, "native", cache)
    load_model(name, "int8", cache)

    assert "removed" in run("rm", name, "--packed")
    assert path.exists()
    assert not list((cache / "packed").glob("*.packed"))

    load_model(name, "native", cache)
    (gone_first, gone_last) = fields_of("rm", name)["removed"]
    assert (gone_first["why"], gone_last["why"]) == ("packed", "model")
    assert not path.parent.exists()
    assert not list((cache / "packed").glob("*.packed"))


def test_rm_leaves_files_of_the_user(cache: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "own.gguf")
    load_model(str(path), "native", cache)

    run("rm", str(path))

    assert path.exists()
    assert not list((cache / "packed").glob("*.packed"))
    assert command.run("models", "rm", "own").refusal


def test_prune_takes_what_no_start_will_use(cache: Path, tmp_path: Path) -> None:
    deleted, kept = write_tiny_gguf(tmp_path / "gone.gguf"), write_tiny_gguf(tmp_path / "kept.gguf")
    for path in (deleted, kept):
        load_model(str(path), "native", cache)
    deleted.unlink()
    (cache / "packed" / "damaged.packed").write_bytes(b"no")
    part = folder_of("org/name", cache) / ".model.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")

    would = fields_of("prune", "--dry-run")
    assert part.exists()
    did = fields_of("prune")

    assert would["removed"] == did["removed"]
    assert len(did["removed"]) == 3
    assert not part.exists()
    (left,) = (cache / "packed").glob("*.packed")
    assert left.name.startswith("kept")
    run("prune", "--packed")
    assert not list((cache / "packed").glob("*.packed"))


def test_pull_by_a_hub_name_prints_the_path_and_says_the_size(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repositories["org/tiny-GGUF"] = {"tiny-Q4_0.gguf": bytes(2_000_000)}
        result = command.run("models", "pull", "org/tiny-GGUF:Q4_0")

    assert result.exit_code == 0
    assert result.stdout.strip() == str(folder_of("org/tiny-GGUF:Q4_0", cache) / "tiny-Q4_0.gguf")
    assert "tiny-Q4_0.gguf, 2.0 MB, licence apache-2.0" in result.stderr
    assert "of 2.0 MB" in result.stderr


def test_the_bar_tells_the_rate_of_late_within_80_columns() -> None:
    bar = DownloadBar()
    for second in range(31):
        bar.saw(second * 100_000_000, float(second))

    text = bar.text(123_000_000_000)

    assert "100.0 MB/s" in text
    assert text.endswith("20 min left")
    assert len(text) <= 80


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_inspect_prints_the_shape_within_80_columns(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("tiny")
    write_tiny_gguf(path, "qwen3", "Q8_0") if kind == "gguf" else write_tiny_hf(path, "qwen3", "bfloat16")

    text = run("inspect", "tiny")

    assert "2 of hidden 64, feed-forward 96" in text
    assert "qwen3, q/k norm" in text
    assert ("Q8_0" if kind == "gguf" else "BF16") in text
    assert max(map(len, text.splitlines())) <= 80


def test_inspect_json_counts_what_packing_will_take(tmp_path: Path, cache: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", types="Q4_1", shape=TinyShape(vocab_size=261))

    fields = fields_of("inspect", str(path))

    assert len(fields["config"]["layers"]) == 2
    for weight_format, n_bytes in fields["format_bytes"].items():
        assert load_model(str(path), weight_format, cache).weight_bytes == n_bytes
    types = {kind["type_name"]: kind["count"] for kind in fields["tensor_types"]}
    assert types == {"Q4_1": 15, "F32": 5}


def test_inspect_tells_a_head_that_drafts(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_with_head(tmp_path / "tiny", "qwen35")
    path = "tiny"

    fields, text = fields_of("inspect", path), run("inspect", path)

    for weight_format, n_bytes in fields["head"]["format_bytes"].items():
        head = load_head(load_model(path, weight_format, cache), weight_format, cache)
        assert head is not None
        assert head.weight_bytes == n_bytes
    assert "by a head of its own" in text
    assert max(map(len, text.splitlines())) <= 80
    families.write_family_hf(tmp_path / "bare", "qwen35")
    assert fields_of("inspect", "bare")["head"] is None


def test_the_command_line_offers_the_formats_that_loaders_know() -> None:
    assert WEIGHT_FORMATS == FORMATS


def test_inspect_tells_how_many_positions_an_indexer_leaves(tmp_path: Path) -> None:
    text = run("inspect", str(families.write_family_hf(tmp_path / "glm", "glm-dsa")))

    assert "8 heads of 16, chooses 24 positions" in text
    assert max(map(len, text.splitlines()[2:])) <= 80


@pytest.mark.parametrize("word", ["inspect", "pull"])
def test_an_unknown_model_is_one_line_and_exit_1(word: str) -> None:
    line = command.run("models", word, "no-such-model").refusal

    assert line.startswith("phasewise: no model 'no-such-model'")


def test_inspecting_a_cut_file_is_one_line_and_exit_1(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-1000])

    assert "cut short" in command.run("models", "inspect", path).refusal
