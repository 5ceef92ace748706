"""Remotes that somebody changed: each is refused in one line and changes nothing, or it says nothing new.

A change that means nothing, such as a blank in an index that is believed, may be taken: no row is another
then.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.portable import export_lines, groups_of, import_rows
from phasewise.kerneldb.records import StoredRow
from phasewise.kerneldb.remote_index import NAME, Bundle, RemoteIndex
from phasewise.kerneldb.store import open_store
from phasewise.workflows.database.remote import pull, push
from phasewise.workflows.database.remote_files import sign
from phasewise.workflows.database.settings import Leaving, Trust
from tests.support.machines.kerneldb_examples import (
    MEASUREMENT,
    ORIGIN,
    OTHER_MACHINE,
    PLAN,
    PREDICTOR_SCORE,
    PROMOTION,
    STORAGE_DUEL,
    measured,
)
from tests.support.tiers import examples

ELSEWHERE = replace(ORIGIN, machine=OTHER_MACHINE)
PLACED = replace(PLAN, plan_json='{"format": 2, "phase": "decode", "pus": 2, "ranks": [[0, 1]]}')
ROWS: list[StoredRow] = [
    *(MEASUREMENT, PROMOTION, STORAGE_DUEL, PLACED, PREDICTOR_SCORE, measured(700, origin=ELSEWHERE))
]
SIGNATURE = f"{NAME}.sig"
GIGABYTE = 1 << 30
NAMES = ("../", "../../etc/passwd", "/etc/passwd", "a/../../b", "..\\x", "\x00", "A" * 64, "0" * 63, "")


def exported(db: Path) -> bytes:
    with open_store(db) as store:
        return "".join(export_lines(groups_of(store))).encode()


@dataclass(frozen=True)
class Original:
    """A signed remote of two bundles, an older index of it, and what a pull of it gives."""

    folder: Path
    old_index: bytes
    old_signature: bytes
    rows: bytes

    @cached_property
    def index(self) -> RemoteIndex:
        fields = json.loads((self.folder / "remote" / NAME).read_text())
        return RemoteIndex(fields["serial"], tuple(sorted(Bundle(**bundle) for bundle in fields["bundles"])))

    @property
    def signers(self) -> Trust:
        return Trust(allowed_signers=self.folder / "allowed")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    folder = tmp_path_factory.mktemp("original")
    for name in ("mine", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    public = (folder / "mine.pub").read_text()
    (folder / "allowed").write_text(f'fleet@example namespaces="phasewise" {public}')
    remote, db = folder / "remote", folder / "here.db"
    leaving, trust = (
        Leaving(step_times=True),
        Trust(allowed_signers=folder / "allowed"),
    )
    for rows in (ROWS[:2], ROWS[2:]):
        with open_store(db) as store:
            import_rows(store, rows)
        old = [(remote / name).read_bytes() if remote.exists() else b"" for name in (NAME, SIGNATURE)]
        push(str(remote), str(db), leaving, trust, folder / "mine")
    built = Original(folder, *old, exported(db))
    example = folder / "example" / "remote"  # the newest index of that name has been pulled once
    shutil.copytree(remote, example)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        pull(str(example), str(folder / "seen.db"), trust, every_core=True)
    assert exported(folder / "seen.db") == built.rows
    return built


def with_changed_bytes(content: bytes, dice: random.Random) -> bytes:
    """Flipped, cut out, doubled, or put in somewhere."""
    changed, offset = bytearray(content), dice.randrange(len(content))
    match dice.randrange(5):
        case 0:
            changed[offset] ^= dice.randint(1, 255)
        case 1:
            del changed[offset : offset + dice.randint(1, 40)]
        case 2:
            changed[offset:offset] = changed[offset : offset + dice.randint(1, 40)]
        case 3:
            changed[offset:offset] = dice.randbytes(dice.randint(1, 8))
        case _:
            del changed[offset:]
    return bytes(changed)


def change_bundle(remote: Path, original: Original, dice: random.Random, *, fits: bool) -> Trust:
    """fits: its digest and size are in a believed index too, as one writes who lies."""
    bundle = dice.choice(original.index.bundles)
    content = with_changed_bytes((remote / bundle.path).read_bytes(), dice)
    if not fits:
        (remote / bundle.path).write_bytes(content)
        return pinned(remote)
    lying = replace(bundle, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    (remote / lying.path).write_bytes(content)
    others = [listed for listed in original.index.bundles if listed != bundle]
    (remote / NAME).write_bytes(RemoteIndex(9, tuple(sorted([*others, lying]))).to_bytes())
    return pinned(remote)


def change_index(remote: Path, original: Original, dice: random.Random) -> Trust:
    """Other bytes, pinned as they were or as they are."""
    before = pinned(remote)
    (remote / NAME).write_bytes(with_changed_bytes((remote / NAME).read_bytes(), dice))
    return dice.choice([before, pinned(remote), original.signers])


def change_fields(remote: Path, original: Original, dice: random.Random) -> Trust:
    """Names that are paths, other sizes and counts, other kinds of values; believed."""
    fields = json.loads((remote / NAME).read_text())
    bundle = dice.choice(fields["bundles"])
    values: list[Any] = [-1, 0, 1, GIGABYTE, 2**63, 1.5, True, None, [], {}, *NAMES]
    match dice.randrange(4):
        case 0:
            bundle[dice.choice(sorted(bundle))] = dice.choice(values)
        case 1:
            bundle[dice.choice(["path", "url", ""])] = dice.choice(NAMES)
        case 2:
            fields[dice.choice(["serial", "version", "bundles", "file"])] = dice.choice(values)
        case _:
            del bundle[dice.choice(sorted(bundle))]
    (remote / NAME).write_text(json.dumps(fields))
    return pinned(remote)


def change_signature(remote: Path, original: Original, dice: random.Random) -> Trust:
    """Damaged, somebody else's, of another text, or none."""
    signature = (remote / SIGNATURE).read_bytes()
    match dice.randrange(4):
        case 0:
            (remote / SIGNATURE).write_bytes(with_changed_bytes(signature, dice))
        case 1:
            (remote / SIGNATURE).write_bytes(sign((remote / NAME).read_bytes(), original.folder / "other"))
        case 2:
            (remote / SIGNATURE).write_bytes(original.old_signature)
        case _:
            (remote / SIGNATURE).unlink()
    return original.signers


