"""The accelerator's worker: what it hands to torch, by a stand-in on numpy; and a host that cannot have it.

tests/serving/embedding/test_worker_process.py holds it against our engine where torch is installed. No
accelerator takes part in either."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding import torch_worker
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.open_embedding import open_embedding, start_worker
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.serving.embedding.protocol import (
    ProtocolError,
    WorkerFrame,
    WorkerFrameKind,
    frame,
    inputs_from_bytes,
    inputs_to_bytes,
    read_frame,
    vectors_from_bytes,
    vectors_to_bytes,
)
from phasewise.serving.embedding.torch_worker import TorchEmbedder
from phasewise.serving.embedding.worker import WorkerSpec
from phasewise.serving.errors import ModelError, RanksError
from phasewise.serving.loaders import load_model
from phasewise.topology import read_machine
from tests.support.models.encoder_models import HIDDEN, write_encoder
from tests.support.tiers import examples

CORE = (min(read_machine().allowed_pus),)


class Array(np.ndarray[Any, Any]):
    """A numpy array with methods that only torch's tensors have. `to` remembers the device."""

    device = "cpu"

    def to(self, device: str) -> Array:
        moved = self.copy()
        moved.device = device
        return moved

    def float(self) -> Array:
        return self.astype(np.float32)

    def cpu(self) -> Array:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)


class FakeModel:
    """Hidden rows that tell each token, its position, and its segment; where masked, a number that must not
    be seen."""

    def __init__(self) -> None:
        self.config = types.SimpleNamespace(pad_token_id=0)
        self.device = "none"
        self.seen: list[dict[str, Array]] = []

    def to(self, device: str) -> FakeModel:
        self.device = device
        return self

    def eval(self) -> FakeModel:
        return self

    def forward(self, input_ids: Array, attention_mask: Array, token_type_ids: Array) -> Any:
        assert {input_ids.device, attention_mask.device, token_type_ids.device} == {self.device}
        self.seen.append({"ids": input_ids, "mask": attention_mask, "segments": token_type_ids})
        rows = np.zeros((*input_ids.shape, HIDDEN), np.float32)
        rows[..., 0], rows[..., 1], rows[..., 2] = input_ids, np.arange(input_ids.shape[1]), token_type_ids
        rows[np.asarray(attention_mask) == 0] = 1e9
        return types.SimpleNamespace(last_hidden_state=rows.view(Array))

    __call__ = forward


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """`torch` and `transformers` that compute nothing."""
    model = FakeModel()
    torch: Any = types.ModuleType("torch")
    torch.long, torch.float32 = np.int64, np.float32
    torch.full = lambda shape, value, dtype: np.full(shape, value, dtype).view(Array)
    torch.zeros = lambda shape, dtype: np.zeros(shape, dtype).view(Array)
    torch.tensor = np.array
    torch.inference_mode = contextlib.nullcontext
    transformers: Any = types.ModuleType("transformers")
    kind = types.SimpleNamespace(from_pretrained=lambda _path, **_options: model)
    transformers.AutoModel = transformers.AutoModelForSequenceClassification = kind
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    return model


