"""The grammar job of the confined process, which compiles grammars to prove that they compile within bounds.
A compiled grammar cannot be passed to another process, so that the server compiles a proven grammar once
more."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable

from phasewise.serving.grammar.guides import ANY_OBJECT, Grammar, TokenView, compile_grammar, open_tokenizer
from phasewise.serving.sandbox.confined import JobRefused

_INFO_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job: takes a grammar's kind and text, and returns the bytes that the compiled grammar takes. Forced
    text is cut into the longest tokens, which costs the same and needs no tokenizer."""
    vocabulary = json.loads(told)
    pieces = [piece.encode("latin-1") for piece in vocabulary["pieces"]]
    ends, specials = frozenset(vocabulary["ends"]), frozenset(vocabulary["specials"])
    tokens = TokenView(len(pieces), ends, specials, pieces.__getitem__, lambda _text, _special: [])
    tokenizer = open_tokenizer(tokens)
    allocated = allocations()
    compile_grammar(ANY_OBJECT, tokenizer, len(pieces))  # the first is slow, and each child would have one

    def prove(request: bytes) -> bytes:
        kind, text = json.loads(request)
        before = allocated()
        outcome = compile_grammar(Grammar(kind, text), tokenizer, len(pieces))
        if isinstance(outcome, str):
            raise JobRefused(outcome)
        return str(max(1, allocated() - before)).encode()

    return prove


def allocations() -> Callable[[], int]:
    """A function that tells the bytes that malloc has given out in this process. Resident memory would not
    measure a grammar that takes the place of a freed one."""
    library = ctypes.CDLL(None)
    has_wide = hasattr(library, "mallinfo2")
    number = ctypes.c_size_t if has_wide else ctypes.c_uint

    class Info(ctypes.Structure):
        _fields_ = tuple((name, number) for name in _INFO_FIELDS)

    ask = library.mallinfo2 if has_wide else library.mallinfo
    ask.restype = Info

    def allocated() -> int:
        info = ask()
        return int(info.uordblks) + int(info.hblkhd)

    return allocated
