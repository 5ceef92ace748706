"""Rows 11 to 15: secrets that others could see, and files that are not what they seem."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import time
from pathlib import Path

from tests.soak.hostile_rows.siege import Siege, all_memory_mib
from tests.soak.row_runner import Missed
from tests.soak.served_process import PHASEWISE, TINY, model_reference, own_cache
from tests.support.tiny_models import write_tiny_hf

SECRET = "a-secret-of-the-operator"
BOUND_S = 60.0
MOST_TOKENIZER_MIB = 256.0


def secrets_on_display(siege: Siege) -> str:
    """A key on the command line is not in the process list; a database's password is in no message."""
    with siege.server("--api-key", SECRET) as server:
        if SECRET.encode() in Path(f"/proc/{server.pid}/cmdline").read_bytes():
            raise Missed("ps shows the API key")
        if SECRET in server.said():
            raise Missed("the log shows the API key")
    for url in (
        f"postgresql://me:{SECRET}/x@none.invalid/db",
        f"postgresql://none.invalid/db?password={SECRET}",
    ):
        found = _phasewise("db", "path", "--db", url)
        if SECRET in found.stdout + found.stderr:
            raise Missed(f"`db path` shows a password: {found.stdout}")
    return "no key in the process list, no password in a message"


def packed_file_cut_short(siege: Siege) -> str:
    """The packed model loses its end while it is mapped: one line, exit code 70."""
    folder = siege.folder / "cut"
    folder.mkdir()
    with siege.server(model=model_reference(TINY, folder), environment=own_cache(TINY, folder)) as server:
        (packed,) = (folder / "cache" / "packed").glob("*.packed")
        os.truncate(packed, 4096)
        with contextlib.suppress(OSError):
            siege.asked(server).complete(max_tokens=2000)
        code = server.exit_code(BOUND_S)
        last = server.said().splitlines()[-1]
    if code != 70 or str(packed) not in last:
        raise Missed(f"exit code {code}, last line {last!r}")
    return "one line that names the file, exit code 70"


def endless_database(siege: Siege) -> str:
    """A SQLite file whose table is an endless view: refused in one line, by each command that opens it."""
    file = siege.folder / "endless.db"
    _phasewise("db", "upgrade", "--db", str(file))
    with sqlite3.connect(file) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(measurement)")]
        named = ", ".join(f"x AS {column}" for column in columns)
        connection.execute("DROP TABLE measurement")
        connection.execute(
            "CREATE VIEW measurement AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
            f"SELECT {named} FROM n"
        )
    connection.close()
    slowest_s = 0.0
    for arguments in (("stats",), ("show",), ("export",), ("merge", str(file))):
        own = str(siege.folder / "own.db") if arguments[0] == "merge" else str(file)
        began = time.monotonic()
        found = _phasewise("db", *arguments, "--db", own)
        slowest_s = max(slowest_s, time.monotonic() - began)
        if found.returncode != 1 or len(found.stderr.splitlines()) != 1:
            raise Missed(f"`db {arguments[0]}`: exit code {found.returncode}, {found.stderr[-300:]!r}")
    return f"refused in one line, {slowest_s:.1f} s at most"


def names_that_steer(siege: Siege) -> str:
    """A model whose name has escape sequences: `models inspect` shows them as text."""
    folder = siege.folder / "steer"
    folder.mkdir()
    path = folder / "a\x1b]0;owned\x07b.gguf"
    Path(model_reference(TINY, folder)).rename(path)
    found = _phasewise("models", "inspect", str(path))
    missing = _phasewise("models", "inspect", "none\x1b[2J.gguf")
    if found.returncode or "\x1b" in found.stdout + found.stderr + missing.stderr:
        raise Missed(f"escape sequences reach the terminal: {found.stdout[:200]!r} {missing.stderr[:200]!r}")
    return "shown as text"


def links_for_files(siege: Siege) -> str:
    """A length log that is a link is refused in one line, and what it leads to stays as it is."""
    precious, link = siege.folder / "precious", siege.folder / "lengths.jsonl"
    precious.write_text("mine")
    link.symlink_to(precious)
    model = model_reference(TINY, siege.folder)
    found = _phasewise("serve", model, "--port", "0", "--length-log", str(link))
    if found.returncode != 1 or len(found.stderr.splitlines()) != 1 or precious.read_text() != "mine":
        raise Missed(f"exit code {found.returncode}: {found.stderr[-300:]!r}")
    return "refused in one line"


def links_out_of_models(siege: Siege) -> str:
    """A link in a model's directory to a file of the user's: refused by name, whatever command opens it."""
    secret = siege.folder / "secret"
    secret.write_text("the user's")
    for name in ("chat_template.jinja", "config.json", "tokenizer.json", "model.safetensors"):
        directory = write_tiny_hf(siege.folder / f"linked-{name}")
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(secret)
        for command in (("models", "inspect"), ("generate", "-n", "1"), ("serve", "--port", "0")):
            found = _phasewise(*command, str(directory))
            if found.returncode != 1 or len(found.stderr.splitlines()) != 1 or name not in found.stderr:
                raise Missed(f"{command} with {name}: code {found.returncode}: {found.stderr[-300:]!r}")
    return "four files, three commands: refused by name in one line"


def tokenizers_that_burn(siege: Siege) -> str:
    """Normalizers that multiply, patterns that try for ever: a 400 within bounds, nothing on stderr."""
    replacing = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}] * 8
    trying = {"type": "Split", "pattern": {"Regex": "(a*)*b"}, "behavior": "Isolated", "invert": False}
    attacks = {
        "grows": ({"normalizer": {"type": "Sequence", "normalizers": replacing}}, "aaa"),
        "tries": ({"pre_tokenizer": trying}, "a" * 200 + "!b"),
    }
    lines = []
    for name, (parts, prompt) in attacks.items():
        directory = write_tiny_hf(siege.folder / name)
        file = directory / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
        with siege.server(model=str(directory), environment=own_cache(TINY, directory)) as server:
            memory_mib = all_memory_mib(server.pid)
            asked = siege.asked(server)
            began = time.monotonic()
            seen = {asked.complete(prompt)[0] for _ in range(5)}
            took_s, grown_mib = time.monotonic() - began, all_memory_mib(server.pid) - memory_mib
            loud = [line for line in server.said().splitlines() if "panic" in line or "Traceback" in line]
            if seen != {400} or loud or grown_mib > MOST_TOKENIZER_MIB:
                raise Missed(f"{name}: {seen}, {grown_mib:.0f} MiB more, {loud[:1]}")
            lines.append(f"{name}: five times 400 in {took_s:.1f} s, {grown_mib:+.0f} MiB")
    return "; ".join(lines)


def _phasewise(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [*PHASEWISE, *arguments], capture_output=True, text=True, timeout=BOUND_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Missed(f"`phasewise {' '.join(arguments[:2])}` takes more than {BOUND_S:g} s") from error
