"""Models by hub name, fetched from a stand-in for the hub: what is kept, resumed, refused."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.fetching import hub
from phasewise.serving.loaders.fetching.resolve import fetch, locate
from tests.support.models.stand_in_hub import COMMIT, StandInHub, serving
from tests.support.models.tiny_models import write_tiny_gguf, write_tiny_hf

REPOSITORY = "org/tiny-GGUF"
CONTENT = bytes(range(256)) * 2000


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInHub]:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # the client's own pauses too
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    with serving() as hub_server:
        monkeypatch.setenv("HF_ENDPOINT", hub_server.url)
        hub_server.repositories[REPOSITORY] = {
            "tiny-Q4_K_M.gguf": CONTENT,
            "tiny-Q8_0.gguf": CONTENT[:1000],
            "big/tiny-BF16-00001-of-00002.gguf": b"1",
            "big/tiny-BF16-00002-of-00002.gguf": b"2",
            "README.md": b"hello",
        }
        hub_server.repositories["org/parts-GGUF"] = {"big/tiny-BF16-00001-of-00002.gguf": b"1"}
        yield hub_server


def pull(ref: str, root: Path, lines: list[str] | None = None) -> Path:
    return fetch(ref, root, [].append if lines is None else lines.append, lambda here, total: None).path


def refusal(ref: str, root: Path) -> str:
    with pytest.raises(ModelError) as caught:
        pull(ref, root)
    line = str(caught.value)
    assert "\n" not in line
    assert not [path for path in root.rglob("*.gguf") if path.is_file()]
    return line


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ("org/tiny-GGUF:Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("org/tiny-GGUF:q8_0", "tiny-Q8_0.gguf"),
        ("org/tiny-GGUF", "tiny-Q4_K_M.gguf"),
    ],
)
def test_a_tag_names_one_gguf_file(stand_in: StandInHub, tmp_path: Path, ref: str, name: str) -> None:
    lines: list[str] = []

    path = pull(ref, tmp_path, lines)

    assert path.name == name
    assert path.read_bytes() == stand_in.repositories[REPOSITORY][name]
    assert len(lines) == 1
    assert "licence apache-2.0" in lines[0]
    assert f"{len(path.read_bytes()) / 1e6:.1f} MB" in lines[0]


def test_what_is_here_is_not_asked_for_again(stand_in: StandInHub, tmp_path: Path) -> None:
    path = pull("org/tiny-GGUF:Q8_0", tmp_path)
    asked = len(stand_in.requests)

    assert locate("org/tiny-GGUF:Q8_0", tmp_path, print).path == path
    assert len(stand_in.requests) == asked
    assert pull("org/tiny-GGUF:Q8_0", tmp_path) == path
    assert [target for target, _ in stand_in.requests[asked:]] == [f"/api/models/{REPOSITORY}?blobs=true"]


def test_a_model_of_the_hub_runs(stand_in: StandInHub, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "source.gguf")
    stand_in.repositories[REPOSITORY]["tiny-Q6_K.gguf"] = source.read_bytes()

    model = load_model("org/tiny-GGUF:Q6_K", "native", tmp_path / "cache")

    assert model.config == load_model(str(source), "native", tmp_path / "other").config


def test_a_directory_of_safetensors_is_fetched_whole(stand_in: StandInHub, tmp_path: Path) -> None:
    source = write_tiny_hf(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    stand_in.repositories["org/tiny"] = files | {
        "consolidated.safetensors": b"x",
        "onnx/model.safetensors": b"x",
        "1_Pooling/config.json": b"{}",
        "2_Dense/model.safetensors": b"x",
    }

    path = pull("org/tiny", tmp_path / "cache")

    wanted = {name for name in files if name.endswith((".safetensors", ".json", ".jinja"))}
    assert {file.name for file in path.iterdir()} - {".whole"} == wanted | {"1_Pooling", "2_Dense"}
    assert (path / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert load_model("org/tiny", "native", tmp_path / "cache").name == "org/tiny"


def test_a_broken_download_goes_on_where_it_ended(stand_in: StandInHub, tmp_path: Path) -> None:
    stand_in.breaks_after += [100_000, 200_000]

    path = pull("org/tiny-GGUF:Q4_K_M", tmp_path)

    assert path.read_bytes() == CONTENT
    ranges = [headers.get("Range") for target, headers in stand_in.requests if target.startswith("/cdn/")]
    assert ranges == [None, "bytes=100000-", "bytes=300000-"]


def test_a_later_command_goes_on_too(stand_in: StandInHub, tmp_path: Path) -> None:
    stand_in.breaks_after += [100_000] + [0] * 100
    with pytest.raises(
        ModelError, match=r"0\.1 of 0\.5 MB are here, and the same command goes on from there"
    ):
        pull("org/tiny-GGUF:Q4_K_M", tmp_path)
    before = len(stand_in.requests)
    stand_in.breaks_after.clear()

    assert pull("org/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == CONTENT
    assert stand_in.requests[-1][1]["Range"] == "bytes=100000-"
    assert len([target for target, _ in stand_in.requests[before:] if target.startswith("/cdn/")]) == 1


def test_a_server_without_ranges_sends_all_again(stand_in: StandInHub, tmp_path: Path) -> None:
    stand_in.breaks_after.append(100_000)
    stand_in.knows_ranges = False

    assert pull("org/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == CONTENT


def test_a_busy_server_is_asked_again(stand_in: StandInHub, tmp_path: Path) -> None:
    stand_in.statuses += [429]

    assert pull("org/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == CONTENT


def test_a_spoilt_part_is_noticed_and_not_kept(stand_in: StandInHub, tmp_path: Path) -> None:
    folder = hub.folder_of("org/tiny-GGUF:Q4_K_M", tmp_path)
    folder.mkdir(parents=True)
    (folder / ".tiny-Q4_K_M.gguf.part").write_bytes(b"spoilt")

    assert "SHA-256" in refusal("org/tiny-GGUF:Q4_K_M", tmp_path)
    assert pull("org/tiny-GGUF:Q4_K_M", tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("listed", "what"),
    [
        ({"size": len(CONTENT) - 1}, "sends more than the 511999 bytes listed: it is not kept"),
        ({"size": len(CONTENT) + 1}, "512000 bytes came, the hub listed 512001: it is not kept"),
        ({"lfs": {"sha256": "0" * 64}}, "it is not kept"),
        ({"size": 10**18}, "do not fit"),
        ({"size": -1}, "no GGUF file Q4_K_M"),
        ({"size": "512000"}, "no GGUF file Q4_K_M"),
        ({"lfs": {"sha256": "../../x"}}, "no GGUF file Q4_K_M"),
        ({"rfilename": "../../../tiny-Q4_K_M.gguf"}, "no GGUF file Q4_K_M"),
        ({"rfilename": "/etc/tiny-Q4_K_M.gguf"}, "no GGUF file Q4_K_M"),
        ({"rfilename": "\x1b[2Jtiny-Q4_K_M.gguf"}, "no GGUF file Q4_K_M"),
    ],
)
def test_a_hub_that_lies_is_one_line(
    stand_in: StandInHub, tmp_path: Path, listed: dict[str, Any], what: str
) -> None:
    stand_in.listed["tiny-Q4_K_M.gguf"] = listed

    assert what in refusal("org/tiny-GGUF:Q4_K_M", tmp_path / "cache")
    assert not (tmp_path / "tiny-Q4_K_M.gguf").exists()


@pytest.mark.parametrize(
    "listing",
    [b"", b"null", b"[]", b"{}", b'{"sha": 1, "siblings": []}', b"<html>", b'{"a":' * 5000, b"x" * (17 << 20)]
    + [
        json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
        for siblings in ({}, [1], [{}], [{"rfilename": 3}])
    ],
)
def test_a_list_that_is_none_is_one_line(stand_in: StandInHub, tmp_path: Path, listing: bytes) -> None:
    stand_in.listing = listing

    assert REPOSITORY in refusal("org/tiny-GGUF:Q4_K_M", tmp_path)


@pytest.mark.parametrize(
    ("to", "what"),
    [
        ("/again", "maximum allowed redirects"),
        ("file:///etc/passwd", "unsupported protocol"),
        ("ftp://127.0.0.1/x", "unsupported protocol"),
    ],
)
def test_redirects_end(stand_in: StandInHub, tmp_path: Path, to: str, what: str) -> None:
    stand_in.redirects_to = to

    assert what in refusal("org/tiny-GGUF:Q4_K_M", tmp_path)


def test_a_model_in_parts_is_fetched_whole(stand_in: StandInHub, tmp_path: Path) -> None:
    lines: list[str] = []
    path = pull("org/tiny-GGUF:BF16", tmp_path, lines)
    assert path.name == "tiny-BF16-00001-of-00002.gguf"
    assert [part.read_bytes() for part in sorted(path.parent.glob("*.gguf"))] == [b"1", b"2"]
    assert "2 files" in lines[0]


@pytest.mark.parametrize(
    ("ref", "what"),
    [
        ("org/absent", "HTTP status 404"),
        ("org/tiny-GGUF:Q2_K", "there are big/tiny-BF16-00001-of-00002.gguf (0.0 MB)"),
        ("org/parts-GGUF:BF16", "one of 2 parts, and big/tiny-BF16-00002-of-00002.gguf is not there"),
    ],
)
def test_what_is_not_there_is_one_line(stand_in: StandInHub, tmp_path: Path, ref: str, what: str) -> None:
    assert what in refusal(ref, tmp_path)


def test_a_token_goes_to_the_hub_and_not_where_it_redirects(
    stand_in: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")

    pull("org/tiny-GGUF:Q8_0", tmp_path)

    sent = {target: headers.get("Authorization") for target, headers in stand_in.requests}
    assert sent == {
        f"/api/models/{REPOSITORY}?blobs=true": "Bearer secret",
        f"/{REPOSITORY}/resolve/{COMMIT}/tiny-Q8_0.gguf": "Bearer secret",
        f"/cdn/{REPOSITORY}/resolve/{COMMIT}/tiny-Q8_0.gguf": None,
    }


@pytest.mark.parametrize(
    ("status", "what"),
    [(401, "wants a login"), (403, "HF_TOKEN"), (404, "HTTP status 404"), (400, "refuses it")],
)
def test_a_file_that_is_refused_is_one_line(
    stand_in: StandInHub, tmp_path: Path, status: int, what: str
) -> None:
    stand_in.statuses.append(status)

    assert what in refusal("org/tiny-GGUF:Q4_K_M", tmp_path)


def test_offline_the_hub_is_not_asked(
    stand_in: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull("org/tiny-GGUF:Q8_0", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(stand_in.requests)

    assert "HF_HUB_OFFLINE is set" in refusal("org/tiny-GGUF:Q4_K_M", tmp_path / "empty")
    assert locate("org/tiny-GGUF:Q8_0", tmp_path, print).path == path
    assert len(stand_in.requests) == asked


def test_a_full_disk_is_one_line(
    stand_in: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub.folder_of("org/tiny-GGUF:Q8_0", tmp_path)
    folder.mkdir(parents=True)
    (folder / ".tiny-Q8_0.gguf.part").symlink_to("/dev/full")

    assert "No space left on device" in refusal("org/tiny-GGUF:Q8_0", tmp_path)


def test_an_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    assert "out of reach" in refusal("org/name:Q4_K_M", tmp_path)


def test_two_processes_do_not_write_one_part(stand_in: StandInHub, tmp_path: Path) -> None:
    folder = hub.folder_of("org/tiny-GGUF:Q8_0", tmp_path)
    folder.mkdir(parents=True)
    with (folder / ".tiny-Q8_0.gguf.part").open("a+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)

        assert "by another process" in refusal("org/tiny-GGUF:Q8_0", tmp_path)


def test_a_digest_of_git_is_checked(stand_in: StandInHub, tmp_path: Path) -> None:
    content = b"{}"
    url = f"{stand_in.url}/{REPOSITORY}/resolve/{COMMIT}/a.json"
    stand_in.repositories[REPOSITORY]["a.json"] = content
    right = hashlib.sha1(b"blob 2\0" + content).hexdigest()
    hub.fetch_file(hub.RemoteFile(url, "a.json", 2, None, right), tmp_path / "a.json", lambda n: None)

    with pytest.raises(ModelError, match="git's SHA-1"):
        hub.fetch_file(hub.RemoteFile(url, "b", 2, None, "0" * 40), tmp_path / "b", lambda n: None)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a.json"]
