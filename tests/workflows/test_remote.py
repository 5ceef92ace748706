"""Pushing and pulling: nothing is lost, nothing is believed that was changed, nothing private leaves."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import http.server
import json
import os
import re
import ssl
import string
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phasewise.kerneldb.fields import parts
from phasewise.kerneldb.portable import export_lines, groups_of, import_rows
from phasewise.kerneldb.records import KINDS, Measurement, StoredRow
from phasewise.kerneldb.remote_index import (
    MAX_BUNDLE_BYTES,
    MAX_INDEX_BYTES,
    NAME,
    Bundle,
    RemoteError,
    RemoteIndex,
    read_index,
)
from phasewise.kerneldb.store import open_store
from phasewise.workflows.database import remote as remote_module
from phasewise.workflows.database import remote_files
from phasewise.workflows.database.remote import preview, pull, push
from phasewise.workflows.database.remote_files import identity_of, sign
from phasewise.workflows.database.settings import Leaving, Trust
from tests.support.machines.kerneldb_examples import (
    MEASUREMENT,
    ORIGIN,
    OTHER_MACHINE,
    PLAN,
    PREDICTOR_SCORE,
    PROMOTION,
    SCHEDULE,
    STEP_TIME,
    STORAGE_DUEL,
    measured,
)
from tests.support.tiers import examples

PLACED = dataclasses.replace(PLAN, plan_json='{"format": 2, "phase": "decode", "pus": 2, "ranks": [[0, 1]]}')
EMBEDDING = dataclasses.replace(PLACED, phase="embed", plan_json='{"format": 1}')
ELSEWHERE = dataclasses.replace(ORIGIN, machine=OTHER_MACHINE)
ROWS: list[StoredRow] = [
    *(MEASUREMENT, PROMOTION, STORAGE_DUEL, PLACED, EMBEDDING, STEP_TIME, PREDICTOR_SCORE),
    measured(700, origin=ELSEWHERE),
]
"""A row of each kind that a push may take, but for users' kernels; the last is of another kind of core."""
ALSO = Leaving(step_times=True)
TLS = Path(__file__).parent.parent / "data" / "tls"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The serials that were seen, and words of an owner that are in no row."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", "/home/nobody-at-all")
    monkeypatch.setenv("LOGNAME", "nobody-at-all")


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def database(file: Path, rows: list[StoredRow]) -> str:
    with open_store(file) as store:
        import_rows(store, rows)
    return str(file)


def exported(db: str) -> str:
    with open_store(db) as store:
        return "".join(export_lines(groups_of(store)))


def pull_all(remote: Path | str, db: str, trust: Trust) -> int:
    return pull(str(remote), db, trust, every_core=True).taken.added


def pinned(remote: Path) -> Trust:
    return Trust(digest=hashlib.sha256((remote / NAME).read_bytes()).hexdigest())


def test_what_is_pushed_and_pulled_exports_the_same_bytes(tmp_path: Path, remote: Path) -> None:
    """Plans, plans of embedding, step times and scores too; a second push and a second pull add nothing."""
    here = database(tmp_path / "here.db", ROWS)
    done = push(str(remote), here, ALSO, Trust())
    there = str(tmp_path / "there.db")

    assert len(done.new) == 2, "a bundle for each kind of core"
    assert pull_all(remote, there, Trust(digest=done.digest)) == len(ROWS)
    assert exported(there) == exported(here)
    assert pull_all(remote, there, Trust(digest=done.digest)) == 0
    again = push(str(remote), there, ALSO, Trust())
    assert (again.new, again.digest) == ([], done.digest)


bundles = st.builds(
    Bundle, st.sampled_from(["a", "b"]), st.sampled_from(["0" * 64, "1" * 64]), st.just(1), st.just(1)
)


@examples(50)
@given(st.sets(bundles), st.sets(bundles))
def test_indexes_merge_as_sets_and_their_serial_grows(a: set[Bundle], b: set[Bundle]) -> None:
    merged, other = (
        RemoteIndex().with_bundles(a).with_bundles(b),
        RemoteIndex().with_bundles(b).with_bundles(a),
    )

    assert merged.bundles == other.bundles == tuple(sorted(a | b))
    assert merged.with_bundles(a) is merged
    assert merged.serial >= RemoteIndex().with_bundles(a).serial
    assert read_index(merged.to_bytes(), "x") == merged


