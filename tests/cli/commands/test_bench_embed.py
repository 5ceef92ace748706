"""`bench embed` against a server whose speed and depth are known."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from phasewise.loadtest.client import LoadTestError
from phasewise.loadtest.embed import lengths_of, texts_of_lengths
from tests.cli import command
from tests.support.models.encoder_models import write_encoder
from tests.support.servers.fake_embedding import EmbeddingServer, FakeWorker, embedding_server

DEPTH = 5
SERVICE_S = 0.05

invoke = partial(command.run, "bench", "embed")
bench = partial(command.fields_of, "bench", "embed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingServer]:
    """Holds five inputs at a time, and answers a batch after 50 ms."""
    folder = write_encoder(tmp_path_factory.mktemp("bench") / "bert", "bert")
    workers = [FakeWorker(delay_s=SERVICE_S)]
    with embedding_server(folder, workers=workers, depths=[(DEPTH, 10_000)]) as running:
        yield running


def test_a_closed_loop_counts_texts_tokens_and_latencies(server: EmbeddingServer) -> None:
    fields = bench(server.url, "-n", 12, "-c", 2, "-c", 4, "--lengths", "3:6")

    assert fields["model"] == "tiny"
    assert [load["concurrency"] for load in fields["loads"]] == [2, 4]
    for load in fields["loads"]:
        assert (load["requests"], load["ok"], load["busy"], load["failed"]) == (12, 12, 0, 0)
        ms = load["latency_ms"]
        assert 1e3 * SERVICE_S <= ms["p50"] <= ms["p90"] <= ms["p99"]
        assert load["texts_per_s"] == pytest.approx(12 / load["seconds"])
        assert load["tokens_per_s"] > load["texts_per_s"] * 3  # words, and the marks around them


def test_inputs_of_a_request_are_all_counted(server: EmbeddingServer) -> None:
    (load,) = bench(server.url, "-n", 4, "-c", 1, "--inputs", 3, "--lengths", 2)["loads"]

    assert load["ok"] == 4
    assert load["texts_per_s"] == pytest.approx(12 / load["seconds"])


def test_an_open_loop_sends_at_its_rate_and_counts_what_is_refused(server: EmbeddingServer) -> None:
    """Twice what the server can do: some are refused with 429, nothing fails, and shares add up."""
    rate = 2 * DEPTH / SERVICE_S
    (load,) = bench(server.url, "-n", 100, "--rate", rate, "--slo", "600s", "--lengths", 3)["loads"]

    assert load["rate"] == rate
    assert load["ok"] + load["busy"] == 100
    assert load["failed"] == 0
    assert load["busy"] > 0
    assert load["within_slo"] == 1.0


def test_the_highest_concurrency_is_the_depth(server: EmbeddingServer) -> None:
    fields = bench(server.url, "--find", "--slo", "5s", "--lengths", 3)

    assert fields["highest_concurrency"] == DEPTH
    assert bench(server.url, "--find", "--slo", "0.001s", "--lengths", 3)["highest_concurrency"] == 0


def test_the_reason_of_a_failure_is_told(server: EmbeddingServer) -> None:
    asked = (server.url, "-n", 3, "-c", 1, "--lengths", 3, "--model", "nobody")
    done = invoke(*asked)
    (load,) = bench(*asked, exit_code=1)["loads"]
    search = invoke(server.url, "--find", "--slo", "5s", "--lengths", 3, "--model", "nobody")

    assert load["first_error"].startswith("status 404: ")
    assert (done.exit_code, done.stderr) == (1, "phasewise: none of 3 requests was answered\n")
    assert done.stdout == f"1 client: 0 answered, 0 busy, 3 failed ({load['first_error']})\n"
    assert search.refusal.endswith(f"not even one query is answered: {load['first_error']}")


def test_inputs_from_a_file_come_over_and_over(server: EmbeddingServer, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("the cat\na dog\n")
    seen = len(server.workers[0].seen)

    result = invoke(server.url, "-n", 6, "-c", 1, "-c", 2, "--file", tmp_path / "texts")

    assert result.exit_code == 0, result
    assert len(result.stdout.splitlines()) == 2
    assert all(len(line) > 20 for line in result.stdout.splitlines())
    sent = {tuple(ids) for ids in server.workers[0].seen[seen:]}
    assert len(sent) == 2


@pytest.mark.parametrize(("arguments", "says"), [(("--find",), "--find needs --slo")])
def test_wrong_usage(server: EmbeddingServer, arguments: tuple[str, ...], says: str) -> None:
    assert says in invoke(server.url, *arguments).usage_error


@pytest.mark.parametrize("text", ["soon", "0", "5:x", "lognormal:75", "-3"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(LoadTestError):
        lengths_of(text, 3, 0)


def test_lengths_are_words_and_the_same_for_a_seed() -> None:
    lengths = lengths_of("lognormal:20:0.6", 200, 3)

    assert lengths == lengths_of("lognormal:20:0.6", 200, 3)
    assert 15 < sorted(lengths)[100] < 26
    assert [len(text.split()) for text in texts_of_lengths(lengths, 1)] == lengths
    assert lengths_of("7", 3, 0) == [7, 7, 7]
    assert all(20 <= length <= 40 for length in lengths_of("20:40", 100, 0))


def test_a_server_that_is_not_there_is_one_line() -> None:
    assert "127.0.0.1:9" in invoke("http://127.0.0.1:9", "-n", 1).refusal
