"""A sample worker of an accelerator for `serve --embed-device "exec:python3 embedding_worker.py"`.

Started as COMMAND FD SPEC: the number of a connected socket, and JSON with `protocol`, `device`, `model`
(a path or known name), `width` (numbers of a vector) and more. `vectors` is yours to write.
"""

import json
import socket
import struct
import sys

HEAD, COUNT, PAIR = struct.Struct("<IBQ"), struct.Struct("<I"), struct.Struct("<II")
EMBED, VECTORS, FAILED, READY = 1, 2, 3, 4


def vectors(inputs: list[list[int]], width: int) -> bytes:
    """float32 [inputs, width], of length 1 each, from the token ids of each input: here all alike."""
    return struct.pack(f"<{width}f", 1.0, *[0.0] * (width - 1)) * len(inputs)


sock, spec = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
file = sock.makefile("rwb")


def send(kind: int, batch: int, body: bytes) -> None:
    file.write(HEAD.pack(len(body), kind, batch) + body)
    file.flush()


send(READY, 0, json.dumps({"protocol": 1}).encode())
while head := file.read(HEAD.size):
    n_bytes, _kind, batch = HEAD.unpack(head)
    body = file.read(n_bytes)
    (n,) = COUNT.unpack_from(body)
    lengths = [PAIR.unpack_from(body, COUNT.size + i * PAIR.size)[0] for i in range(n)]
    ids = memoryview(body)[COUNT.size + n * PAIR.size :].cast("i").tolist()
    starts = [sum(lengths[:i]) for i in range(n)]
    inputs = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    try:
        send(VECTORS, batch, PAIR.pack(n, spec["width"]) + vectors(inputs, spec["width"]))
    except Exception as error:
        send(FAILED, batch, f"{error}".encode())