def test_two_pushes_at_once_lose_nothing(tmp_path: Path, remote: Path) -> None:
    dbs = [database(tmp_path / f"{number}.db", [measured(100 + number)]) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda db: push(str(remote), db, ALSO, Trust()), dbs)]
    there = str(tmp_path / "there.db")

    assert pull_all(remote, there, pinned(remote)) == 4


# ---- trust -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two keys, and a file that allows the first of them."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    public = (folder / "mine.pub").read_text()
    (folder / "allowed").write_text(f'fleet@example,other@example namespaces="phasewise" {public}')
    return folder / "mine", folder / "other", folder / "allowed"


def signed(index: RemoteIndex, key: Path, remote: Path) -> None:
    (remote / NAME).write_bytes(index.to_bytes())
    (remote / f"{NAME}.sig").write_bytes(sign(index.to_bytes(), key))


def test_what_is_not_signed_by_them_is_refused(
    tmp_path: Path, remote: Path, keys: tuple[Path, Path, Path]
) -> None:
    mine, other, allowed = keys
    db, trust = database(tmp_path / "a.db", [measured(1)]), Trust(allowed_signers=allowed)
    index = push(str(remote), db, ALSO, Trust()).index
    refuses = partial(_refuses, tmp_path, remote)

    refuses(trust, "is not signed")
    signed(index, other, remote)
    refuses(trust, "signed by nobody whom")
    signed(index, mine, remote)
    (remote / NAME).write_bytes(dataclasses.replace(index, serial=9).to_bytes())
    refuses(trust, "signed by nobody whom")
    (remote / NAME).write_bytes(index.to_bytes())
    (remote / f"{NAME}.sig").write_bytes(b"-----BEGIN SSH SIGNATURE-----\n")
    refuses(trust, "signed by nobody whom")
    refuses(Trust(), "is believed by --digest")
    refuses(Trust(digest="0" * 64), "not the one that --digest pins")
    refuses(Trust(allowed_signers=tmp_path / "nothing"), "no file of allowed signers")


def _refuses(tmp_path: Path, remote: Path, trust: Trust, reason: str) -> None:
    """In one line, and nothing is made."""
    target = tmp_path / "untouched.db"
    with pytest.raises(RemoteError) as refusal:
        pull_all(remote, str(target), trust)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not target.exists()


def test_a_signed_remote_is_believed_by_its_signers_and_an_older_index_of_it_is_refused(
    tmp_path: Path, remote: Path, keys: tuple[Path, Path, Path]
) -> None:
    mine, _, allowed = keys
    trust = Trust(allowed_signers=allowed)
    push(str(remote), database(tmp_path / "a.db", [measured(1)]), ALSO, Trust(), mine)
    old = {name: (remote / name).read_bytes() for name in (NAME, f"{NAME}.sig")}
    push(str(remote), database(tmp_path / "b.db", [measured(2)]), ALSO, trust, mine)
    assert pull_all(remote, str(tmp_path / "there.db"), trust) == 2
    with pytest.raises(RemoteError, match="vouches for all of it"):
        push(str(remote), str(tmp_path / "a.db"), ALSO, Trust(), mine)

    for name, content in old.items():
        (remote / name).write_bytes(content)
    _refuses(tmp_path, remote, trust, "is older (serial 1)")
    assert pull_all(remote, str(tmp_path / "there.db"), pinned(remote)) == 0


@pytest.fixture
def pushed(tmp_path: Path, remote: Path) -> tuple[Path, Bundle]:
    """A remote with one bundle."""
    db = database(tmp_path / "a.db", [row for row in ROWS if row.origin == ORIGIN])
    (bundle,) = push(str(remote), db, ALSO, Trust()).bundles
    return remote, bundle


HOSTILE: dict[str, tuple[Callable[[Bundle], dict[str, Any]], str]] = {
    "a name out of the folder": (lambda _: {"sha256": "../../../etc/passwd"}, "64 hex digits"),
    "a bundle of 1 GB": (lambda _: {"bytes": 1 << 30}, f"from 0 to {MAX_BUNDLE_BYTES}"),
    "fewer bytes": (lambda bundle: {"bytes": bundle.bytes - 1}, "not what its name says"),
    "more bytes": (lambda bundle: {"bytes": bundle.bytes + 1}, "not what its name says"),
    "another bundle": (lambda _: {"sha256": "0" * 64}, "is not there"),
    "other rows": (lambda bundle: {"rows": bundle.rows + 1}, "its index says"),
    "other cores": (lambda _: {"core": "another"}, "a row of other cores"),
    "a core of two lines": (lambda _: {"core": "a\nb"}, "printable"),
    "numbers that are none": (lambda _: {"rows": True}, "a whole number"),
    "something more": (lambda _: {"path": "/etc/passwd"}, "unexpected keyword argument"),
}


