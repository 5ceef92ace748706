"""Signals, a full disk, and more requests than the KV pool holds."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.soak import raw_http
from tests.soak.fault_rows.ranks import kill, small_budget
from tests.soak.fault_rows.setting import Setting, expect, n_running, text_alone, wait_until_free
from tests.soak.row_runner import Missed, Skipped
from tests.soak.served_process import ServerProcess, model_reference

AT_ONCE_S = 5.0


def drained(setting: Setting) -> str:
    """SIGTERM in the middle of a batch: not ready and nothing new at once; what runs is finished.

    The ranks get it too, as those of a service do.
    """
    n_tokens = 300
    bodies = [setting.body(f"Answer {i}", n_tokens) for i in range(6)]
    with setting.server(ranks=2) as server:
        wanted = [text_alone(server, body) for body in bodies]

        async def storm() -> tuple[list[Any], int, raw_http.Reply]:
            idle = await raw_http.Connection.open(server.port)
            await idle.ask("GET", "/ready")  # the server knows it by now
            asked = [_begin(server, body) for body in bodies]
            answers = [asyncio.create_task(answer) for answer in asked]
            await _until_running(server, len(bodies))
            server.signal()
            kill(server, signal.SIGTERM)
            await asyncio.sleep(0.05)
            ready = (await idle.ask("GET", "/ready")).status
            new = await _refused(server, bodies[0])
            return list(await asyncio.gather(*answers)), ready, new

        answers, ready, new = asyncio.run(storm())
        code = server.exit_code()
    for said, text in zip(answers, wanted, strict=True):
        expect(
            said.text == text and said.n_done == 1,
            f"an answer in progress ended with {said.errors or said.text!r}",
        )
    expect(ready == 503, f"/ready says {ready} while the server drains")
    expect(new.status == 503, f"a new request gets {new.status}")
    expect(code == 0, f"exit code {code}")
    return f"/ready 503 and new requests 503 at once, {len(answers)} answers came whole, exit code 0"


def forced(setting: Setting) -> str:
    """A second signal ends what is in progress at once, and says so."""
    with setting.server() as server:

        async def storm() -> raw_http.Streamed:
            answer = asyncio.create_task(_begin(server, setting.body("Without end", 3500)))
            await _until_running(server, 1)
            server.signal()
            await asyncio.sleep(0.2)
            server.signal()
            return await answer

        said = asyncio.run(storm())
        began = time.monotonic()
        code = server.exit_code(AT_ONCE_S)
        took_s = time.monotonic() - began
    expect(said.errors == ["server_stopping"], f"the answer ended with {said.errors}, {said.n_done} ends")
    return f"the answer in progress was told ({said.errors[0]}), exit code {code} after {took_s:.1f} s"


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
        too_long = server.ask("POST", "/v1/completions", setting.body("x", 3500))
    codes = Counter(reply.status for reply in replies)
    expect(set(codes) <= {200, 429} and codes[200] > 0, f"answers {dict(codes)}")
    expect(
        all("retry-after" in reply.headers for reply in replies if reply.status == 429),
        "429 without Retry-After",
    )
    for i, reply in enumerate(replies):
        right = reply.status != 200 or reply.json()["choices"][0]["text"] == wanted[i % len(bodies)]
        expect(right, "another answer than alone")
    expect(too_long.status == 400, f"a request that can never fit gets {too_long.status}")
    counts = {name: metrics.get(f"phasewise_{name}_total", 0) for name in ("preemptions", "kv_migrations")}
    return (
        f"{codes[200]} answered and right, {codes[429]} refused with 429, none lost;"
        f" {counts['preemptions']:.0f} preemptions, {counts['kv_migrations']:.0f} migrations;"
        " one that can never fit gets 400"
    )


# ---- what they have in common ----------------------------------------------------------------------------


async def _begin(server: ServerProcess, body: dict[str, Any]) -> raw_http.Streamed:
    refusal, said = await raw_http.stream(server.port, "/v1/completions", body)
    if refusal is not None:
        raise Missed(f"refused with {refusal.status}: {refusal.body.decode()}")
    return said


async def _refused(server: ServerProcess, body: dict[str, Any]) -> raw_http.Reply:
    """The answer to a new request; a connection that is not taken counts as 503."""
    try:
        return await raw_http.ask(server.port, "POST", "/v1/completions", body)
    except OSError as error:
        return raw_http.Reply(503, {}, json.dumps(str(error)).encode())


async def _until_running(server: ServerProcess, n_requests: int) -> None:
    for _ in range(1000):
        if await n_running(server) >= n_requests:
            return
        await asyncio.sleep(0.005)
    raise Missed(f"{n_requests} requests are not computed at a time")


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
