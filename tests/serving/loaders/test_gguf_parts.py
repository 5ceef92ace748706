"""A model in several GGUF files is the model in one, whichever file is named; damaged sets are one line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.families.family import with_windows
from phasewise.serving.loaders.formats.gguf_file import part_paths, stem_of
from phasewise.serving.loaders.formats.hf_config import config_of
from phasewise.serving.models.packed_model import LayerKind, PackedModel
from phasewise.serving.models.rope import RopeSpec
from tests.support.models.tiny_models import GgufWriter, tiny_gguf, write_tiny_gguf, write_tiny_hf
from tests.support.tiers import examples


def write_parts(folder: Path, cuts: Sequence[int], writer: GgufWriter | None = None) -> list[Path]:
    """The tiny model with its tensors cut at these places; the first part has the metadata alone if asked."""
    whole = tiny_gguf() if writer is None else writer
    places = [0, *cuts, len(whole.tensors)]
    paths = []
    for number, (start, stop) in enumerate(pairwise(places)):
        part = GgufWriter(dict(whole.metadata) if number == 0 else {})
        part.tensors = whole.tensors[start:stop]
        part.add("split.no", number)
        part.add("split.count", len(places) - 1)
        part.add("split.tensors.count", len(whole.tensors))
        path = folder / f"tiny-Q8_0-{number + 1:05}-of-{len(places) - 1:05}.gguf"
        path.write_bytes(part.to_bytes())
        paths.append(path)
    return paths


def bytes_of(model: PackedModel) -> dict[str, bytes]:
    return {name: np.asarray(vector).tobytes() for name, vector in model.vectors.items()} | {
        name: b"".join(
            np.asarray(part).tobytes() for part in vars(weight).values() if isinstance(part, np.ndarray)
        )
        for name, weight in model.weights.items()
    }


@examples(25)
@given(st.data())
def test_parts_are_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("parts")
    n_tensors = len(tiny_gguf().tensors)
    cuts = sorted(data.draw(st.sets(st.integers(0, n_tensors), min_size=1, max_size=5)))
    paths = write_parts(folder, cuts)
    named = data.draw(st.sampled_from(paths))

    whole = load_model(str(write_tiny_gguf(folder / "whole.gguf")), "native", folder / "cache")
    model = load_model(str(named), "native", folder / "cache")

    assert model.name == "tiny-Q8_0"
    assert model.config == whole.config
    assert bytes_of(model) == bytes_of(whole)
    assert len(list((folder / "cache" / "packed").glob("tiny-*"))) == 1, (
        "one packed file, whichever part is named"
    )
    packed = next((folder / "cache" / "packed").glob("tiny-*"))
    before = packed.stat().st_mtime_ns
    load_model(str(paths[0]), "native", folder / "cache")
    assert packed.stat().st_mtime_ns == before


def test_a_changed_part_is_packed_again(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, [5])
    first = bytes_of(load_model(str(paths[0]), "native", tmp_path / "cache"))
    write_parts(tmp_path, [5], tiny_gguf(seed=1))
    assert bytes_of(load_model(str(paths[0]), "native", tmp_path / "cache")) != first


def test_a_set_that_is_not_whole_is_one_line(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ModelError) as caught:
            load_model(str(path), "native", tmp_path / "cache")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    first, second, third = write_parts(tmp_path, [4, 9])
    kept = second.read_bytes()
    second.unlink()
    assert "00002-of-00003.gguf cannot be opened" in refusal(first)
    second.write_bytes(third.read_bytes())
    assert "it must be the one that its name says" in refusal(first)
    second.write_bytes(kept[:-40])
    assert "cut short" in refusal(third)
    second.write_bytes(first.read_bytes())
    assert "it must be the one that its name says" in refusal(first)
    second.write_bytes(kept)
    moved = tmp_path / "other.gguf"
    moved.write_bytes(first.read_bytes())
    assert "is one of 3 parts" in refusal(moved)
    again = GgufWriter()
    again.tensors = tiny_gguf().tensors[3:9]
    for key, value in (("split.no", 1), ("split.count", 3)):
        again.add(key, value)
    second.write_bytes(again.to_bytes())
    assert "which an earlier part has too" in refusal(first)
    fewer = GgufWriter()
    fewer.tensors = tiny_gguf().tensors[5:9]
    for key, value in (("split.no", 1), ("split.count", 3)):
        fewer.add(key, value)
    second.write_bytes(fewer.to_bytes())
    assert "promises" in refusal(first)


@pytest.mark.parametrize(
    ("name", "paths", "stem"),
    [
        ("a-00002-of-00003.gguf", [f"a-0000{n}-of-00003.gguf" for n in (1, 2, 3)], "a"),
        ("a-00001-of-00001.gguf", ["a-00001-of-00001.gguf"], "a"),
        ("a-00004-of-00003.gguf", ["a-00004-of-00003.gguf"], "a"),
        ("a-00000-of-00003.gguf", ["a-00000-of-00003.gguf"], "a"),
        ("a-00001-of-99999.gguf", ["a-00001-of-99999.gguf"], "a"),
        ("a-1-of-2.gguf", ["a-1-of-2.gguf"], "a-1-of-2"),
        ("a.gguf", ["a.gguf"], "a"),
    ],
)
def test_names_of_parts(name: str, paths: list[str], stem: str) -> None:
    assert [path.name for path in part_paths(Path(name))] == paths
    assert stem_of(name) == stem


def _config(folder: Path, model_type: str, **changes: object) -> dict[str, object]:
    write_tiny_hf(folder, "llama")
    fields = json.loads((folder / "config.json").read_text())
    return {**fields, "model_type": model_type, **changes}


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_layer_s_kind_depends_on_no_other_layer(
    tmp_path_factory: pytest.TempPathFactory, sliding: list[bool]
) -> None:
    """Models whose layers are all of one kind included: each layer with a window rotates by its own base."""
    fields = _config(tmp_path_factory.mktemp("config"), "llama", num_hidden_layers=len(sliding))
    plain = config_of(fields, {}, add_bos=False)
    local = RopeSpec(123.0, plain.rope.dim)

    windowed = with_windows(plain, sliding, 7, local)

    wanted = [LayerKind(7, local) if is_sliding else LayerKind(None, plain.rope) for is_sliding in sliding]
    assert [form.attention for form in windowed.forms] == wanted


@pytest.mark.parametrize(
    "names", [("num_experts",), ("num_local_experts",), ("num_experts", "num_local_experts")]
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe", "mixtral", "granitemoe"])
def test_a_number_of_experts_has_two_names(tmp_path: Path, model_type: str, names: tuple[str, ...]) -> None:
    more = {"moe_intermediate_size": 32} if model_type == "qwen3_moe" else {}
    fields = _config(tmp_path, model_type, num_experts_per_tok=2, **dict.fromkeys(names, 4), **more)
    experts = config_of(fields, {}, add_bos=False).experts
    assert experts is not None
    assert dataclasses.astuple(experts)[:2] == (4, 2)
    with pytest.raises(ModelError, match="mean the same thing"):
        config_of({**fields, "num_experts": 4, "num_local_experts": 8}, {}, add_bos=False)
