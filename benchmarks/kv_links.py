"""Keys and values of a Llama 3 8B over a link as instances use it: frames over TCP, encrypted by CURVE.

    python benchmarks/kv_links.py speed                    # GB/s over loopback, with CURVE and without
    python benchmarks/kv_links.py second-token             # as root: links of 1, 10 and 25 Gbit/s
    python benchmarks/kv_links.py modelled                 # the same by the simulator's links

The sender and the receiver are processes, with the code of `cluster.real.handing_over`. For `second-token`
they are in two network namespaces, and `tc` slows the link between them. The sender has a layer when a
prompt of that model would have stored it (`--prefill-ms` for all of them); what counts is the time from the
last layer to the end's arrival: the delay of the second token beside an answer on the instance of its prompt.
Keys and values cross a link in the format that an instance has them in (`--kv-formats`; decision 0153).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Annotated

import numpy as np
import zmq
from typer import Option

from benchmarks.harness import Rounds, Spread, Yielded, commands, listed, numbers
from phasewise.cluster.real.handing_over.frames import Codec
from phasewise.cluster.real.handing_over.links import StreamLink
from phasewise.cluster.real.handing_over.receiver import Receiver
from phasewise.cluster.simulated.kv_transfer import Link, Prompt, transfer
from phasewise.cython_kernels._native import KvMemory
from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.serving.pools.contract import ALIGNMENT, Placement
from phasewise.serving.processes.sockets import Keys, Sockets
from phasewise.serving.ranks.kv_share import KvShape
from tests.support.servers.two_hosts import DATA, in_namespace, other_namespace, slowed

VOCAB = 128_256
BURST_S = 0.004
"""Bytes that tc lets through a slowed link at once, since it looks at its clock 250 times a second."""
OWN_NAMESPACE = "PHASEWISE_KV_LINKS"
"""Set where this program runs in a network namespace of its own."""


def shape_of(kv_format: str) -> KvShape:
    """The shape of Llama 3 8B."""
    return KvShape(32, 8, 128, kv_format)


def memory_of(shape: KvShape, n_tokens: int) -> KvMemory:
    n_slots = -(-n_tokens // ALIGNMENT) * ALIGNMENT
    n_bytes = (
        shape.n_layers * shape.n_kv_heads * n_slots * kv_slot_bytes(shape.kv_format, shape.head_dim, False)
    )
    raw = np.ones(n_bytes, np.uint8)  # touched, so that no page is missing later
    return KvMemory(raw, 0, shape.n_layers, shape.n_kv_heads, shape.head_dim, n_slots, shape.kv_format, False)


def codec_of(shape: KvShape, n_tokens: int) -> Codec:
    return Codec(shape, VOCAB, n_tokens, b"m" * 32)


def placement_of(n_tokens: int) -> Placement:
    return Placement(0, -(-n_tokens // ALIGNMENT) * ALIGNMENT)


def receive(host: str, keys: Keys | None, shape: KvShape, n_tokens: int, pipe: Connection) -> None:
    """The other process: takes hand-overs until the pipe ends, and tells when each has arrived."""
    memory = memory_of(shape, n_tokens)
    receiver = Receiver(codec_of(shape, n_tokens), memory)
    with Sockets(keys) as sockets, contextlib.suppress(EOFError):
        frames, endpoint = sockets.listen(zmq.PULL, f"tcp://{host}:*")
        pipe.send(endpoint)
        while True:
            epoch = pipe.recv()
            receiver.expect("r", epoch, n_tokens)
            receiver.await_kv("r", placement_of(n_tokens))
            pipe.send("ready")
            arrived = None
            while arrived is None:
                arrived = receiver.take([frame.buffer for frame in frames.recv_multipart(copy=False)])
            pipe.send(time.monotonic())


@dataclass
class Wire:
    """The sender, and the pipe to the receiver."""

    shape: KvShape
    n_tokens: int
    memory: KvMemory
    socket: zmq.Socket[bytes]
    pipe: Connection
    logits: np.ndarray = field(default_factory=lambda: np.zeros(VOCAB, np.float32))
    epoch: int = 0

    @property
    def n_bytes(self) -> int:
        return (
            self.shape.n_layers
            * self.memory.wire_bytes(ALIGNMENT)
            // ALIGNMENT
            * placement_of(self.n_tokens).n_slots
        )

    def hand_over(self, prefill_s: float = 0.0, *, layerwise: bool = True) -> tuple[float, float]:
        """Seconds from its begin, and from the end of the prompt, until all has arrived.

        layerwise: each layer leaves when it is stored; else all when the prompt is computed.
        """
        self.epoch += 1
        self.pipe.send(self.epoch)
        assert self.pipe.recv() == "ready"
        link = StreamLink(
            "r", self.epoch, self.n_tokens, codec_of(self.shape, self.n_tokens), self.memory, self._post
        )
        began_s = time.monotonic()
        stored_s = began_s + prefill_s
        for layer in range(self.shape.n_layers):
            at_s = began_s + prefill_s * (layer + 1) / self.shape.n_layers if layerwise else stored_s
            time.sleep(max(0.0, at_s - time.monotonic()))
            assert link.put(layer, 0, self.n_tokens, placement_of(self.n_tokens))
        assert link.finish(self.logits)
        arrived_s = self.pipe.recv()
        return arrived_s - began_s, arrived_s - stored_s

    def _post(self, parts: list[bytes]) -> bool:
        self.socket.send_multipart(parts, copy=False)
        return True


@contextlib.contextmanager
def wire(
    shape: KvShape, n_tokens: int, keys: Keys | None, host: str = "127.0.0.1", there: int | None = None
) -> Iterator[Wire]:
    """there: the process in whose network namespace the receiver is."""
    context = multiprocessing.get_context("spawn")
    here, other = context.Pipe()
    process = context.Process(target=receive, args=(host, keys, shape, n_tokens, other), daemon=True)
    with contextlib.nullcontext() if there is None else in_namespace(there):
        process.start()
    other.close()
    try:
        with Sockets(keys) as sockets:
            yield Wire(
                shape, n_tokens, memory_of(shape, n_tokens), sockets.connect(zmq.PUSH, here.recv()), here
            )
    finally:
        here.close()
        process.join(10)


def speed(
    tokens: Annotated[int, Option(help="of the prompt")] = 1024,
    rounds: Rounds = 15,
) -> Yielded:
    """GB/s of whole prompts over loopback, by TCP with CURVE and without."""
    shape = shape_of("f16")
    with contextlib.ExitStack() as stack:
        wires = {
            "TCP with CURVE": stack.enter_context(wire(shape, tokens, Keys.new())),
            "TCP": stack.enter_context(wire(shape, tokens, None)),
        }
        for name, own in wires.items():
            own.hand_over()
            taken_s = [own.hand_over()[0] for _ in range(rounds)]
            speeds = [own.n_bytes / seconds / 1e9 for seconds in taken_s]
            yield {
                "": name,
                "MB": own.n_bytes / 1e6,
                "GB/s": Spread.of(speeds),
                "Gbit/s": 8 * statistics.median(speeds),
            }


Tokens = Annotated[int, Option(help="of the prompt")]
PrefillMs = Annotated[float, Option(help="time of the prompt")]
TbtMs = Annotated[float, Option(help="time of a decode step, for the shares")]
KvFormats = Annotated[str, Option(help="formats in which instances have keys and values")]
WAYS = (("layer by layer", True), ("serial", False))


def second_token(
    tokens: Tokens = 512,
    prefill_ms: PrefillMs = 400.0,
    tbt_ms: TbtMs = 30.0,
    gbits: str = "1,10,25",
    kv_formats: KvFormats = "f16,int8",
    rounds: Rounds = 10,
) -> Yielded:
    """Delay of the second token, layer by layer and serially. The times of steps are those of the example in
    docs/guide/planning-capacity.md unless stated."""
    if not os.environ.get(OWN_NAMESPACE):
        if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
            raise SystemExit("needs root, unshare, nsenter, ip and tc")
        os.environ[OWN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    for kv_format in listed(kv_formats):
        with (
            other_namespace() as there,
            wire(shape_of(kv_format), tokens, Keys.new(), f"{DATA}.2", there) as own,
        ):
            own.hand_over()
            for gbit in (None, *numbers(gbits)):
                burst = "" if gbit is None else f"{round(1e9 * gbit / 8 * BURST_S / 1000)}kb"
                with contextlib.nullcontext() if gbit is None else slowed("data", f"{gbit}gbit", burst):
                    for name, layerwise in WAYS:
                        late_s = [
                            own.hand_over(prefill_ms / 1e3, layerwise=layerwise)[1] for _ in range(rounds)
                        ]
                        late_ms = Spread.of([1e3 * seconds for seconds in late_s])
                        link = "as it is" if gbit is None else f"{gbit} Gbit/s"
                        yield row_of(kv_format, link, name, own.n_bytes, late_ms, late_ms.median / tbt_ms)


def row_of(
    kv_format: str, link: str, sent: str, n_bytes: int, late_ms: Spread | float, of_a_step: float
) -> dict[str, object]:
    return {
        "keys and values": kv_format,
        "link": link,
        "sent": sent,
        "MB": n_bytes / 1e6,
        "later, ms": late_ms,
        "of a TBT": f"{of_a_step:.0%}",
    }


def modelled(
    tokens: Tokens = 512,
    prefill_ms: PrefillMs = 400.0,
    tbt_ms: TbtMs = 30.0,
    gbits: str = "1,10,25",
    kv_formats: KvFormats = "f16,int8,int4",
) -> Yielded:
    """Delay of the second token on a link that gives all its bits, by `cluster.simulated.kv_transfer`."""
    for kv_format in listed(kv_formats):
        shape = shape_of(kv_format)
        n_bytes = shape.n_layers * shape.n_kv_heads * tokens * kv_slot_bytes(kv_format, shape.head_dim, False)
        prompt = Prompt(tokens, n_bytes, shape.n_layers, 0.0, prefill_ms / 1e3)
        for gbit in numbers(gbits):
            for name, layerwise in WAYS:
                link = Link(1e9 * gbit / 8, layerwise_above_tokens=0 if layerwise else tokens)
                late_ms = 1e3 * transfer(link, prompt, 0.0, 0.0).arrival_s - prefill_ms
                yield row_of(kv_format, f"{gbit} Gbit/s", name, n_bytes, late_ms, late_ms / tbt_ms)


app = commands(__doc__, speed, second_token, modelled)

if __name__ == "__main__":
    app()
