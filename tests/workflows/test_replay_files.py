"""`replay` of files: each receipt is judged alone, and an answer's text is held against its tokens."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.serving.engine.fingerprint import digest_of
from phasewise.serving.engine.receipts import Receipt, ReceiptError, read_receipt
from phasewise.workflows.options import ModelCores
from phasewise.workflows.replay.run import ReceiptVerdict, replay_files
from tests.cli import command
from tests.support.models.tiny_models import TinyShape, tiny_gguf
from tests.support.servers.served_command import own_places, serving

Json = dict[str, Any]
TIMEOUT_S = 60
CHAT = [{"role": "user", "content": "abc"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REQUESTS: dict[str, tuple[str, Json]] = {
    "text": ("/v1/completions", {"prompt": "abc", "max_tokens": 12}),
    "echo": ("/v1/completions", {"prompt": "abc", "max_tokens": 5, "echo": True}),
    "two": ("/v1/completions", {"prompt": "hello", "max_tokens": 9, "n": 2}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 10}),
    "tools": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 10, "tools": [TOOL]}),
    "called": (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    path.write_bytes(tiny_gguf(shape=TinyShape(context_length=2048)).to_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path.parent / "cache"))
        patch.setenv("PHASEWISE_DB", str(path.parent / "none.db"))
        yield path


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[str, Json]:
    """One of each of REQUESTS, and one that a text ends which the first answer has in it."""
    answers: dict[str, Json] = {}
    options = ("--receipts", "--kv-budget", "16M", "--served-model-name", "m")
    with serving(model, own_places(model.parent), *options) as server:

        def ask(path: str, body: Json) -> Json:
            body = {"model": "m", "receipt": True, "seed": 5, **body}
            answer = httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        for name, (path, body) in REQUESTS.items():
            answers[name] = ask(path, body)
        text = answers["text"]["choices"][0]["text"]
        answers["stopped"] = ask("/v1/completions", {**REQUESTS["text"][1], "stop": text[4:6]})
    return answers


def judged(model: Path, *files: Path) -> list[ReceiptVerdict]:
    return replay_files(files, str(model), placement=ModelCores(threads=1))


def written(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(value))
    return path


def test_honest_answers_are_confirmed_whole_and_as_lines(
    model: Path, answers: dict[str, Json], tmp_path: Path
) -> None:
    assert answers["called"]["choices"][0]["message"].get("tool_calls")
    files = [written(tmp_path, f"{name}.json", answer) for name, answer in answers.items()]
    lines = [
        {
            "id": "batch_req_1",
            "custom_id": name,
            "response": {"status_code": 200, "body": answer},
            "error": None,
        }
        for name, answer in answers.items()
    ]
    lines.append({"custom_id": "no", "response": None, "error": {"code": "expired"}})
    batch = tmp_path / "answers.jsonl"
    batch.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "plain.txt").write_text("\n".join(json.dumps(answer) for answer in answers.values()))

    verdicts = judged(model, *files, batch, tmp_path / "plain.txt")

    n_receipts = sum(len(answer["choices"]) for answer in answers.values())
    assert [verdict.problems for verdict in verdicts] == [()] * (3 * n_receipts)
    assert verdicts[n_receipts].source == f"{batch}:1"


CHANGES: dict[str, Callable[[Json], object]] = {
    "a letter": lambda choice: _set_text(choice, lambda text: text[:-1] + ("x" if text[-1] != "x" else "y")),
    "more": lambda choice: _set_text(choice, lambda text: f"{text}."),
    "less": lambda choice: _set_text(choice, lambda text: text[:-1]),
    "nothing": lambda choice: _set_text(choice, lambda _text: ""),
    "no text": lambda choice: _set_text(choice, lambda _text: [1]),
    "the reason": lambda choice: choice.update(finish_reason="content_filter"),
    "another message beside it": lambda choice: choice.update(message={"content": "it said so"}),
}


def _set_text(choice: Json, change: Callable[[str], Any]) -> None:
    """Of whichever part the choice shows."""
    if "text" in choice:
        choice["text"] = change(choice["text"])
    elif choice["message"].get("tool_calls"):
        function = choice["message"]["tool_calls"][0]["function"]
        function["arguments"] = change(function["arguments"])
    else:
        choice["message"]["content"] = change(choice["message"]["content"])


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_that_shows_something_else_than_its_tokens_is_refused(
    model: Path, answers: dict[str, Json], tmp_path: Path, change: str
) -> None:
    files = []
    for name, answer in answers.items():
        changed = copy.deepcopy(answer)
        CHANGES[change](changed["choices"][-1])
        assert changed != answer
        files.append(written(tmp_path, f"{name}.json", changed))

    last = {verdict.source: verdict for verdict in judged(model, *files)}

    for file in files:
        assert last[str(file)].problems == ("the text of the answer is not that of its tokens",), file.name


USAGES: dict[str, Json | list[int] | str] = {
    "fewer tokens": {"completion_tokens": 1},
    "more tokens": {"completion_tokens": 10**30},
    "another prompt": {"prompt_tokens": 7777},
    "another total": {"total_tokens": 0},
    "a true count as a float": {"total_tokens": 1.5},
    "no count": {"completion_tokens": None},
    "more from the cache than there is": {"prompt_tokens_details": {"cached_tokens": 7777}},
    "fewer than none": {"prompt_tokens_details": {"cached_tokens": -1}},
    "more accepted than generated": {"completion_tokens_details": {"accepted_prediction_tokens": 7777}},
    "details of another kind": {"prompt_tokens_details": [1]},
    "a list": [1],
    "a text": "much",
}


@pytest.mark.parametrize("change", USAGES)
def test_an_answer_whose_usage_is_not_the_count_of_its_tokens_is_refused(
    model: Path, answers: dict[str, Json], tmp_path: Path, change: str
) -> None:
    files = []
    for name, answer in answers.items():
        usage = USAGES[change]
        changed = {**answer, "usage": {**answer["usage"], **usage} if isinstance(usage, dict) else usage}
        files.append(written(tmp_path, f"{name}.json", changed))

    verdicts = judged(model, *files)

    (tmp_path / "beside.json").write_text(json.dumps({**changed, "choices": [*changed["choices"], {}]}))
    verdicts += judged(model, tmp_path / "beside.json")
    said = ("the usage of the answer is not the count of its tokens",)
    assert [verdict.problems for verdict in verdicts] == [said] * len(verdicts)


def test_the_tokens_of_a_prompt_count_once_for_all_its_choices(
    model: Path, answers: dict[str, Json], tmp_path: Path
) -> None:
    """As for two prompts, where the prompts are equal; what is without a usage states none."""
    two = answers["two"]
    n_prompt, n_generated = two["usage"]["prompt_tokens"], two["usage"]["completion_tokens"]
    totals = {
        n: {"prompt_tokens": n * n_prompt, "total_tokens": n * n_prompt + n_generated} for n in (1, 2, 3)
    }
    files = [
        written(tmp_path, f"{n}.json", {**two, "usage": {**two["usage"], **counts}})
        for n, counts in totals.items()
    ]
    without = {name: value for name, value in two.items() if name != "usage"}
    files.append(written(tmp_path, "without.json", without))

    verdicts = judged(model, *files)

    assert [verdict.is_confirmed for verdict in verdicts] == [True] * 4 + [False] * 2 + [True] * 2


def forged(receipt: Json, **settings: Any) -> Json:
    """With other settings, and digests that fit them. Sampling's are named by `sampling`."""
    fields = copy.deepcopy(receipt)
    sampling = settings.pop("sampling", {})
    fields["settings"].update(settings)
    fields["settings"]["sampling"].update(sampling)
    fields["settings_digest"] = digest_of(fields["settings"])
    try:
        receipt_read = read_receipt(fields)
    except ReceiptError:
        return fields
    assert isinstance(receipt_read, Receipt)
    return {**fields, "digest": receipt_read.own_digest()}