@pytest.mark.many
@pytest.mark.parametrize("name", HOSTILE)
def test_an_index_that_lies_is_refused(tmp_path: Path, pushed: tuple[Path, Bundle], name: str) -> None:
    """Even where it is believed."""
    remote, bundle = pushed
    change, reason = HOSTILE[name]
    fields = json.loads((remote / NAME).read_text())
    fields["bundles"][0] |= change(bundle)
    (remote / NAME).write_text(json.dumps(fields))

    _refuses(tmp_path, remote, pinned(remote), reason)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"file": "x"}', b"[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, remote: Path, content: bytes) -> None:
    remote.mkdir()
    (remote / NAME).write_bytes(content)

    _refuses(tmp_path, remote, pinned(remote), "is not one")


def test_an_index_without_end_is_refused(tmp_path: Path, remote: Path) -> None:
    remote.mkdir()
    (remote / NAME).symlink_to("/dev/zero")

    _refuses(tmp_path, remote, Trust(digest="0" * 64), "it is none of ours")
    (remote / NAME).unlink()
    with (remote / NAME).open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    _refuses(tmp_path, remote, Trust(digest="0" * 64), "it is none of ours")


# ---- what leaves -------------------------------------------------------------------------------------------


TEXTS = {
    "machine": {"core_sig", "placement_sig"},
    "schedules": {"family", "format", "compute_path", "loop_order", "kernel_abi"},
    "times": {"program_version"},
    "plans": {"model_key", "phase", "plan_json", "objectives", "configuration_key", "kernels"},
    "conditions": {"conditions"},
    "scores of predictors": {"model_name", "reads", "answers_key", "judged_by", "figures"},
    "users' kernels": {"name", "shape", "choice", "incumbent"},
}
"""The fields of rows that hold text of any kind: what is added here has to be thought about."""


def text_fields(record: Any) -> set[str]:
    texts: set[str] = set()
    for part in parts(record):
        hint = str(get_type_hints(record)[part.name])
        if part.record is not None:
            texts |= text_fields(part.record)
        elif "str" in hint:
            texts.add(part.name)
    return texts


def test_no_field_of_a_row_could_hold_a_prompt() -> None:
    """Texts are names, signatures and plans; a new field of text is a decision."""
    assert set().union(*map(text_fields, KINDS.values())) == set().union(*TEXTS.values())


names = st.text(string.ascii_letters + string.digits + "-_", min_size=5, max_size=20)


@examples(20)
@given(host=names, user=names, folder=names, ending=st.sampled_from(["", "@int4"]), index=st.integers(0, 8))
def test_whatever_host_user_and_folders_are_called_no_bundle_names_them(
    tmp_path_factory: pytest.TempPathFactory, host: str, user: str, folder: str, ending: str, index: int
) -> None:
    """The preview has every byte that a push writes, and lists every field; rows that name them stay."""
    home = f"/{folder}/{user}"
    paths = [f"{home}/m.gguf", f"~/{folder}", f"./{folder}", f"x{home}"]
    called = [host, user, *paths, f"a-{host}-b", f"model-{host.upper()}", f"{user.upper()}x"][index]
    rows: list[StoredRow] = [MEASUREMENT, PROMOTION, PLACED, PREDICTOR_SCORE]
    rows_text = exported_text(rows).lower()
    assume(all(word.lower() not in rows_text for word in (host, user, folder)))
    private = dataclasses.replace(PLACED, model_key=called + ending)
    hidden = dataclasses.replace(PLACED, plan_json=json.dumps({"format": 2, "path": home}))
    lines, said = list[str](), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HOME": home, "LOGNAME": user, "HOSTNAME": host}.items():
            patch.setenv(name, value)
        patch.setattr("platform.node", lambda: host)
        place = tmp_path_factory.mktemp("private")
        scored = [dataclasses.replace(PREDICTOR_SCORE, **{name: called}) for name in ("model_name", "reads")]
        scored = [*scored, dataclasses.replace(STEP_TIME, model_key=called + ending)]
        db = database(place / "x.db", [*rows, private, hidden, *scored])
        previewed = preview(db, ALSO, lines.extend, said.append)
        done = push(str(place / "remote"), db, ALSO, Trust())

    text = "".join(lines)
    assert not [word for word in (host, user, home) if word.lower() in text.lower()]
    assert [bundle.rows for bundle in previewed.bundles] == [len(rows)]
    assert previewed.bundles == done.bundles
    assert b"".join((place / "remote" / each.path).read_bytes() for each in done.bundles) == text.encode()
    assert len(said) == 1
    listed = {name for field in previewed.fields for name in field.split(".")}
    assert listed == set(re.findall(r'"(\w+)":', text))


