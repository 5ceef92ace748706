"""Every option of `phasewise serve` acts in every way of running, or is refused by name beforehand.

An option acts where a run with it opens other values (tests/cli/opened_by_serve.py) than one without it.
A new option needs a row in `SAMPLES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.tuner.plans import PHASES
from phasewise.workflows.opening.settings import Weights
from tests.cli.command_options import commands, flag_of, options_of
from tests.cli.opened_by_serve import Boundary, Run
from tests.support.machines.paper_machines import xeon
from tests.support.machines.stored_plans import keep_embedding_plan, keep_plan
from tests.support.models.adapters import drawn_pairs, write_peft
from tests.support.models.encoder_models import write_encoder
from tests.support.models.tiny_models import TinyShape, tiny_gguf, tiny_weights

TLS = Path(__file__).parents[1] / "data" / "tls"


@dataclass(frozen=True)
class Places:
    """Files that options name."""

    model: Path
    other: Path
    encoder: Path
    keys: Path
    models: Path
    """A folder of models."""
    plans: Path
    """A database in which the prefill plan has more cores than the decode plan; the encoder has one."""
    folder: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("places")
    models = [folder / name for name in ("tiny.gguf", "other.gguf")]
    shape = TinyShape(context_length=4000)
    for path in models:
        path.write_bytes(tiny_gguf(shape=shape).to_bytes())
    write_peft(folder / "adapter", drawn_pairs(tiny_weights("llama", shape), "adapter"))
    keys = folder / "keys"
    keys.write_text("one\n")
    keys.chmod(0o600)
    plans = folder / "plans.db"
    keep_plan(plans, xeon(), "tiny@native", "prefill", range(8))
    keep_plan(plans, xeon(), "tiny@native", "decode", range(4))
    keep_embedding_plan(plans, xeon(), "bert@native", range(6))
    for phase in PHASES:
        keep_plan(folder / "ranks.db", xeon(), "tiny@native", phase, range(4), range(20, 24))
    (folder / "models").mkdir()
    (folder / "models" / "tiny.gguf").write_bytes(models[0].read_bytes())
    return Places(*models, write_encoder(folder / "bert", "bert"), keys, folder / "models", plans, folder)


@pytest.fixture
def boundary(
    tmp_path_factory: pytest.TempPathFactory, places: Places, monkeypatch: pytest.MonkeyPatch
) -> Boundary:
    monkeypatch.setenv("XDG_CACHE_HOME", str(places.folder / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(places.folder / "data"))
    return Boundary(monkeypatch)


POOLS = "--prompt-pool 0-3 --token-pool 4-7"
WAYS = {
    "one process": "MODEL",
    "ranks": "MODEL --db RANKS",
    "pools": f"MODEL {POOLS}",
    "mixed pools": "MODEL --mixed-pool 0-3 --mixed-pool 4-7",
    "cluster": "MODEL --cluster auto --prompt-pool 1x4 --token-pool 1x4",
    "further models": "MODEL --also OTHER",
    "a folder of models": "--models MODELS",
    "a folder in pools": f"--models MODELS {POOLS}",
    "an embedding model": "ENCODER",
    "embeddings beside": "MODEL --embed-model ENCODER",
    "embeddings beside pools": f"MODEL {POOLS} --embed-model ENCODER",
    "a Unix socket": "MODEL --unix-socket SOCKET",
}
"""The arguments of a run in each way; words in capitals are places."""


def ways(places: Places) -> Mapping[str, list[object]]:
    words = {
        **{"MODEL": places.model, "OTHER": places.other, "ENCODER": places.encoder, "MODELS": places.models},
        **{"RANKS": places.folder / "ranks.db", "SOCKET": places.folder / "socket"},
    }
    return {way: [words.get(word, word) for word in line.split()] for way, line in WAYS.items()}


def samples(places: Places) -> Mapping[str, tuple[list[object], list[object]]]:
    """For each option: arguments with it, and arguments that it is added to."""
    here = places.folder
    certificate, key = TLS / "cert.pem", TLS / "key.pem"

    def one(*with_it: object, beside: list[object] | None = None) -> tuple[list[object], list[object]]:
        return list(with_it), beside or []

    return {
        "--host": one("--host", "127.0.0.2"),
        "--port": one("--port", 9),
        "--unix-socket": one("--unix-socket", here / "another"),
        "--tls-cert": one("--tls-cert", certificate),
        "--tls-key": one("--tls-key", key, beside=["--tls-cert", certificate]),
        "--allowed-host": one("--allowed-host", "host.example"),
        "--api-key": one("--api-key", "k"),
        "--api-key-file": one("--api-key-file", places.keys),
        "--max-sequences": one("--max-sequences", 3),
        "--max-waiting": one("--max-waiting", 5),
        "--max-prompt": one("--max-prompt", 6),
        "--max-body": one("--max-body", "9K"),
        "--max-unfinished": one("--max-unfinished", "9K"),
        "--max-connections": one("--max-connections", 7),
        "--max-connections-per-address": one("--max-connections-per-address", 7),
        "--max-sequences-per-key": one("--max-sequences-per-key", 2),
        "--max-response": one("--max-response", "9K"),
        "--allow-special": one("--allow-special"),
        "--drain": one("--drain", 3),
        "--format": one("--format", "int8"),
        "--sparse": one("--sparse", "always"),
        "--lora": one("--lora", f"poet={here / 'adapter'}"),
        "--pack": one("--pack", "memory"),
        "--arithmetic": one("--arithmetic", "canonical"),
        "--threads": one("--threads", 3),
        "--ranks": one("--ranks", 2),
        "--served-model-name": one("--served-model-name", "another"),
        "--context": one("--context", 512),
        "--predictor": one("--predictor", "auto"),
        "--max-batch-tokens": one("--max-batch-tokens", 300),
        "--tpot": one("--tpot", 50),
        "--draft": one("--draft", "off"),
        "--draft-tokens": one("--draft-tokens", 3, beside=["--draft", "lookup"]),
        "--also": one("--also", places.other),
        "--models": one("--models", places.models),
        "--models-memory": one("--models-memory", "2G", beside=["--models", places.models]),
        "--keep-alive": one("--keep-alive", "7m", beside=["--models", places.models]),
        "--kv-budget": one("--kv-budget", "8M"),
        "--kv-format": one("--kv-format", "int8"),
        "--kv-policy": one("--kv-policy", "paged"),
        "--no-prefix-reuse": one("--no-prefix-reuse"),
        "--prefix-cache": one("--prefix-cache", here / "prefixes"),
        "--prefix-cache-bytes": one(
            "--prefix-cache-bytes", "1G", beside=["--prefix-cache", here / "prefixes"]
        ),
        "--temperature": one("--temperature", 0.1),
        "--top-p": one("--top-p", 0.1),
        "--min-p": one("--min-p", 0.2),
        "--tool-format": one("--tool-format", "hermes"),
        "--cors-origin": one("--cors-origin", "https://chat.example"),
        "--no-page": one("--no-page"),
        "--receipts": one("--receipts"),
        "--access-log": one("--access-log", here / "access"),
        "--log-level": one("--log-level", "debug"),
        "--log-format": one("--log-format", "json"),
        "--prompt-pool": one("--prompt-pool", "8-9", "--token-pool", "10-11"),
        "--token-pool": one("--token-pool", "10-11", "--prompt-pool", "8-9"),
        "--mixed-pool": one("--mixed-pool", "8-9"),
        "--split-above": one("--split-above", 3),
        "--cluster": one("--cluster", "127.0.0.1:1", "--mixed-pool", "1x2"),
        "--spread": one("--spread"),
        "--embed-model": one("--embed-model", places.encoder),
        "--embed-instances": one("--embed-instances", 3),
        "--embed-cores": one("--embed-cores", 5),
        "--embed-accelerators": one("--no-embed-accelerators"),
        "--embed-device": one("--embed-device", "exec:true"),
        "--embed-cpu": one("--no-embed-cpu"),
        "--batch-dir": one("--batch-dir", here / "batches"),
        "--batch-bytes": one("--batch-bytes", "1M"),
        "--length-log": one("--length-log", here / "lengths"),
        "--db": one("--db", places.plans),
        "--explain": one("--explain"),
        "--remote": one("--remote", here / "remote", "--remote-digest", "0" * 64),
        "--remote-digest": one(
            "--remote-digest", "0" * 64, beside=["--remote", here, "--remote-signers", key]
        ),
        "--remote-signers": one(
            "--remote-signers", key, beside=["--remote", here, "--remote-digest", "0" * 64]
        ),
    }


CHOOSES_THE_WAY = {
    "cluster": {"--cluster", "--prompt-pool", "--token-pool"},
    "further models": {"--also"},
    "a folder of models": {"--models"},
    "a folder in pools": {"--models"},
    "embeddings beside": {"--embed-model"},
    "embeddings beside pools": {"--embed-model"},
    "a Unix socket": {"--unix-socket"},
}
"""Options that a run of this way has already: given once more they choose another one, or the same."""


def is_refusal(run: Run) -> bool:
    return run.exit_code == 2 and "no effect" in run.said


def test_every_option_has_a_row(places: Places) -> None:
    assert set(samples(places)) == set(options_of("serve"))


N_PARTS = 4
"""`make test` takes one part of one way."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "part"),
    [
        pytest.param(name, part, marks=pytest.mark.smoke if (name, part) == ("pools", 0) else ())
        for name in WAYS
        for part in range(N_PARTS)
    ],
)
def test_every_option_acts_or_is_refused_by_name_before_anything_opens(
    way: str, part: int, places: Places, boundary: Boundary
) -> None:
    arguments = ways(places)[way]
    silent, opened, refusals = [], {}, set()
    for flag, (with_it, beside) in list(samples(places).items())[part::N_PARTS]:
        if flag in CHOOSES_THE_WAY.get(way, ()):
            continue
        base = (*arguments, *beside)
        if base not in opened:
            run = boundary.serve(*base)
            assert run.exit_code == 0 or is_refusal(run), run.said
            if not opened:
                assert run.opened == boundary.serve(*base).opened, "two runs of equal options differ"
            opened[base] = run.opened
        run = boundary.serve(*base, *with_it)
        if is_refusal(run):
            named = run.said.split("Error: ")[1]
            assert flag in named or (flag in LINES and str(beside[0]) in named), (flag, run.said)
            assert run.opened == {}, flag
            refusals.add(flag)
        else:
            assert run.exit_code == 0, (flag, run.said)
            if run.opened == opened[base] and f"without effect: {key_of(flag)} " not in run.said:
                silent.append(flag)
    assert not silent


