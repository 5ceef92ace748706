"""Harm that one request, template or file can do to everybody else, tried on a real server, row by row.

Each row starts its own `phasewise serve`, attacks it from a process of its own, and watches a client that
does nothing wrong: its median latency must stay within twice the idle one, /health under 100 ms, and memory
must come back within a tenth. A line for each row: `ok`, `FAIL` or `skip`, and what was seen. Exit code 1 if
anything failed. The rows are those of docs/security.md.

    python -m tests.soak.hostile                        # the default model, everything
    python -m tests.soak.hostile --model tiny --quick   # the short form, as CI has it
    python -m tests.soak.hostile --only many_choices
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.soak.hostile_rows import connections, grammars, requests, templates
from tests.soak.hostile_rows.siege import Siege
from tests.soak.row_runner import run_rows

ROWS: dict[str, Callable[[Siege], str]] = {
    "schemas_that_explode": grammars.schemas_that_explode,
    "grammars_before_prompts": grammars.grammars_before_prompts,
    "a_grammar_for_the_other": grammars.a_grammar_for_the_other,
    "grammars_that_stay": grammars.grammars_that_stay,
    "templates_that_burn": templates.templates_that_burn,
    "turns_in_contents": templates.turns_in_contents,
    "prompts_told_by_time": requests.prompts_told_by_time,
    "many_choices": requests.many_choices,
    "long_conversations": requests.long_conversations,
    "full_contexts": requests.full_contexts,
    "batches_of_inputs": requests.batches_of_inputs,
    "tiny_chunks": connections.tiny_chunks,
    "pipelined_requests": connections.pipelined_requests,
    "unfinished_bodies": connections.unfinished_bodies,
    "tokenizers_that_burn": templates.tokenizers_that_burn,
}


def main() -> int:
    return run_rows(__doc__ or "", ROWS, Siege)


if __name__ == "__main__":
    sys.exit(main())
