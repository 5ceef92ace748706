"""A sample worker of an accelerator, to be copied: nothing of phasewise is imported.

    phasewise serve MODEL --embed-device "exec:python3 -m phasewise.serving.embedding.sample_worker"

It is started as COMMAND FD SPEC: the number of a connected socket, and JSON with `protocol`, `device`,
`model` (a path or known name), `width` (length of a vector), `cores` and more. Replace `vectors` by your
own."""

from __future__ import annotations

import json
import socket
import struct
import sys

HEAD, COUNT, PAIR = struct.Struct("<IBQ"), struct.Struct("<I"), struct.Struct("<II")
VECTORS, FAILED, READY = 2, 3, 4


def vectors(inputs: list[list[int]], width: int) -> bytes:
    """Vectors, float32 [inputs, width] of length 1 each, from the token ids of each input: here all alike."""
    return struct.pack(f"<{width}f", 1.0, *[0.0] * (width - 1)) * len(inputs)


def inputs_of(body: bytes) -> list[list[int]]:
    """The token ids of each input of a batch; both texts of a pair stand in one list."""
    (n,) = COUNT.unpack_from(body)
    lengths = [PAIR.unpack_from(body, COUNT.size + i * PAIR.size)[0] for i in range(n)]
    ids = memoryview(body)[COUNT.size + n * PAIR.size :].cast("i").tolist()
    ends = [sum(lengths[: i + 1]) for i in range(n)]
    return [ids[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def main() -> None:
    """Answer batches until the socket ends."""
    file, spec = socket.socket(fileno=int(sys.argv[1])).makefile("rwb"), json.loads(sys.argv[2])

    def send(kind: int, batch: int, body: bytes) -> None:
        file.write(HEAD.pack(len(body), kind, batch) + body)
        file.flush()

    send(READY, 0, json.dumps({"protocol": 1}).encode())
    while head := file.read(HEAD.size):
        n_bytes, _kind, batch = HEAD.unpack(head)
        inputs, width = inputs_of(file.read(n_bytes)), spec["width"]
        try:
            send(VECTORS, batch, PAIR.pack(len(inputs), width) + vectors(inputs, width))
        except Exception as error:
            send(FAILED, batch, f"{error}".encode())


if __name__ == "__main__":
    main()
