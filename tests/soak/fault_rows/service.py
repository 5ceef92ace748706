"""A full disk, and more requests than the KV pool holds."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from tests.soak import raw_http
from tests.soak.fault_rows.ranks import small_budget
from tests.soak.fault_rows.setting import Setting, expect, text_alone, wait_until_free
from tests.soak.row_runner import Skipped
from tests.soak.served_process import model_reference


def disk_full(setting: Setting) -> str:
    """The database and the length log on a full file system: serving goes on, commands say it in one line."""
    place = setting.folder / "full"
    place.mkdir(exist_ok=True)
    full = _on_full_disk(setting, place)
    db = place / "two.db"
    model = model_reference(setting.model, setting.folder)
    fails = setting.phasewise(
        "db", "set-plan", model, "--phase", "decode", "--cores", "0", "--db", str(db), before=full
    )
    last = fails.stderr.strip().splitlines()[-1] if fails.stderr.strip() else ""
    expect(
        fails.returncode == 1 and "Traceback" not in fails.stderr, f"set-plan: {fails.stderr or fails.stdout}"
    )
    options = ("--db", str(db), "--length-log", str(place / "lengths.jsonl"))
    with setting.server(*options, before=full) as server:
        body = setting.body("Once upon a time", 24)
        wanted = text_alone(server, body)
        for index in range(40):
            text_alone(server, setting.body(f"Log {index}" * 8, 4))
        expect(text_alone(server, body) == wanted, "other tokens")
        wait_until_free(server)
        lost = server.metrics()["phasewise_lengths_lost_total"]
        said = server.said()
        server.signal()
        code = server.exit_code()
    expect(lost > 0, "the length log lost nothing: the disk was not full")
    expect(code == 0 and "Traceback" not in said, f"exit code {code}: {said}")
    return f"42 answered, {lost:.0f} lines of the length log counted as lost; `db set-plan`: {last}"


def kv_exhausted(setting: Setting) -> str:
    """Many long requests and little KV: all end, right or refused at once with 429 and when to come back."""
    n_requests = 60 if setting.quick else 300
    options = ("--max-waiting", "16", "--max-sequences", "8")
    bodies = [setting.body(f"Part {i}: " * (2 + i % 9), 30 + 53 * (i % 8)) for i in range(24)]
    with setting.server("--kv-budget", small_budget(setting), *options) as server:
        wanted = [text_alone(server, body) for body in bodies]

        async def storm() -> list[raw_http.Reply]:
            asked = [
                raw_http.ask(server.port, "POST", "/v1/completions", bodies[i % len(bodies)])
                for i in range(n_requests)
            ]
            return list(await asyncio.gather(*asked))

        replies = asyncio.run(storm())
        wait_until_free(server)
        metrics = server.metrics()
        too_long = server.ask("POST", "/v1/completions", setting.body("x " * 3500, 1))
    codes = Counter(reply.status for reply in replies)
    expect(set(codes) <= {200, 429} and codes[200] > 0, f"answers {dict(codes)}")
    expect(
        all("retry-after" in reply.headers for reply in replies if reply.status == 429),
        "429 without Retry-After",
    )
    for i, reply in enumerate(replies):
        right = reply.status != 200 or reply.json()["choices"][0]["text"] == wanted[i % len(bodies)]
        expect(right, "another answer than alone")
    expect(too_long.status == 400, f"a prompt that can never fit gets {too_long.status}")
    counts = {name: metrics.get(f"phasewise_{name}_total", 0) for name in ("preemptions", "kv_migrations")}
    return (
        f"{codes[200]} answered and right, {codes[429]} refused with 429, none lost;"
        f" {counts['preemptions']:.0f} preemptions, {counts['kv_migrations']:.0f} migrations;"
        " a prompt that can never fit gets 400"
    )


# ---- what they have in common ----------------------------------------------------------------------------


def _on_full_disk(setting: Setting, place: Path) -> tuple[str, ...]:
    """The prefix that gives a command a file system over `place` with a database and no room left."""
    database = setting.two_ranks()
    script = (
        f"mount -t tmpfs -o size=1m none {place} && cp {database} {place}/two.db"
        f' && (dd if=/dev/zero of={place}/filler bs=4k 2>/dev/null || true) && exec "$0" "$@"'
    )
    for unshare in (("unshare", "-m"), ("unshare", "-rm")):
        before = (*unshare, "sh", "-c", script)
        if shutil.which("unshare") and subprocess.run([*before, "true"], capture_output=True).returncode == 0:
            return before
    raise Skipped("a file system of its own needs `unshare -m`, which is denied here")