def exported_text(rows: list[StoredRow]) -> str:
    with open_store(":memory:") as store:
        import_rows(store, rows)
        return "".join(export_lines(groups_of(store)))


# ---- an address --------------------------------------------------------------------------------------------


def test_a_remote_may_be_an_https_address(
    tmp_path: Path, pushed: tuple[Path, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, bundle = pushed
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(remote)))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, there = f"https://localhost:{server.server_port}", str(tmp_path / "there.db")
    try:
        with pytest.raises(RemoteError, match="cannot be read"):
            pull_all(url, there, pinned(remote))
        monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "cert.pem"))
        assert pull_all(url, there, pinned(remote)) == bundle.rows
        with pytest.raises(RemoteError, match="is only read"):
            push(url, there, ALSO, Trust())
        with pytest.raises(RemoteError, match="is no remote"):
            pull_all(f"{url}/nothing", there, Trust(digest="0" * 64))
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "remote",
    [
        "http://example.org/x",
        "HTTP://example.org/x",
        "ftp://example.org/x",
        "file:///etc",
        "File:///etc",
        "://etc",
        "simplecache::http://example.org/x",
        "blockcache::file:///etc",
        "hf://a::file:///etc",
    ],
)
def test_other_addresses_are_refused(tmp_path: Path, remote: str) -> None:
    with pytest.raises(RemoteError, match="a folder or an https:// address"):
        pull_all(remote, str(tmp_path / "x.db"), Trust(digest="0" * 64))