@pytest.mark.parametrize(("options", "sequences"), [((), 32), (("--max-sequences", 3), 3)])
def test_weights_are_stored_for_as_many_sequences_as_a_server_may_have(
    places: Places, boundary: Boundary, options: tuple[object, ...], sequences: int
) -> None:
    """A command that computes one sequence stores them for that one."""
    run = boundary.serve(places.model, *options)
    (stored,) = [load[3] for load in run.opened["loaded"] if load[0] != "schedules"]

    assert stored == ["auto", sequences]
    assert Weights().sequences == 1


LINES = {flag_of(parameter) for parameter in commands()["serve"].params if parameter.hidden}
"""Options that the configuration file alone has: a run leaves out those that it cannot follow."""


def key_of(flag: str) -> str:
    """The option in the configuration file, of which a run says what it cannot follow."""
    return flag.lstrip("-").replace("-", "_")


OF_WEIGHTS = (("--arithmetic", "canonical"), ("--arithmetic", "tiles"), ("--pack", "check"))


def followed(run: Run, flag: str, choice: str) -> list[bool]:
    """For each thing that computes or loads, in any process, whether it was told."""
    specs = [spec["weights"] for spec in run.opened.get("instance", ())]
    if flag == "--pack":
        loads = [load for load in run.opened.get("loaded", ()) if load[0] != "schedules"]
        return [load[2] == choice for load in loads] + [weights["pack"] == choice for weights in specs]
    engines = [engine[6] for engine in run.opened.get("engine", ())]
    embeddings = [embedding[-1] for embedding in run.opened.get("embedding", ()) if choice == "canonical"]
    choices = [engine[phase] == choice for engine in engines for phase in PHASES]
    return [*choices, *(weights["arithmetic"] == choice for weights in specs), *embeddings]


