"""The grammar job of the confined process, which compiles grammars to prove that they compile within bounds.
A compiled grammar cannot be passed to another process, so that the server compiles a proven grammar once
more."""

from __future__ import annotations

import json
from collections.abc import Callable

from phasewise.serving.grammar.guides import ANY_OBJECT, Grammar, TokenView, compile_grammar, open_tokenizer
from phasewise.serving.processes.headroom import malloc_bytes_in_use
from phasewise.serving.sandbox.confined import JobRefused


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job: takes a grammar's kind and text, and returns the bytes that the compiled grammar takes. Forced
    text is cut into the longest tokens, which costs the same and needs no tokenizer."""
    vocabulary = json.loads(told)
    pieces = [piece.encode("latin-1") for piece in vocabulary["pieces"]]
    ends, specials = frozenset(vocabulary["ends"]), frozenset(vocabulary["specials"])
    tokens = TokenView(len(pieces), ends, specials, pieces.__getitem__, lambda _text, _special: [])
    tokenizer = open_tokenizer(tokens)
    compile_grammar(ANY_OBJECT, tokenizer, len(pieces))  # the first is slow, and each child would have one

    def prove(request: bytes) -> bytes:
        kind, text = json.loads(request)
        before = malloc_bytes_in_use() or 0
        outcome = compile_grammar(Grammar(kind, text), tokenizer, len(pieces))
        if isinstance(outcome, str):
            raise JobRefused(outcome)
        return str(max(1, (malloc_bytes_in_use() or 0) - before)).encode()

    return prove