def unit(rows: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    mean = np.zeros(HIDDEN)
    mean[:3] = np.mean(rows, axis=0)
    return mean / np.linalg.norm(mean)


def test_inputs_are_padded_masked_and_pooled_without_their_padding(tmp_path: Path, fake: FakeModel) -> None:
    folder = write_encoder(tmp_path / "bert", "bert")
    backend = TorchEmbedder(str(folder), "cuda:1")

    got = backend.embed([Tokens([7, 8, 9], 2), Tokens([5])])

    assert fake.device == "cuda:1"
    (seen,) = fake.seen
    assert seen["ids"].tolist() == [[7, 8, 9], [5, 0, 0]]
    assert seen["mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert seen["segments"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert np.allclose(got[0], unit([[7, 0, 0], [8, 1, 0], [9, 2, 1]]), atol=1e-6)
    assert np.allclose(got[1], unit([[5, 0, 0]]), atol=1e-6)


def test_a_large_batch_is_computed_in_steps_with_the_same_vectors(
    tmp_path: Path, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding counts: one long input among many short ones would make all of them long."""
    worker = TorchEmbedder(str(write_encoder(tmp_path / "bert", "bert")), "cuda:1")
    lengths = (3, 9, 1, 1, 4, 4, 4, 20, 1)
    inputs = [Tokens(list(range(5, 5 + n))) for n in lengths]
    whole = worker.embed(inputs)
    fake.seen.clear()
    monkeypatch.setattr(torch_worker, "STEP_TOKENS", 12)

    assert worker.embed(inputs).tobytes() == whole.tobytes()
    assert len(fake.seen) > 1
    assert all(seen["ids"].size <= 12 or len(seen["ids"]) == 1 for seen in fake.seen)


def test_a_model_that_generates_text_and_a_file_are_refused(tmp_path: Path, fake: FakeModel) -> None:
    del fake
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")

    with pytest.raises(ModelError, match="Hugging Face directory"):
        TorchEmbedder(str(path), "cuda:0")


@pytest.mark.slow
def test_a_host_without_the_accelerators_library_embeds_on_the_cpu_and_says_so(tmp_path: Path) -> None:
    """Without torch, or with a torch that has no such device."""
    folder = write_encoder(tmp_path / "bert", "bert")
    model = load_model(str(folder), "f32", tmp_path / "cache")
    plan = EmbeddingPlan((Instance("cuda:0", CORE), Instance("cpu:0", CORE)))
    said: list[str] = []

    with pytest.raises(RanksError, match="cuda:0"):
        start_worker(WorkerSpec("cuda:0", str(folder), "f32", CORE))
    with open_embedding(model, str(folder), "f32", plan, report=said.append) as opened:
        assert [lane.queue.name for lane in opened.client.lanes()] == ["cpu:0"]

    assert any("the others embed without it" in line for line in said)


@pytest.mark.parametrize("link", ["pytorch_model.bin", "nested/deeper/vocab.txt"])
def test_transformers_is_given_no_directory_with_links_out_of_it(
    tmp_path: Path, fake: FakeModel, link: str
) -> None:
    del fake
    folder = write_encoder(tmp_path / "bert", "bert")
    (tmp_path / "outside").write_text("a secret")
    (folder / link).parent.mkdir(parents=True, exist_ok=True)
    (folder / link).symlink_to(tmp_path / "outside")

    with pytest.raises(ModelError, match=f"{link} leads out"):
        TorchEmbedder(str(folder), "cuda:0")


def test_transformers_follows_no_adapter_to_another_model(tmp_path: Path, fake: FakeModel) -> None:
    del fake
    folder = write_encoder(tmp_path / "bert", "bert")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/another/place"}')

    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        TorchEmbedder(str(folder), "cuda:0")


@pytest.mark.parametrize("name", ["jina-bert", "gte-new"])
def test_models_that_transformers_does_not_have_are_refused_by_name(
    tmp_path: Path, fake: FakeModel, name: str
) -> None:
    """It would take jina's for a BERT, and leave out its distances."""
    del fake

    with pytest.raises(ModelError, match="only with code from beside their weights"):
        TorchEmbedder(str(write_encoder(tmp_path / "m", name)), "cuda:0")


def test_a_decoder_s_score_is_of_its_last_row(tmp_path: Path, fake: FakeModel) -> None:
    folder = write_encoder(tmp_path / "m", "qwen3-reranker")
    vector = load_model(str(folder), "f32", tmp_path / "cache").vectors["score_out"]

    got = TorchEmbedder(str(folder), "cuda:0").embed([Tokens([7, 8, 9]), Tokens([5])])

    del fake
    assert got.shape == (2, 1)
    assert np.allclose(got[:, 0], [9 * vector[0] + 2 * vector[1], 5 * vector[0]], rtol=1e-5)


inputs = st.lists(
    st.builds(
        Tokens,
        st.lists(st.integers(0, 1 << 22), min_size=1, max_size=9),
        st.none() | st.integers(0, 9),
        st.integers(0, 2),
    ),
    max_size=9,
)


@examples(60)
@given(given=inputs)
def test_inputs_come_through(given: list[Tokens]) -> None:
    assert inputs_from_bytes(inputs_to_bytes(given)) == given


def test_vectors_come_through() -> None:
    vectors = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)

    assert vectors_from_bytes(vectors_to_bytes(vectors)).tobytes() == vectors.tobytes()


def test_frames_follow_each_other_until_the_end() -> None:
    stream = io.BytesIO(frame(WorkerFrameKind.EMBED, 7, b"abc") + frame(WorkerFrameKind.FAILED, 8, b""))

    assert read_frame(stream.read) == WorkerFrame(WorkerFrameKind.EMBED, 7, b"abc")
    assert read_frame(stream.read) == WorkerFrame(WorkerFrameKind.FAILED, 8, b"")
    assert read_frame(stream.read) is None


@examples(60)
@given(raw=st.binary(min_size=1, max_size=60))
def test_what_is_no_frame_is_refused_or_read_as_one(raw: bytes) -> None:
    for read in (inputs_from_bytes, vectors_from_bytes, lambda raw: read_frame(io.BytesIO(raw).read)):
        try:
            read(raw)  # type: ignore[operator]
        except ProtocolError:
            continue


def test_a_frame_that_is_cut_short_is_an_error() -> None:
    whole = frame(WorkerFrameKind.EMBED, 1, b"abc")
    for cut in (whole[:5], whole[:-1]):
        with pytest.raises(ProtocolError, match="cut short"):
            read_frame(io.BytesIO(cut).read)
