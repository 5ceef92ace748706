"""Clients that leave or do not read."""

from __future__ import annotations

import asyncio
import time

from tests.soak import raw_http
from tests.soak.fault_rows.setting import Setting, expect, held, n_running, text_alone, wait_until_free
from tests.soak.row_runner import Missed
from tests.soak.served_process import TINY, ServerProcess

RSS_NOISE_MIB = 16.0
"""MiB that allocators and first uses may take once."""
N_CHOICES = 4
UNREAD_MIB = 1024 * N_CHOICES * 6 / 1024
"""The most that one slow reader may cost: `max_pieces_unread` pieces for each choice, and as many written.
With 20 log-probabilities a piece is some 3 KiB of Python's objects, and some 2 KiB once it is written."""


def gone_mid_stream(setting: Setting) -> str:
    """1,000 clients leave after their first piece, 50 at a time: KV, descriptors and memory as before."""
    n_clients, at_once = (60, 20) if setting.quick else (1000, 50)
    with setting.server() as server:
        wanted = text_alone(server, setting.body("Once upon a time", 24))

        async def leave(index: int) -> None:
            connection = await raw_http.Connection.open(server.port)
            await connection.send(
                "POST", "/v1/completions", setting.body(f"Number {index}", 1500, stream=True)
            )
            _, headers = await connection.head()
            await anext(connection.events(headers))
            connection.abort()

        async def storm(n: int) -> None:
            for first in range(0, n, at_once):
                await asyncio.gather(*(leave(index) for index in range(first, min(n, first + at_once))))

        asyncio.run(storm(n_clients // 4))  # memory is first used
        wait_until_free(server)
        before, rss_mib = held(server), server.rss_mib()
        asyncio.run(storm(n_clients))
        wait_until_free(server, before)
        grown_mib = server.rss_mib() - rss_mib
        expect(grown_mib < RSS_NOISE_MIB, f"memory grew by {grown_mib:.1f} MiB")
        expect(text_alone(server, setting.body("Once upon a time", 24)) == wanted, "other tokens afterwards")
    return f"{n_clients} left: no KV slot and no descriptor held, memory {grown_mib:+.1f} MiB"


def slow_readers(setting: Setting) -> str:
    """Readers that take nothing of a long answer: others are served, what is held for them is freed, and is
    no more than KV pages used for the first time and what may be unread, however often they come."""
    n_readers, kv_mib = 2 if setting.quick else 4, 64 if setting.model == TINY else 512
    most_mib = kv_mib + n_readers * UNREAD_MIB + RSS_NOISE_MIB
    with setting.server("--kv-budget", f"{kv_mib}M") as server:
        body = setting.body("Once upon a time", 24)
        wanted = text_alone(server, body)
        before = held(server)

        async def hang() -> tuple[float, float, float]:
            readers = [await raw_http.Connection.open(server.port, 4096) for _ in range(n_readers)]
            for index, reader in enumerate(readers):
                # With log-probabilities, so that it is more than the kernel's buffers hold.
                many = setting.body(f"Reader {index}", 3500, stream=True, logprobs=20, n=N_CHOICES)
                await reader.send("POST", "/v1/completions", many)
                await reader.head()
            began, slowest_s, peak_mib = time.monotonic(), 0.0, 0.0
            while await n_running(server) > 0:
                peak_mib = max(peak_mib, server.rss_mib())
                slowest_s = max(slowest_s, await _timed(server, body, wanted))
                if time.monotonic() - began > 180:
                    raise Missed("slow readers still hold KV slots after 180 s")
                await asyncio.sleep(0.05)
            took_s = time.monotonic() - began
            for reader in readers:
                reader.abort()
            return took_s, slowest_s, peak_mib - rss_mib

        rss_mib = server.rss_mib()
        for _ in range(1 if setting.quick else 3):
            took_s, slowest_s, grown_mib = asyncio.run(hang())
            wait_until_free(server, before)
            expect(grown_mib < most_mib, f"memory grew by {grown_mib:.1f} MiB; {most_mib:.0f} may be")
        cut = server.metrics()["phasewise_slow_readers_cut_total"]
    return (
        f"{n_readers} readers held nothing any more after {took_s:.1f} s ({cut:.0f} cut), others were"
        f" answered in at most {slowest_s:.2f} s meanwhile, memory {grown_mib:+.1f} of {most_mib:.0f} MiB"
    )


async def _timed(server: ServerProcess, body: dict[str, object], wanted: str) -> float:
    """Seconds of a request that must be answered with `wanted`."""
    began = time.monotonic()
    reply = await raw_http.ask(server.port, "POST", "/v1/completions", body)
    expect(reply.status == 200, f"others get {reply.status}: {reply.body.decode()}")
    expect(reply.json()["choices"][0]["text"] == wanted, "others get another answer")
    return time.monotonic() - began
