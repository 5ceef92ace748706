"""An agent of ten turns with three tools on the default model: every turn calls, and keeps its schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import platformdirs
import pytest

pytestmark = pytest.mark.slow
pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

MODEL = "smollm2-135m-instruct"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
SCHEMAS: dict[str, Any] = {
    "get_weather": CITY | {"additionalProperties": False},
    "get_time": CITY | {"additionalProperties": False},
    "add": SUM | {"additionalProperties": False},
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": name.replace("_", " "), "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]


def test_ten_turns(tmp_path: Path) -> None:
    cache = Path(os.environ.get("PHASEWISE_CACHE") or platformdirs.user_cache_path("phasewise"))
    if not (cache / "models" / MODEL).is_dir():
        pytest.skip(f"{MODEL} is not in the cache")
    options = ("--port", "0", "--context", "4096", "--kv-budget", "256M", "--max-sequences", "2")
    server = subprocess.Popen(
        [sys.executable, "-m", "phasewise", "serve", MODEL, *options, "--log-level", "off"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_DATA_HOME": str(tmp_path)},
    )
    try:
        assert server.stderr is not None
        url = next(line.split()[-1] for line in server.stderr if line.startswith("listening on"))
        _talk(url)
    finally:
        server.terminate()
        server.wait(60)


def _talk(url: str) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "What is the weather in Paris? Use the tools, step by step."}
    ]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120) as api:
        for turn in range(10):
            fields: Any = {"model": MODEL, "messages": messages, "tools": TOOLS, "tool_choice": "required"}
            fields |= {"seed": turn, "max_tokens": 200, "parallel_tool_calls": False}
            if turn % 2:
                with api.chat.completions.stream(**fields) as stream:
                    choice = stream.get_final_completion().choices[0]
            else:
                choice = api.chat.completions.create(**fields).choices[0]
            assert choice.finish_reason == "tool_calls", choice
            (call,) = choice.message.tool_calls or ()
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            jsonschema_rs.validate(SCHEMAS[call.function.name], arguments)
            called = {"id": call.id, "type": "function"}
            called["function"] = {"name": call.function.name, "arguments": call.function.arguments}  # type: ignore[assignment]
            messages.append({"role": "assistant", "content": choice.message.content, "tool_calls": [called]})
            result = str(sum(arguments.values())) if call.function.name == "add" else "15 degrees, rain"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        last = api.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=40
        )
        assert last.choices[0].message.content
