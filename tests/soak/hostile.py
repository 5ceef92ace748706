"""What one request, one template or one file can do to everybody else: tried on a real server, row by row.

Each row starts its own `phasewise serve`, attacks it from a process of its own, and watches a client that
does nothing wrong: its median latency must stay within twice the idle one, /health under 100 ms, and memory
must come back within a tenth. A line for each row: `ok`, `FAIL` or `skip`, and what was seen. Exit code 1 if
anything failed. The rows are those of docs/security.md.

    python -m tests.soak.hostile                        # the default model, everything
    python -m tests.soak.hostile --model tiny --quick   # the short form, as CI has it
    python -m tests.soak.hostile --only huge_integers
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.soak.hostile_rows import connections, files, grammars, requests, templates
from tests.soak.hostile_rows.siege import Siege
from tests.soak.row_runner import run_rows

ROWS: dict[str, Callable[[Siege], str]] = {
    "schemas_that_explode": grammars.schemas_that_explode,
    "grammars_before_prompts": grammars.grammars_before_prompts,
    "a_grammar_for_the_other": grammars.a_grammar_for_the_other,
    "grammars_that_stay": grammars.grammars_that_stay,
    "templates_that_burn": templates.templates_that_burn,
    "turns_in_contents": templates.turns_in_contents,
    "huge_integers": requests.huge_integers,
    "prompts_told_by_time": requests.prompts_told_by_time,
    "many_choices": requests.many_choices,
    "long_conversations": requests.long_conversations,
    "full_contexts": requests.full_contexts,
    "batches_of_inputs": requests.batches_of_inputs,
    "tiny_chunks": connections.tiny_chunks,
    "pipelined_requests": connections.pipelined_requests,
    "unfinished_bodies": connections.unfinished_bodies,
    "other_origins": connections.other_origins,
    "ambiguous_requests": connections.ambiguous_requests,
    "connections_too_many": connections.connections_too_many,
    "broken_chunks": connections.broken_chunks,
    "secrets_on_display": files.secrets_on_display,
    "packed_file_cut_short": files.packed_file_cut_short,
    "endless_database": files.endless_database,
    "names_that_steer": files.names_that_steer,
    "links_for_files": files.links_for_files,
    "links_out_of_models": files.links_out_of_models,
    "tokenizers_that_burn": files.tokenizers_that_burn,
}


def main() -> int:
    return run_rows(__doc__ or "", ROWS, Siege)


if __name__ == "__main__":
    sys.exit(main())
