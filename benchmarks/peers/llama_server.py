"""llama.cpp's embeddings by its server, timed as compare.py asks: `llama_server.py PROGRAM GGUF THREADS`."""

import json
import sys
import urllib.request
from pathlib import Path

from worker_loop import answer, timed_ns

from benchmarks.peers.servers import llama_cpp, running


def main() -> None:
    program, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with running(llama_cpp(program, Path(model), embeddings=True), 16, 512, threads) as url:

        def embed(_phase: str, tokens: int, texts: int) -> int:
            given = [[1000 + (index * tokens + j) % 20000 for j in range(tokens)] for index in range(texts)]
            body = json.dumps({"input": given, "encoding_format": "base64"}).encode()
            asked = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
            vectors: list[object] = []

            def ask() -> None:
                with urllib.request.urlopen(asked, timeout=120) as said:
                    vectors.extend(json.load(said)["data"])

            took_ns = timed_ns(ask)
            assert len(vectors) == texts
            return took_ns

        answer(embed)


if __name__ == "__main__":
    main()