def replay(remote: Path, original: Original, dice: random.Random) -> Trust:
    """An index that was signed once, and that a newer one has replaced."""
    (remote / NAME).write_bytes(original.old_index)
    (remote / SIGNATURE).write_bytes(original.old_signature)
    return original.signers


def grow(remote: Path, original: Original, dice: random.Random) -> Trust:
    """A bundle of a gigabyte, which its index says or not."""
    bundle = dice.choice(original.index.bundles)
    with (remote / bundle.path).open("r+b") as stream:
        stream.truncate(GIGABYTE)  # a hole: it takes no room
    if dice.random() < 0.5:
        fields = json.loads((remote / NAME).read_text())
        for entry in fields["bundles"]:
            entry["bytes"] = GIGABYTE if entry["sha256"] == bundle.sha256 else entry["bytes"]
        (remote / NAME).write_text(json.dumps(fields))
    return pinned(remote)


def pinned(remote: Path) -> Trust:
    return Trust(digest=hashlib.sha256((remote / NAME).read_bytes()).hexdigest())


Change = Callable[[Path, Original, random.Random], Trust]
CHANGES: dict[str, Change] = {
    "a bundle": lambda *given: change_bundle(*given, fits=False),
    "a bundle, in a believed index": lambda *given: change_bundle(*given, fits=True),
    "the index": change_index,
    "its fields": change_fields,
    "a signature": change_signature,
    "an older index": replay,
    "a gigabyte": grow,
}
WITH_OTHER_BUNDLES = {"the index", "its fields"}
MAY_MEAN_NOTHING = {*WITH_OTHER_BUNDLES, "a signature", "a bundle, in a believed index"}
"""A blank more, a larger serial, a bundle less: what its owner may write too, who is believed. In a
signature or a bundle the last line's end.
"""
OFTEN = ("a bundle", "a bundle, in a believed index", "its fields")
"""These take no process of ssh-keygen's."""


@examples(500)
@given(name=st.sampled_from([*CHANGES, *OFTEN, *OFTEN, *OFTEN]), seed=st.integers(0, 2**40))
def test_a_changed_remote_is_refused_in_one_line_and_changes_nothing(
    original: Original, name: str, seed: int
) -> None:
    folder = original.folder / "example"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original.folder / "state", folder / "state")
    shutil.copytree(original.folder / "remote", folder / "remote")
    there = folder / "there.db"
    trust = CHANGES[name](folder / "remote", original, random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        refusal = refusal_of(folder / "remote", there, trust)
    if refusal is None:
        assert name in MAY_MEAN_NOTHING
        rows = exported(there)
        assert rows_in(rows) <= rows_in(original.rows)
        assert rows == original.rows or name in WITH_OTHER_BUNDLES
    else:
        assert "\n" not in refusal
        assert not there.exists()


def refusal_of(remote: Path, db: Path, trust: Trust) -> str | None:
    """None where the remote was taken."""
    try:
        pull(str(remote), str(db), trust, every_core=True)
    except KernelDbError as error:
        return str(error)
    return None


def rows_in(content: bytes) -> set[bytes]:
    return set(content.splitlines()[1:-1])
