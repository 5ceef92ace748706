"""`phasewise serve`: a model behind the OpenAI API."""

from __future__ import annotations

from phasewise.cli.explain_text import uses_text
from phasewise.cli.options import EXPLAIN, OptionalModelArgument
from phasewise.cli.present import note
from phasewise.workflows.errors import UsageError
from phasewise.workflows.serve.settings import ServeSettings


def serve(
    *, model: OptionalModelArgument = None, settings: ServeSettings, explain: bool = EXPLAIN(False)
) -> None:
    """Serve MODEL, or the models of a folder, through the OpenAI API.

    $ phasewise serve smollm2-135m-instruct
    $ phasewise serve model.gguf --host 0.0.0.0 --api-key-file keys --context 8192

    Completions and chat, or embeddings and reranking where MODEL is made
    for that; /v1/models, /health, /ready, and /metrics for
    Prometheus.

    Ctrl-C or SIGTERM ends it: /ready is 503 at once, new requests get 503,
    and answers in progress have --drain seconds, or none after a second
    signal. The exit code is 0 then, and 70 where the ranks died too often
    to be started again. SIGHUP opens the files of --access-log and
    --length-log anew and reads --api-key-file again; where none of the
    three is given it ends the server as SIGTERM does, unless it is ignored
    (nohup).
    """
    from phasewise.serving.processes.headroom import use_one_heap
    from phasewise.serving.processes.secrets import hide_values_of

    if hide_values_of("--api-key"):
        note(
            "warning: the command line showed the API key to everybody on this machine until now; "
            "PHASEWISE_API_KEY or --api-key-file does not"
        )
    if model is None and settings.coming.models is None:
        raise UsageError("give a MODEL to serve, or --models DIR: a folder of models")
    use_one_heap()  # before numpy's threads are there
    from phasewise.workflows.serve.run import serve_models

    serve_models(model, settings, note, explain=(lambda *told: note(uses_text(*told))) if explain else None)
