"""`phasewise predict-len`: collecting from a tiny model, training, evaluating and asking."""

from __future__ import annotations

import json
import lzma
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli import command
from tests.support.models.length_examples import made_up, write_log
from tests.support.models.stand_in_hub import serving
from tests.support.models.tiny_models import tiny_gguf
from tests.support.tiers import first_is_smoke

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

pytestmark = pytest.mark.usefixtures("own_places")

invoke = partial(command.run, "predict-len")
run_json = partial(command.fields_of, "predict-len")


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_collect_logs_every_prompt_once_and_goes_on_where_it_was(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\none\n")
    rows = [{"prompt": "three"}, {"instruction": "four"}, {"question": "five"}]
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    log, few = tmp_path / "log.jsonl", ["--max-tokens", 6]

    first = run_json("collect", tiny, tmp_path / "a.txt", "-o", log, *few)
    log.write_bytes(log.read_bytes() + b'{"model": "tiny", "prom')  # killed in the middle of a line
    second = run_json("collect", tiny, tmp_path / "a.txt", tmp_path / "b.jsonl.xz", "-o", log, *few)
    third = run_json("collect", tiny, tmp_path / "a.txt", tmp_path / "b.jsonl.xz", "-o", log, *few)

    assert (first["prompts"], first["answered_now"]) == (2, 2)
    assert (second["prompts"], second["answered_before"], second["answered_now"]) == (5, 2, 3)
    assert (third["answered_before"], third["answered_now"]) == (5, 0)
    assert all(1 <= line["output_tokens"] <= 6 and line["model"] == "tiny" for line in lines_of(log))
    assert len({tuple(line["prompt_token_ids"]) for line in lines_of(log)}) == len(lines_of(log)) == 5
    assert log.stat().st_mode & 0o777 == 0o600  # prompts are in it


def test_other_settings_are_other_answers(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    log = tmp_path / "log.jsonl"
    run_json("collect", tiny, tmp_path / "a.txt", "-o", log, "--max-tokens", 4, "--limit", 2)

    fields = run_json("collect", tiny, tmp_path / "a.txt", "-o", log, "--max-tokens", 5, "--temperature", 0.7)

    assert (fields["answered_before"], fields["answered_now"]) == (0, 3)


def test_a_prompt_that_leaves_no_room_is_counted(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 250 + "\nshort\n")

    fields = run_json("collect", tiny, tmp_path / "a.txt", "-o", tmp_path / "log", "--max-tokens", 100)

    assert (fields["answered_now"], fields["too_long"]) == (1, 1)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", made_up(150))


def test_train_keeps_the_predictor_where_it_is_found_again(tiny: Path, log: Path) -> None:
    fields = run_json("train", log)
    asked = run_json("predict", tiny, "-p", "hello", "--max-tokens", 64)

    assert fields["model"] == "tiny"
    assert fields["trained_on"]["answers"] == 150
    assert Path(fields["predictor"]).name == "tiny.predictor.safetensors"
    assert 0 <= asked["uncertainty"] <= 1
    bounds = [*asked["at_most_tokens"].values()]
    assert 1 <= bounds[0] <= bounds[1] <= bounds[2] <= 64
    assert asked["mean_tokens"] <= bounds[2]


def test_a_log_of_texts_is_read_by_the_model_that_its_lines_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a model in the cache is read; nothing is fetched and no path is opened for a log's sake."""
    name = "org/tiny-GGUF:Q4_0"
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log.jsonl"
    rows = [
        {"model": name, "prompt": f"tell me {number}", "output_tokens": 5 + number % 9}
        for number in range(90)
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = invoke("train", log)
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repositories["org/tiny-GGUF"] = {"tiny-Q4_0.gguf": tiny_gguf().to_bytes()}
        assert command.run("models", "pull", name).exit_code == 0
        n_asked = len(hub.requests)
        trained = run_json("train", log)

        assert f"its model {name} is not in the cache: give one with --model" in refused.refusal
        assert (trained["model"], trained["trained_on"]["answers"]) == (name, 90)
        assert len(hub.requests) == n_asked


def test_the_same_log_gives_the_same_file(log: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert invoke("train", log, "-o", tmp_path / name).exit_code == 0

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.slow
def test_eval_by_folds_judges_every_answer_once(log: Path) -> None:
    evaluation = run_json("eval", log, "--folds", 3)

    assert (evaluation["folds"], evaluation["logs"][0]["answers"]) == (3, 150)
    methods = {
        method["method"]: method for method in evaluation["logs"][0]["points"]["memory of S3"]["methods"]
    }
    assert methods["ours"]["block_tokens"] <= methods["S3"]["block_tokens"]
    assert len(evaluation["logs"][0]["calibration"]["coverage"]) == 9


@pytest.mark.parametrize("words", [("--folds", 3, "--predictor", "p")])
def test_what_eval_cannot_combine_is_refused_before_a_log_is_read(words: tuple[object, ...]) -> None:
    assert words[0 if "--folds" in words else -1] in invoke("eval", "no-log.jsonl", *words).usage_error


def test_eval_compares_methods_at_their_own_points_and_at_equal_memory(log: Path) -> None:
    evaluation = run_json("eval", log)["logs"][0]

    assert set(evaluation["points"]) == {"own point", "memory of S3"}
    for point, fields in evaluation["points"].items():
        methods = {method["method"]: method for method in fields["methods"]}
        gained = 100 * (methods["ours"]["accuracy"] - methods["S3"]["accuracy"])
        assert fields["points_gained_over_s3"] == pytest.approx(gained)
        assert all(method["accuracy"] + method["overflow"] == pytest.approx(1) for method in methods.values())
        if point == "memory of S3":
            assert methods["ours"]["block_tokens"] <= methods["S3"]["block_tokens"]
    assert len(evaluation["calibration"]["deciles"]) == 10


@pytest.mark.slow
def test_eval_of_a_given_predictor(log: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "other.jsonl", made_up(200, seed=4, kinds={100: 60, 200: 200, 300: 400}))
    run_json("train", log, "-o", tmp_path / "p", "--split", 0.4, "--seed", 3)

    text = invoke("eval", other, "--predictor", tmp_path / "p").stdout
    given = run_json("eval", log, "--predictor", tmp_path / "p")

    assert (given["split"], given["seed"]) == (0.4, 3)  # its own: what it has not learnt from
    assert "ours above S3" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.slow
@pytest.mark.parametrize(
    ("further", "judged_by"),
    first_is_smoke([(["--overflow", "0.1"], "held_out"), (["--folds", "3"], "folds")]),
)
def test_eval_keeps_its_figures_and_no_prompt(
    db: Path, log: Path, further: list[str], judged_by: str
) -> None:
    """The same answers have the same key, in whatever order the log has them."""
    evaluation = run_json("eval", log, *further)
    log.write_text("".join(reversed(log.read_text().splitlines(keepends=True))))
    again = run_json("eval", log, *further, "--seed", 0)
    first, second = command.fields_of("db", "show")["predictor_scores"]
    content = command.text_of("db", "export")

    own = evaluation["logs"][0]["points"]["own point"]["methods"][0]
    assert (first["model"], first["reads"], first["judged_by"]) == ("tiny", "tokens", judged_by)
    assert first["judged_answers"] == evaluation["logs"][0]["answers"] == again["logs"][0]["answers"]
    assert 40 <= first["learnt_answers"] < 150
    assert (first["hold"], first["verified"]) == (evaluation["hold"], True)
    assert (first["figures"]["accuracy"], first["figures"]["utilisation"]) == (
        *(own["accuracy"], own["utilisation"]),
    )
    assert first["figures"]["coverage_90"] == evaluation["logs"][0]["calibration"]["coverage"][8]
    assert first["answers_key"] == second["answers_key"]
    assert str(log) not in content
    assert log.name not in content
    assert "prompt" not in content


def test_eval_goes_on_where_nothing_can_be_kept(log: Path, tmp_path: Path) -> None:
    """Its figures are printed; why they are not kept is one line."""
    (tmp_path / "text.db").write_text("no database")
    done = invoke("eval", log, "--db", tmp_path / "text.db")

    assert done.exit_code == 0
    assert "accuracy" in done.stdout
    assert "nothing is kept of it: " in done.stderr


def test_serve_finds_the_models_own_predictor(log: Path, tmp_path: Path) -> None:
    from phasewise.serving.engine.messages import Submit
    from phasewise.workflows.serve.opened_models import open_predictor

    assert open_predictor("off", "tiny") is None
    assert open_predictor("auto", "nobody") is None
    run_json("train", log, "-o", tmp_path / "p")
    opened = open_predictor(str(tmp_path / "p"), "tiny")

    assert opened is not None
    asked = Submit("r", tuple(made_up(1)[0].facts.token_ids), 200)
    opened.learn(asked, 20)
    estimate = opened.estimate(asked)
    assert 1 <= estimate.output_tokens <= 200
    assert 0 <= estimate.uncertainty <= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["train", "few.jsonl"], "too few"),
        (["train", "texts.jsonl"], "--model"),
        (["train", "few.jsonl", "others.jsonl"], "several models"),
        (["eval", "few.jsonl", "--predictor", "few.jsonl"], "no safetensors file"),
        (["collect", "MODEL", "empty.txt", "-o", "log"], "no prompt"),
        (["collect", "MODEL", "few.jsonl", "-o", "log"], "line 1"),
        (["collect", "MODEL", "a.txt", "-o", "others.jsonl"], "give another file"),
        (["collect", "MODEL", "a.txt", "-o", "no/such/folder/log"], "cannot be written"),
        (["predict", "MODEL", "-p", "hello", "--predictor", "absent"], "no predictor absent: make one with"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "few.jsonl", made_up(5))
    write_log(tmp_path / "others.jsonl", made_up(5), "another")
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a", "output_tokens": 3}\n')
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "a.txt").write_text("a\n")

    done = invoke(*(tiny if word == "MODEL" else word for word in arguments))

    assert (done.exit_code, done.stdout) == (1, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("phasewise: ")
    assert said in line


def test_ctrl_c_keeps_what_has_ended_and_the_same_command_goes_on(tiny: Path, tmp_path: Path) -> None:
    prompts, log = tmp_path / "a.txt", tmp_path / "log.jsonl"
    prompts.write_text("".join(f"prompt {number}\n" for number in range(3000)))
    collect = ("predict-len", "collect", tiny, prompts, "-o", log, "--max-tokens", 8)
    process = command.start(*collect, "--sequences", 4)
    for _ in range(2400):
        if log.exists() and log.stat().st_size:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]

    assert process.returncode == 130
    assert "goes on from there" in said
    assert "Traceback" not in said
    assert 0 < len(lines_of(log)) < 3000
    done = len(lines_of(log))
    fields = command.fields_of(*collect, "--limit", done + 5)
    assert fields["answered_before"] + fields["answered_now"] == done + 5