@pytest.mark.many
@pytest.mark.parametrize("way", WAYS)
def test_arithmetic_tiles_and_packing_reach_all_that_computes(
    way: str, places: Places, boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every engine, instance and embedding model of every way; what does not reach them is refused."""
    monkeypatch.setattr("phasewise.cython_kernels.schedules.has_tiles_arithmetic", lambda: True)
    told = 0
    for flag, choice in OF_WEIGHTS:
        run = boundary.serve(*ways(places)[way], flag, choice)
        if is_refusal(run):
            assert f"{flag} has no effect" in run.said
            assert run.opened == {}
            continue
        assert run.exit_code == 0, run.said
        parts = followed(run, flag, choice)
        assert parts, (flag, choice)
        assert all(parts), (flag, choice, run.opened)
        told += 1
    assert told >= (2 if way == "an embedding model" else len(OF_WEIGHTS))


def test_an_arithmetic_that_the_cpu_lacks_is_refused_before_anything_opens(
    places: Places, boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster too, whose front opens the model to plan."""
    monkeypatch.setattr("phasewise.cython_kernels.schedules.has_tiles_arithmetic", lambda: False)
    for way in WAYS:
        run = boundary.serve(*ways(places)[way], "--arithmetic", "tiles")
        assert (run.exit_code, run.opened) == (2, {}), way
        assert "--arithmetic" in run.said


def only(run: Run, kind: str) -> list[object]:
    assert run.exit_code == 0, run.said
    return list(run.opened.get(kind, []))


@pytest.mark.parametrize("choice", ["groups", "blocks"])
def test_vectors_have_no_arithmetic_of_k_quants(places: Places, boundary: Boundary, choice: str) -> None:
    run = boundary.serve(places.encoder, "--arithmetic", choice)
    assert (run.exit_code, run.opened) == (2, {})
    assert "--arithmetic tuned or canonical" in run.said


def test_the_arithmetic_of_all_cpus_is_of_cpus_without_tiles(places: Places, boundary: Boundary) -> None:
    """No accelerator follows it: each is refused by name."""
    device = ("--arithmetic", "canonical", "--embed-device", "exec:true")
    run = boundary.serve(places.model, "--embed-model", places.encoder, *device)
    assert (run.exit_code, run.opened) == (2, {})
    assert "--embed-device has no effect with --arithmetic canonical" in run.said


def test_there_is_a_model_or_a_folder_of_them_or_both(places: Places, boundary: Boundary) -> None:
    neither = boundary.serve()
    assert neither.exit_code == 2
    assert "give a MODEL to serve, or --models DIR" in neither.said
    both = boundary.serve(places.other, "--models", places.models)
    assert [row[0][0] for row in only(both, "row")] == ["other", "tiny"]  # type: ignore[index]
    of_nothing = boundary.serve("--models", places.models, "--served-model-name", "another")
    assert (of_nothing.exit_code, of_nothing.opened) == (2, {})
    assert "--served-model-name has no effect without MODEL" in of_nothing.said
    none = boundary.serve("--models", places.folder / "nothing")
    assert none.exit_code == 2
    assert "there is no such folder" in none.said


def test_a_model_is_served_once(places: Places, boundary: Boundary) -> None:
    """Twice it would be loaded twice, with half of the memory for keys and values each."""
    for twice in (["--also", places.model], ["--also", places.other, "--also", places.other]):
        run = boundary.serve(places.model, *twice)
        assert run.exit_code == 2
        assert f"--also {twice[-1]}" in run.said
        assert "is served already" in run.said
        assert not {"loaded", "engine", "service"} & set(run.opened)


def test_a_further_model_makes_text(places: Places, boundary: Boundary) -> None:
    run = boundary.serve(places.model, "--also", places.encoder)

    assert run.exit_code == 2
    assert f"--also {places.encoder}: it is an embedding model; serve it with --embed-model" in run.said
    assert not {"loaded", "engine", "service"} & set(run.opened)


def test_a_variable_and_the_configuration_file_stand_for_runs_that_can_follow_them(
    places: Places, boundary: Boundary, tmp_path: Path
) -> None:
    """Settings that an embedding model cannot follow are left out, as one line says; a flag is refused."""
    config = tmp_path / "config.toml"
    config.write_text(f'[serve]\nkv_policy = "paged"\nport = 7\nembed_model = "{places.encoder}"\n')
    standing = {"PHASEWISE_CONFIG": str(config), "PHASEWISE_DRAFT": "lookup", "PHASEWISE_RANKS": "2"}

    alone = boundary.serve(places.encoder, **standing)
    assert alone.opened == boundary.serve(places.encoder, "--port", 7).opened
    assert alone.said.count("without effect: ") == 1
    for name in ("PHASEWISE_DRAFT", "PHASEWISE_RANKS", "kv_policy of the configuration file"):
        assert name in alone.said.split("where MODEL makes vectors")[0]
    refused = boundary.serve(places.encoder, "--draft", "lookup", **standing)
    assert (refused.exit_code, refused.opened) == (2, {})

    pooled = boundary.serve(places.model, "--mixed-pool", "0-3", PHASEWISE_RANKS="2")
    assert pooled.said.count("without effect: PHASEWISE_RANKS with pools") == 1
    assert only(pooled, "instance")


def test_a_value_that_is_the_default_chooses_no_way(places: Places, boundary: Boundary) -> None:
    run = boundary.serve(places.model, "--draft", "off", "--threads", 2, PHASEWISE_DRAFT="off")
    assert "front" not in run.opened
    assert only(run, "engine")


def test_embeddings_beside_pools_have_cores_that_no_pool_has(places: Places, boundary: Boundary) -> None:
    pools = ("--prompt-pool", "0-19", "--token-pool", "20-37")
    run = boundary.serve(places.model, *pools, "--embed-model", places.encoder, "--no-embed-accelerators")
    (embedding,) = only(run, "embedding")
    assert [instance["cores"] for instance in embedding[-2]["instances"]] == [[38, 39]]  # type: ignore[index]
    assert only(run, "cores beside embeddings") == [38]

    full = boundary.serve(places.model, "--mixed-pool", "0-39", "--embed-model", places.encoder)
    (embedding,) = only(full, "embedding")
    assert [instance["cores"] for instance in embedding[-2]["instances"] if "cpu" in instance["device"]] == [
        [39]
    ]  # type: ignore[index]
    assert "embeddings share a core with the language model" in full.said


def test_a_gpu_embeds_beside_a_language_model_too_unless_it_is_told_not_to(
    places: Places, boundary: Boundary
) -> None:
    """Its worker's own thread is on a core of the embeddings."""
    devices = {}
    for flags in ((), ("--no-embed-accelerators",)):
        (embedding,) = only(
            boundary.serve(places.model, "--embed-model", places.encoder, *flags), "embedding"
        )
        devices[flags] = {instance["device"]: instance["cores"] for instance in embedding[-2]["instances"]}  # type: ignore[index]
    assert set(devices[()]) == {"cuda:0", "cpu:0"}
    assert set(devices[()]["cuda:0"]) <= set(devices[()]["cpu:0"])
    assert set(devices[("--no-embed-accelerators",)]) == {"cpu:0"}


def test_each_of_several_models_follows_what_is_said_of_models(places: Places, boundary: Boundary) -> None:
    lookup = ("--draft", "lookup", "--predictor", "auto")
    flags = (*lookup, "--arithmetic", "blocks", "--kv-format", "int8")
    run = boundary.serve(places.model, "--also", places.other, *flags)
    engines = only(run, "engine")
    assert len(engines) == 2
    for _name, _format, _adapters, _plans, size, _special, multiplied, drafter, _ in engines:  # type: ignore[misc]
        assert drafter == "lookup"
        assert size["kv"]["format"] == "int8"
        assert multiplied == {"prefill": "blocks", "decode": "blocks"}
    assert only(run, "predictor") == [["auto", "tiny"], ["auto", "other"]]
    assert all(row[2] is not None for row in only(run, "row"))  # type: ignore[index]


def test_a_folder_of_prefixes_has_no_rows_for_a_head(places: Places, boundary: Boundary) -> None:
    """Nor keys and values of another model, which is refused."""
    kept = (places.model, "--prefix-cache", places.folder / "kept", "--draft")
    run = boundary.serve(*kept, "mtp")
    assert [engine[7] for engine in only(run, "engine")] == ["lookup"]  # type: ignore[index]
    assert "lookup drafts instead" in run.said
    assert is_refusal(boundary.serve(*kept, places.other))


@pytest.mark.parametrize("way", ["pools", "mixed pools", "cluster", "a folder in pools"])
def test_each_instance_drafts_as_it_is_asked(way: str, places: Places, boundary: Boundary) -> None:
    """By lookup if nothing is said; a draft model computes no prompts that others answer."""
    arguments = ways(places)[way]
    asked: list[tuple[list[object], object, object]] = [
        ([], "lookup", "lookup"),
        (["--draft", "off"], "off", "off"),
        (
            ["--draft", places.other],
            "lookup" if way != "mixed pools" else str(places.other),
            str(places.other),
        ),
    ]
    for options, of_first, of_last in asked:
        specs = only(boundary.serve(*arguments, *options), "instance")
        assert [specs[0]["draft"], specs[-1]["draft"]] == [of_first, of_last]  # type: ignore[index]
    if way != "mixed pools":  # whose model has no head
        assert only(boundary.serve(*arguments, "--draft", "mtp"), "instance")[-1]["draft"] == "lookup"  # type: ignore[index]
    tokens = only(boundary.serve(*arguments, "--draft-tokens", 3), "instance")
    assert {spec["draft_tokens"] for spec in tokens} == {3}  # type: ignore[index]


def test_pools_on_nodes_have_their_labels_and_one_context(places: Places, boundary: Boundary) -> None:
    pools = ("--prompt-pool", "1x4@big", "--token-pool", "2x2@kind=small")
    run = boundary.serve(places.model, "--cluster", "auto", *pools)

    ((wanted, _),) = only(run, "placed")  # type: ignore[misc]
    assert [(instance["role"], instance["cores"], instance["label"]) for instance in wanted] == [
        ("prompt", 4, "phasewise=big"),
        ("token", 2, "kind=small"),
        ("token", 2, "kind=small"),
    ]
    contexts = {spec["size"]["limits"]["context_length"] for spec in only(run, "instance")}  # type: ignore[index]
    assert len(contexts) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mixed-pool", "1x2"), "1x2 is for nodes of a cluster: add --cluster"),
        (("--cluster", "auto", "--mixed-pool", "0-3"), "--mixed-pool 0-3 has no effect with --cluster"),
        (("--cluster", "auto", "--prompt-pool", "1x2@", "--token-pool", "1x2"), "a label is a name like big"),
        (("--cluster", "auto", "--prompt-pool", "1x2"), "add --token-pool"),
        (("--cluster", "auto", "--mixed-pool", "1001x1"), "at most 1000"),
    ],
)
def test_pools_that_cannot_be_are_refused_by_name(
    places: Places, boundary: Boundary, arguments: tuple[str, ...], says: str
) -> None:
    """Nothing is placed, and on a cluster nothing is opened."""
    run = boundary.serve(places.model, *arguments)

    assert run.exit_code == 2
    assert says in run.said
    assert not {"placed", "instance", "front"} & set(run.opened)
    assert "--cluster" not in arguments or run.opened == {}