HOSTILE: dict[str, Json] = {
    "bias": {"sampling": {"logit_bias": {"99999999": 5.0}}},
    "negative bias": {"sampling": {"logit_bias": {"-1": 5.0}}},
    "logprobs": {"sampling": {"top_logprobs": 1 << 60}},
    "negative logprobs": {"sampling": {"top_logprobs": -5}},
    "top_k": {"sampling": {"top_k": 1 << 60}},
    "seed": {"sampling": {"seed": -1}},
    "large seed": {"sampling": {"seed": 10**40}},
    "schema": {"guide": {"grammar": '{"json_schema": ', "begins": None}},
    "shown": {"shown": [1 << 40, -7]},
    "stop": {"stop": [""]},
    "max_tokens": {"max_tokens": -4},
}

HARMLESS = {"logprobs.json", "negative logprobs.json", "top_k.json", "shown.json", "half.jsonl:1"}
"""Settings beside which the model chooses the same tokens, and a line before one that is cut short."""


def test_hostile_files_end_none_of_the_others(model: Path, answers: dict[str, Json], tmp_path: Path) -> None:
    receipt = answers["called"]["choices"][0]["receipt"]
    files = [written(tmp_path, f"{name}.json", forged(receipt, **change)) for name, change in HOSTILE.items()]
    guide = copy.deepcopy(receipt["settings"]["guide"])
    guide["grammar"] = "start: nothing_that_compiles ("
    files.append(written(tmp_path, "guide.json", forged(receipt, guide=guide)))
    for name, content in {
        "empty.json": b"",
        "binary.json": b"\xff\xfe\x00",
        "deep.json": b"[" * 100_000,
        "number.json": b'{"schema_version": 1' + b"0" * 400 + b"}",
        "other.json": b'{"choices": [3, {"receipt": 5}, {"receipt": null}]}',
        "list.json": b"[1, null, {}, []]",
        "half.jsonl": json.dumps(answers["text"]).encode() + b'\n{"response": {"body": ',
    }.items():
        (tmp_path / name).write_bytes(content)
        files.append(tmp_path / name)
    files.append(tmp_path / "nothing there.json")
    os.mkdir(tmp_path / "folder.json")
    files.append(tmp_path / "folder.json")
    good = [written(tmp_path, f"good{number}.json", answers["text"]) for number in range(3)]
    mixed = [*files, *good]
    random.Random(4).shuffle(mixed)

    verdicts = judged(model, *mixed)

    by_file = {file: [each for each in verdicts if each.source.startswith(str(file))] for file in mixed}
    for file in good:
        assert [verdict.problems for verdict in by_file[file]] == [()]
    for file in files:
        assert by_file[file], file
        assert all("\n" not in problem for verdict in by_file[file] for problem in verdict.problems)
    confirmed = {Path(verdict.source).name for verdict in verdicts if verdict.is_confirmed}
    assert confirmed == {*HARMLESS, *(file.name for file in good)}
    done = command.run("replay", *mixed[:9], good[0], "--model", model, "--threads", 1)
    assert done.exit_code == 3
    assert f"confirmed: {good[0]}" in done.stdout
