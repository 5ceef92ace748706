"""What the confined process does with grammars: it compiles them, to learn whether they can be compiled.

A compiled grammar cannot be handed to another process, so the server compiles once more what has been proven
here to take neither long nor much memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from phasewise.serving.confined import JobRefused
from phasewise.serving.guides import ANY_OBJECT, Grammar, TokenView, compile_grammar, open_tokenizer

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def told_of(tokens: TokenView) -> bytes:
    """What `prepare` must know of a vocabulary."""
    return json.dumps(
        {
            "pieces": [piece.decode("latin-1") for piece in tokens.pieces],
            "ends": sorted(tokens.end_token_ids),
            "specials": sorted(tokens.special_ids),
        }
    ).encode()


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job: a grammar's kind and text in, the bytes that it takes once it is compiled out.

    Texts that a grammar forces are cut into the longest tokens, not as the model would: that changes nothing
    of what a compilation costs, and no tokenizer need be loaded here.
    """
    known = json.loads(told)
    pieces = [piece.encode("latin-1") for piece in known["pieces"]]
    ends, specials = frozenset(known["ends"]), frozenset(known["specials"])
    tokens = TokenView(len(pieces), ends, specials, pieces.__getitem__, lambda _text, _special: [])
    tokenizer = open_tokenizer(tokens)
    compile_grammar(ANY_OBJECT, tokenizer, len(pieces))  # the first is slow, and each child would have one

    def prove(request: bytes) -> bytes:
        kind, text = json.loads(request)
        before = _resident_bytes()
        found = compile_grammar(Grammar(kind, text), tokenizer, len(pieces))
        if isinstance(found, str):
            raise JobRefused(found)
        return str(max(0, _resident_bytes() - before)).encode()

    return prove


def _resident_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * _PAGE_BYTES