def test_every_model_and_every_instance_is_explained(places: Places, boundary: Boundary) -> None:
    models = boundary.serve(places.model, "--also", places.other, "--explain")
    assert len(only(models, "explained")) == 2
    assert "tiny:" in models.said
    assert "other:" in models.said
    pools = boundary.serve(places.model, "--prompt-pool", "0-3", "--token-pool", "4-9", "--explain")
    assert len(only(pools, "explained")) == 2
    assert "prompt pool: cores 0-3:" in pools.said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--also", "MODEL"), "tiny is served already"),
        (("--served-model-name", "other", "--also", "OTHER"), "two models are called other"),
        (("--served-model-name", ""), "--served-model-name must not be empty"),
        (("--ranks", 200), "200 ranks cannot divide"),
        (("--ranks", 2, "--mixed-pool", "0"), "--ranks has no effect with pools"),
    ],
)
def test_names_and_ranks_that_cannot_be_are_refused(
    places: Places, boundary: Boundary, arguments: tuple[object, ...], says: str
) -> None:
    paths = {"MODEL": places.model, "OTHER": places.other}

    run = boundary.serve(places.model, *(paths.get(str(word), word) for word in arguments))

    assert run.exit_code in (1, 2)
    assert says in run.said
    assert "service" not in run.opened