@pytest.mark.slow
def test_cores_like_these_are_pulled_and_others_left(
    tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(str(remote), database(tmp_path / "here.db", ROWS), ALSO, Trust())
    monkeypatch.setattr(remote_module, "core_signature_here", lambda: OTHER_MACHINE.core_sig)
    there = str(tmp_path / "there.db")

    assert pull(str(remote), there, pinned(remote)).taken.added == 1
    with open_store(there) as store:
        assert [row.sample.schedule for row in store.stream(Measurement)] == [SCHEDULE]


# ---- what a stranger may have put there --------------------------------------------------------------------


@pytest.mark.parametrize("name", [NAME, f"{NAME}.sig", "bundle", ".phasewise-lock"])
def test_a_pipe_in_a_remote_holds_nobody_up(
    tmp_path: Path, pushed: tuple[Path, Bundle], name: str, keys: tuple[Path, Path, Path]
) -> None:
    """A pull and a push end with one line; nothing is added."""
    remote, bundle = pushed
    trust = Trust(allowed_signers=keys[2]) if name.endswith(".sig") else pinned(remote)
    place = remote / (bundle.path if name == "bundle" else name)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    mine = str(tmp_path / "a.db")
    if name != ".phasewise-lock":
        with pytest.raises(RemoteError, match="not a regular file"):
            pull(str(remote), str(tmp_path / "new.db"), trust, every_core=True)
        assert not (tmp_path / "new.db").exists()
    if name != "bundle":
        with pytest.raises(RemoteError, match="not a regular file"):
            push(str(remote), mine, ALSO, trust)
    else:
        push(str(remote), mine, ALSO, trust)
        assert pull(str(remote), str(tmp_path / "new.db"), pinned(remote), every_core=True).taken.read


def test_a_push_waits_for_another_one_and_not_for_ever(
    tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so at once; given up, nothing was written."""
    mine, said = database(tmp_path / "a.db", ROWS), list[str]()
    push(str(remote), mine, ALSO, Trust())
    before = {path: path.read_bytes() for path in remote.rglob("*") if path.is_file()}
    with (remote / ".phasewise-lock").open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(remote_files, "LOCK_S", 0.0)
        with pytest.raises(RemoteError, match="held by another push"):
            push(str(remote), mine, ALSO, Trust(), report=said.append)
        assert {path: path.read_bytes() for path in before} == before
        monkeypatch.setattr(remote_files, "LOCK_S", 600.0)

        def let_go(line: str) -> None:
            said.append(line)
            if "waiting for it" in line:
                fcntl.flock(other, fcntl.LOCK_UN)

        push(str(remote), mine, ALSO, Trust(), report=let_go)
    assert sum("waiting for it" in line for line in said) == 2


# ---- one remote, however it is written ---------------------------------------------------------------------


def test_an_older_index_is_a_replay_however_the_folder_is_written(
    tmp_path: Path, keys: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another folder of the same name is another remote."""
    key, _, signers = keys
    trust = Trust(allowed_signers=signers)
    monkeypatch.chdir(tmp_path)
    remote = tmp_path / "r3"
    (remote / "bundles").mkdir(parents=True)
    signed(RemoteIndex(7), key, remote)
    pull("r3", str(tmp_path / "a.db"), trust)
    signed(RemoteIndex(6), key, remote)
    (tmp_path / "link").symlink_to("r3")
    for written in ("r3", "./r3", "r3/", "r3//.", str(remote), f"{tmp_path}/x/../r3", "link"):
        with pytest.raises(RemoteError, match="older"):
            pull(written, str(tmp_path / "a.db"), trust)
    other = tmp_path / "elsewhere" / "r3"
    (other / "bundles").mkdir(parents=True)
    signed(RemoteIndex(6), key, other)
    monkeypatch.chdir(tmp_path / "elsewhere")
    pull("r3", str(tmp_path / "a.db"), trust)


@pytest.mark.parametrize(
    ("written", "other"),
    [
        ("https://h.example/a", "https://H.Example:443/a/"),
        ("https://h.example/a/b", "HTTPS://h.example//a/./c/../b#x"),
        ("https://h.example/a%20b", "https://h.example./a b"),
        ("https://h.example/a", "https://h.example:/a"),
        ("https://h.example/a", "https://h.example:0443/a"),
        ("https://h.example:8443/a", "https://h.example.:08443/a"),
        ("https://h.example/a", "https://%68.example/a"),
        ("https://b\u00fccher.example/a", "https://xn--bcher-kva.example/a"),
    ],
)
def test_an_address_is_one_remote_however_it_is_written(written: str, other: str) -> None:
    assert identity_of(written) == identity_of(other)
    assert identity_of(written) != identity_of(f"{written}x")
    assert identity_of("https://h.example/Org") != identity_of("https://h.example/org")


@given(st.sampled_from([0, 2**53 - 1, 2**53]), st.integers(0, 3))
@examples(20)
def test_whatever_a_push_writes_can_be_read(serial: int, n_more: int) -> None:
    """At the bound of serials a push is refused, before anything is written."""
    index = RemoteIndex(serial)
    more = [Bundle("core", f"{number:064x}", 1, 1) for number in range(n_more)]
    if serial == 2**53 and more:
        with pytest.raises(RemoteError, match="begin a new remote"):
            index.with_bundles(more)
    else:
        assert read_index(index.with_bundles(more).to_bytes(), "r").bundles == tuple(sorted(more))


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "a directory's link"])
def test_a_push_repairs_what_is_damaged(tmp_path: Path, pushed: tuple[Path, Bundle], damage: str) -> None:
    remote, bundle = pushed
    place, said = remote / bundle.path, list[str]()
    content = place.read_bytes()
    if damage == "cut":
        place.write_bytes(content[:-1])
    elif damage == "changed":
        place.write_bytes(b"x" + content[1:])
    else:
        place.unlink()
        if damage != "gone":
            place.symlink_to(tmp_path)
    mine = str(tmp_path / "a.db")

    push(str(remote), mine, ALSO, pinned(remote), report=said.append)

    assert place.read_bytes() == content
    assert any("put there anew" in line for line in said)
    pull_all(remote, str(tmp_path / "new.db"), pinned(remote))


def test_a_directory_in_a_bundle_s_place_is_told_and_nothing_is_left_beside_it(
    tmp_path: Path, pushed: tuple[Path, Bundle]
) -> None:
    remote, bundle = pushed
    place = remote / bundle.path
    place.unlink()
    (place / "theirs").mkdir(parents=True)
    before = sorted(remote.rglob("*"))

    with pytest.raises(RemoteError, match="cannot be written") as refused:
        push(str(remote), str(tmp_path / "a.db"), ALSO, pinned(remote))

    assert "\n" not in str(refused.value)
    assert sorted(remote.rglob("*")) == before
