"""Ranks that die, in every phase of a server of two ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tests.soak import raw_http
from tests.soak.fault_rows.setting import Setting, expect, held, text_alone, wait_until_free, wait_until_ready
from tests.soak.row_runner import Missed
from tests.soak.served_process import ServerProcess

GAVE_UP = 70
"""Exit code of a server whose ranks died again and again."""


def killed_while_starting(setting: Setting) -> str:
    """The server ends with one line that says so: a supervisor decides."""
    server = setting.server(ranks=2)
    while not server.rank_pids() and server.process.poll() is None:
        time.sleep(0.005)
    kill(server)
    code = server.exit_code()
    last = server.said().strip().splitlines()[-1]
    server.log.close()
    expect(code == 1 and "was killed by SIGKILL while it started" in last, f"exit code {code}: {last}")
    return f"exit code {code}: {last}"


def killed_in_each_phase(setting: Setting) -> str:
    """Idle, in prefill, in decode; the same tokens after each, and nothing is left of the dead."""
    told = []
    with setting.server(ranks=2) as server:
        body = setting.body("Once upon a time", 24)
        wanted = text_alone(server, body)
        before = held(server)
        for phase in (idle, in_prefill, in_decode):
            told.append(phase(setting, server))
            wait_until_ready(server)
            expect(text_alone(server, body) == wanted, f"other tokens after a death {phase.__name__}")
            wait_until_free(server, before)
    return "; ".join(told)


def idle(_setting: Setting, server: ServerProcess) -> str:
    pids = server.rank_pids()
    kill(server)
    took_s = server.wait_until(lambda: set(server.rank_pids()).isdisjoint(pids), 30, "does not see a death")
    took_s += wait_until_ready(server)
    return f"idle: ready again after {took_s:.1f} s"


def in_prefill(setting: Setting, server: ServerProcess) -> str:
    n_prompt = 600 if setting.quick else 1500
    bodies = [setting.body([5 + (i + j) % 200 for i in range(n_prompt)], 6) for j in range(6)]
    wanted = [text_alone(server, body) for body in bodies]

    def n_hit() -> float:
        """Requests that a death met: run again, or gone on with where an answer had begun."""
        metrics = server.metrics()
        return metrics["phasewise_requests_rerun_total"] + metrics["phasewise_answers_continued_total"]

    before = n_hit()

    async def storm(kill_after_s: float | None) -> list[tuple[raw_http.Reply | None, raw_http.Streamed]]:
        asked = [
            asyncio.create_task(raw_http.stream(server.port, "/v1/completions", body)) for body in bodies
        ]
        if kill_after_s is not None:
            await asyncio.sleep(kill_after_s)
            kill(server)  # the stopped ones too: no request has ended
        return list(await asyncio.gather(*asked))

    begun_s = time.monotonic()
    judge(asyncio.run(storm(None)), wanted)
    alone_s = time.monotonic() - begun_s
    for times in (0.5, 2, 8):  # until they have come
        kill(server, signal.SIGSTOP)
        judge(asyncio.run(storm(times * alone_s)), wanted)
        wait_until_ready(server)
        if again := n_hit() - before:
            break
    expect(again > 0, "no request was met by it")
    return f"prefill: {again:.0f} of {len(bodies)} run again"


def in_decode(setting: Setting, server: ServerProcess) -> str:
    n_tokens = 200 if setting.quick else 600
    body = setting.body("The first of many", n_tokens)
    wanted = text_alone(server, body)

    async def streamed() -> raw_http.Streamed:
        connection, said = await raw_http.Connection.open(server.port), raw_http.Streamed()
        await connection.send("POST", "/v1/completions", {**body, "stream": True})
        _, headers = await connection.head()
        async for event in connection.events(headers):
            said.take(event)
            if said.n_pieces == 3:
                kill(server)
        connection.abort()
        return said

    async def both() -> tuple[raw_http.Reply, raw_http.Streamed]:
        whole = asyncio.create_task(raw_http.ask(server.port, "POST", "/v1/completions", body))
        await asyncio.sleep(0.01)
        said = await streamed()
        return await whole, said

    before = server.metrics()["phasewise_answers_continued_total"]
    reply, said = asyncio.run(both())
    expect(not said.errors, f"the stream that had begun ended with {said.errors}, {said.n_pieces} pieces")
    expect(said.text == wanted and said.n_done == 1, "the stream that had begun is another one")
    expect(reply.status == 200, f"the answer that was not streamed got {reply.status}")
    expect(reply.json()["choices"][0]["text"] == wanted, "the answer that was not streamed is another one")
    continued = server.metrics()["phasewise_answers_continued_total"] - before
    expect(continued > 0, "no answer went on")
    return (
        f"decode: {continued:.0f} answers that had begun went on, the streamed one in {said.n_pieces} pieces"
    )


def killed_under_migration(setting: Setting) -> str:
    """With little KV and answers that grow; then once more while the ranks start again."""
    n_stories = 12 if setting.quick else 24
    bodies = [setting.body(f"Story {i}: " * (1 + i % 3), 40 + 37 * (i % 7)) for i in range(n_stories)]
    with setting.server("--kv-budget", small_budget(setting), ranks=2) as server:
        wanted = [text_alone(server, body) for body in bodies]
        before = held(server)

        async def storm() -> list[raw_http.Reply]:
            asked = [
                asyncio.create_task(raw_http.ask(server.port, "POST", "/v1/completions", body))
                for body in bodies
            ]
            for _ in range(2):
                await asyncio.sleep(0.4)
                kill(server)
            return list(await asyncio.gather(*asked))

        replies = asyncio.run(storm())
        codes = [_code(reply) for reply in replies]
        expect(set(codes) == {"200"}, f"answers {codes}")
        for reply, text in zip(replies, wanted, strict=True):
            expect(reply.json()["choices"][0]["text"] == text, "another answer")
        wait_until_ready(server)
        with killing_what_starts(server, at_most=1) as killed:
            kill(server)
            server.wait_until(lambda: len(killed) == 1, 30, "starts no rank")
        wait_until_ready(server)
        expect(text_alone(server, bodies[0]) == wanted[0], "other tokens after a death during a restart")
        wait_until_free(server, before)
        migrations = server.metrics().get("phasewise_kv_migrations_total", 0)
    return (
        f"killed twice under load (all {len(codes)} answered and right, {migrations:.0f} migrations),"
        " then again while starting"
    )


def again_and_again(setting: Setting) -> str:
    """Whatever starts is killed: the server gives up, says so in one line, and ends."""
    with setting.server(ranks=2) as server, killing_what_starts(server):
        kill(server)
        code = server.exit_code()
        said = server.said()
    last = said.strip().splitlines()[-1]
    expect(code == GAVE_UP, f"exit code {code}: {last}")
    expect("given up" in last and "Traceback" not in said, f"it said: {said}")
    return f"exit code {code}: {last}"


# ---- what they have in common ----------------------------------------------------------------------------


def kill(server: ServerProcess, how: signal.Signals = signal.SIGKILL) -> None:
    """Its other ranks."""
    for pid in server.rank_pids():
        with suppress(ProcessLookupError):
            os.kill(pid, how)


@contextmanager
def killing_what_starts(server: ServerProcess, at_most: int = 1000) -> Iterator[list[int]]:
    """Ranks that were not there at the beginning; gives those that were killed so far."""
    before, killed, enough = set(server.rank_pids()), list[int](), threading.Event()

    def work() -> None:
        while not enough.wait(0.005) and len(killed) < at_most:
            for pid in set(_ranks_of(server)) - before - set(killed):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=work)
    killer.start()
    try:
        yield killed
    finally:
        enough.set()
        killer.join()


def _ranks_of(server: ServerProcess) -> list[int]:
    try:
        return server.rank_pids()
    except FileNotFoundError:  # the server has ended
        return []


def judge(answers: Sequence[tuple[raw_http.Reply | None, raw_http.Streamed]], wanted: Sequence[str]) -> None:
    """Every answer is right, whether it had begun or not."""
    for (refusal, said), text in zip(answers, wanted, strict=True):
        if refusal is not None:
            raise Missed(f"refused with {refusal.status}: {refusal.body.decode()}")
        expect(not said.errors, f"{said.errors} after {said.n_pieces} pieces")
        expect(said.text == text and said.n_done == 1, f"{said.text!r} where {text!r} had to be")


def small_budget(setting: Setting) -> str:
    """Room for some 1,500 tokens."""
    with setting.server("--kv-budget", "64M") as server:
        slots = server.metrics()["phasewise_kv_slots"]
    return str(int(1500 * (64 << 20) / slots))


def _code(reply: raw_http.Reply) -> str:
    said: Any = reply.json()
    return "200" if reply.status == 200 else str(said["error"]["code"])
