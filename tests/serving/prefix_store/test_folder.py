"""Records of blocks and a folder of them: no changed byte is believed, and its limit holds."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.errors import ServingError
from phasewise.serving.prefix_store.blocks import (
    BLOCK_TOKENS,
    HEADER_BYTES,
    BadRecord,
    BlockNames,
    PrefixBlock,
    RecordShape,
    read_head,
    read_record,
    through_states,
    to_last_state,
    write_record,
)
from phasewise.serving.prefix_store.folder import (
    KEY_FILE,
    KeptBlock,
    PrefixFolder,
    order_of_leaving,
    to_leave,
    worth,
)
from tests.support.tiers import examples

SHAPE = RecordShape(2, 16)
ONE = SHAPE.record_bytes(BLOCK_TOKENS)


def write(folder: PrefixFolder, n_tokens: int, seed: int, seconds: float = 1.0) -> list[bytes]:
    """Write the full blocks of a sequence that is drawn; their names."""
    naming = BlockNames(folder.key, b"i" * 32)
    tokens = random.Random(seed).choices(range(1 << 17), k=n_tokens)
    blocks = naming.all_blocks(tokens, "")
    for block in blocks:
        folder.write(
            block.name, write_record(naming, block, seconds, bytes(SHAPE.rows_bytes(block.n_tokens)))
        )
    return [block.name for block in blocks]


def bytes_in(path: Path) -> int:
    statuses = (file.lstat() for file in path.glob("*.kv"))
    return sum(status.st_size for status in statuses if stat.S_ISREG(status.st_mode))


def test_what_is_written_is_found_and_read_by_another_server(tmp_path: Path) -> None:
    mine, theirs = (
        PrefixFolder.open(tmp_path / "a" / "b", 1 << 20),
        PrefixFolder.open(tmp_path / "a" / "b", 1 << 20),
    )
    names = write(mine, 300, 1)
    buffer = memoryview(bytearray(ONE))

    assert mine.key == theirs.key
    assert all(theirs.find(name) for name in names)
    assert [theirs.read_into(name, buffer) for name in names[:2]] == [ONE, ONE]
    assert not theirs.find(bytes(32))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "a" / "b").iterdir()} == {0o600}


def test_the_limit_is_kept_and_what_stays_has_its_beginning(tmp_path: Path) -> None:
    folder = PrefixFolder.open(tmp_path, 10 * ONE)
    for seed in range(12):
        names = write(folder, 3 * BLOCK_TOKENS, seed)
        assert bytes_in(tmp_path) <= 10 * ONE
        assert all(folder.find(name) for name in names)  # the newest are worth most
    kept = dict(folder.kept())

    assert folder.n_evicted == 36 - len(kept)
    assert all(block.begin == 0 or block.parent in kept for block in kept.values())


def test_what_else_lies_in_the_folder_does_no_harm(tmp_path: Path) -> None:
    folder = PrefixFolder.open(tmp_path, 8 * ONE)
    (name,) = write(folder, BLOCK_TOKENS, 1)
    strange = [bytes([number]) * 32 for number in range(1, 6)]
    places = [tmp_path / f"{stray.hex()}.kv" for stray in strange]
    os.mkfifo(places[0])
    places[1].mkdir()
    places[2].symlink_to(tmp_path / f"{name.hex()}.kv")
    places[3].write_bytes(b"x" * (3 * ONE))
    places[4].write_bytes(b"")
    (tmp_path / "zz.kv").write_text("a stranger's")
    left = tmp_path / ".new-1-abc"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    buffer = memoryview(bytearray(ONE))

    lengths = []
    for stray in strange:
        try:
            lengths.append(folder.read_into(stray, buffer))
        except OSError:
            lengths.append(-1)
    for seed in range(2, 9):
        write(folder, BLOCK_TOKENS, seed)

    assert lengths[3:] == [ONE + 1, 0]
    assert all(length in (-1, ONE + 1) for length in lengths[:3])
    assert not left.exists()
    assert (tmp_path / "zz.kv").read_text() == "a stranger's"
    assert not places[3].exists()  # no record: it leaves first
    assert bytes_in(tmp_path) <= 8 * ONE + len("a stranger's")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrefixFolder.open(tmp_path, 8 * ONE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        write(folder, BLOCK_TOKENS, 1)

    assert {file.name for file in tmp_path.iterdir()} == {KEY_FILE}


def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    damaged = tmp_path / "damaged"
    damaged.mkdir(mode=0o700)
    (damaged / KEY_FILE).write_bytes(b"short")
    for path, said in ((file, "cannot be used"), (shared, "chmod go-w"), (damaged, "no key")):
        with pytest.raises(ServingError, match=said) as refused:
            PrefixFolder.open(path, 1 << 20)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("leads_to", ["nothing", "a file", "itself"])
def test_what_an_identity_is_made_of_is_written_through_no_link(tmp_path: Path, leads_to: str) -> None:
    folder = PrefixFolder.open(tmp_path / "kept", 8 * ONE)
    place, target = tmp_path / "kept" / f"{b'd'.hex()}.json", tmp_path / "another's"
    if leads_to == "a file":
        target.write_text("as it was")
    place.symlink_to(place if leads_to == "itself" else target)

    folder.describe_identity(b"d", "model", {"weights": "w"})

    assert place.is_symlink()
    assert not target.exists() or target.read_text() == "as it was"
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"key", place.name}
    folder.describe_identity(b"e", "model", {"weights": "w"})
    assert json.loads((tmp_path / "kept" / f"{b'e'.hex()}.json").read_text())["model"] == "model"


SECONDS, AGES, SIZES = st.floats(0, 10), st.floats(-5, 1e6), st.integers(1, 1 << 22)


@st.composite
def chains(draw: st.DrawFn) -> dict[bytes, KeptBlock]:
    """Blocks of several beginnings, some of which have branches, and some of which are gone."""
    blocks: dict[bytes, KeptBlock] = {}
    for number in range(draw(st.integers(0, 30))):
        parents = [name for name in blocks if draw(st.booleans())]
        parent = parents[-1] if parents else b"root" if draw(st.integers(0, 4)) else b"gone"
        begin = blocks[parent].begin + 128 if parents else 0 if parent == b"root" else 128
        blocks[b"%d" % number] = KeptBlock(parent, begin, draw(SIZES), draw(SECONDS), draw(AGES))
    return blocks


@examples(200)
@given(blocks=chains())
def test_whatever_leaves_those_that_stay_have_their_beginnings(blocks: dict[bytes, KeptBlock]) -> None:
    order = order_of_leaving(blocks)
    n_lost = sum(not is_reached(blocks, name) for name in blocks)

    assert sorted(order) == sorted(blocks)
    assert not any(is_reached(blocks, name) for name in order[:n_lost])
    for place, name in enumerate(order):
        parent = blocks[name].parent
        if is_reached(blocks, name) and parent in blocks:
            assert order.index(parent) > place


def is_reached(blocks: dict[bytes, KeptBlock], name: bytes) -> bool:
    while blocks[name].begin:
        name = blocks[name].parent
        if name not in blocks:
            return False
    return True


@examples(100)
@given(blocks=chains(), share=st.floats(0, 1.5))
def test_no_more_leave_than_must(blocks: dict[bytes, KeptBlock], share: float) -> None:
    n_bytes = sum(block.n_bytes for block in blocks.values())
    most = int(n_bytes * share)
    leaving = list(to_leave(blocks, most))
    left = n_bytes - sum(blocks[name].n_bytes for name in leaving)

    assert left <= most
    assert not leaving or left + blocks[leaving[-1]].n_bytes > most


@examples(100)
@given(seconds=st.floats(0.001, 10), n_bytes=SIZES, age_s=st.floats(0, 1e6))
def test_a_block_is_worth_more_for_seconds_and_less_for_bytes_and_age(
    seconds: float, n_bytes: int, age_s: float
) -> None:
    block = KeptBlock(b"", 0, n_bytes, seconds, age_s)

    assert worth(block._replace(seconds=2 * seconds)) > worth(block)
    assert worth(block._replace(n_bytes=2 * n_bytes)) < worth(block)
    assert worth(block._replace(age_s=2 * age_s + 1)) < worth(block)


KEY, OTHER_KEY = b"k" * 32, b"o" * 32
BLOCK_SHAPE = RecordShape(3, 20, state_bytes=40)
TOKENS = tuple(random.Random(3).choices(range(1 << 17), k=400))


def record_of(number: int, seed: int = 5) -> tuple[BlockNames, memoryview, bytes]:
    """A naming, the record of one of its blocks, and the rows in it."""
    naming = BlockNames(KEY, b"i" * 32)
    block = naming.all_blocks(TOKENS, "s")[number]
    rows = random.Random(seed).randbytes(BLOCK_SHAPE.rows_bytes(block.n_tokens))
    return naming, bytes_of(naming, block, rows), rows


def bytes_of(naming: BlockNames, block: PrefixBlock, held: bytes) -> memoryview:
    return memoryview(bytearray(b"".join(map(bytes, write_record(naming, block, 0.25, held)))))


def test_a_record_gives_back_a_state_where_its_model_has_one() -> None:
    naming, state = BlockNames(KEY, b"i" * 32), b"s" * 40
    blocks = through_states(naming, TOKENS, "s", [399])
    for block in blocks:
        held = state if block.is_state else bytes(BLOCK_SHAPE.rows_bytes(block.n_tokens))
        assert_reads(naming, block, bytes_of(naming, block, held), held)
    with pytest.raises(BadRecord):
        read_record(naming, BLOCK_SHAPE, blocks[-1], bytes_of(naming, blocks[-1], b"s" * 39))
    with pytest.raises(BadRecord):
        read_record(naming, RecordShape(3, 20), blocks[-1], bytes_of(naming, blocks[-1], state))


def assert_reads(naming: BlockNames, block: PrefixBlock, record: memoryview, held: bytes) -> None:
    assert read_record(naming, BLOCK_SHAPE, block, record) == held
    head = read_head(bytes(record[:HEADER_BYTES]))
    assert head is not None
    assert (head.begin, head.n_tokens, head.seconds) == (block.begin, block.n_tokens, 0.25)
    assert (head.parent, head.name) == (block.parent, block.name)


@examples(100)
@given(ends=st.sets(st.integers(1, 400), min_size=1, max_size=5), n_tokens=st.integers(1, 400))
def test_the_last_state_of_a_beginning_is_found_with_all_that_leads_to_it(
    ends: set[int], n_tokens: int
) -> None:
    """Kept blocks lead from the beginning to each state without a gap; of any prompt that begins so the
    last state is reached behind its last two full blocks, and before these one that ends with a block."""
    naming = BlockNames(KEY, b"i" * 32)
    kept = through_states(naming, TOKENS, "s", ends)
    names = {block.name for block in kept}
    assert len(names) == len(kept)
    assert [block.end for block in kept if block.is_state] == sorted(ends)
    for block in kept:
        assert block.begin == 0 or block.parent in names
    whole = [block for block in naming.whole_blocks(TOKENS[:n_tokens], "s") if block.name in names]
    reached = to_last_state(naming, whole, TOKENS[:n_tokens], "s", names.__contains__)

    assert all(block.name in names for block in reached)
    first = (len(whole) - 1) * BLOCK_TOKENS
    before_end = [end for end in ends if end <= n_tokens and (end > first or end % BLOCK_TOKENS == 0)]
    assert [block.end for block in reached if block.is_state] == ([max(before_end)] if before_end else [])
    for block, before in zip(reached[1:], reached, strict=False):
        assert block.parent == before.name


@examples(300)
@given(data=st.data())
def test_no_changed_byte_is_believed(data: st.DataObject) -> None:
    naming, record, _ = record_of(0)
    block = naming.all_blocks(TOKENS, "s")[0]
    offset = data.draw(st.integers(0, len(record) - 1))
    record[offset] ^= data.draw(st.integers(1, 255))

    with pytest.raises(BadRecord):
        read_record(naming, BLOCK_SHAPE, block, record)


@examples(100)
@given(length=st.integers(0, 20_000), seed=st.integers(0, 99))
def test_neither_a_cut_record_nor_noise_is_believed(length: int, seed: int) -> None:
    naming, record, _ = record_of(0)
    block = naming.all_blocks(TOKENS, "s")[0]
    noise = memoryview(random.Random(seed).randbytes(length))
    for wrong in (record[: min(length, len(record) - 1)], noise):
        with pytest.raises(BadRecord):
            read_record(naming, BLOCK_SHAPE, block, wrong)


def test_a_record_of_another_block_identity_or_key_is_not_believed() -> None:
    naming, record, _ = record_of(0)
    block, after, *_ = naming.all_blocks(TOKENS, "s")
    for other, wanted in (
        (naming, after._replace(begin=0, end=BLOCK_TOKENS)),
        (naming, block._replace(token_ids=after.token_ids)),
        (naming, naming.all_blocks(TOKENS, "t")[0]),
        (BlockNames(KEY, b"j" * 32), block),
        (BlockNames(OTHER_KEY, naming.identity), block),
    ):
        with pytest.raises(BadRecord):
            read_record(other, BLOCK_SHAPE, wanted, record)


@examples(100)
@given(
    tokens=st.lists(st.integers(0, 5), max_size=300),
    changed=st.integers(0, 299),
    space=st.sampled_from(["", "a"]),
)
def test_names_are_equal_where_beginnings_are_and_only_there(
    tokens: list[int], changed: int, space: str
) -> None:
    naming = BlockNames(KEY, b"i" * 32)
    blocks = naming.all_blocks(tokens, space)
    other = [*tokens]
    if changed < len(other):
        other[changed] += 1

    assert [block.end for block in blocks] == [
        *range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS),
        *([len(tokens) // 16 * 16] if len(tokens) % BLOCK_TOKENS >= 16 else []),
    ]
    for mine, theirs in zip(blocks, naming.all_blocks(other, space), strict=True):
        assert (mine.name == theirs.name) == (changed >= mine.end)
    strangers = [
        *naming.all_blocks(tokens, "another"),
        *BlockNames(OTHER_KEY, naming.identity).all_blocks(tokens, space),
        *BlockNames(KEY, b"j" * 32).all_blocks(tokens, space),
    ]
    assert not {block.name for block in blocks} & {block.name for block in strangers}
