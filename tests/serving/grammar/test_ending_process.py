"""A process that ends while llguidance loads or compiles ends well: its threads are waited for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT

VOCABULARY = """
import threading
from types import SimpleNamespace

from phasewise.serving import service
from phasewise.serving.grammar import guides
from phasewise.serving.grammar.guides import Grammar, GuideCompiler, TokenView

pieces = [bytes([token % 256]) + b"%d" % token for token in range(60_000)]
tokens = TokenView(len(pieces), frozenset([0]), frozenset(), pieces.__getitem__, lambda *_: [])
compiler = GuideCompiler(tokens)
is_loading, load = threading.Event(), guides.open_tokenizer
guides.open_tokenizer = lambda tokens: (is_loading.set(), load(tokens))[1]
"""
ENDINGS = {
    "a server that has just begun": """
text = SimpleNamespace(guide_compiler=lambda: compiler)
model = SimpleNamespace(config=SimpleNamespace(eos_token_ids=[0]))
service._guides(SimpleNamespace(text=text, model=model))
""",
    "an instance of a cluster": """
from phasewise.serving.grammar.guide_thread import GuideThread, GuideWanted
from phasewise.serving.grammar.guides import GuideRecipe

thread = GuideThread(compiler)
thread.start()
thread.want(GuideWanted("a", "", GuideRecipe(Grammar("regex", "[a-z]+")), print, print))
assert is_loading.wait(60)
thread.stop()
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_while_a_grammar_is_loaded(ending: str) -> None:
    """Before, the interpreter's end unwound a thread through llguidance's frames: a crash."""
    script = f"{VOCABULARY}{ENDINGS[ending]}assert is_loading.wait(60)"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)

    assert (run.returncode, run.stderr) == (0, "")
