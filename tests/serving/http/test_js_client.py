"""The official JavaScript client: chat with tools, streamed and not, and responses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.models.tool_templates import HERMES
from tests.support.servers.scripted_engine import scripted_server

pytestmark = pytest.mark.slow

MODULES = os.environ.get("PHASEWISE_NODE_MODULES", "")
"""A node_modules folder with npm's openai."""

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any", maxRetries: 0 });
const model = "fake", temperature = 0;
const messages = [{ role: "user", content: "hi" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const out = {};
const whole = await client.chat.completions.create({ model, temperature, messages, tools });
out.whole = whole.choices[0];
const stream = client.chat.completions.stream({ model, temperature, messages, tools });
out.pieces = 0;
for await (const chunk of stream) out.pieces += chunk.choices.length;
out.streamed = (await stream.finalChatCompletion()).choices[0];
let turns = 0;
const runner = client.chat.completions.runTools({
  model, temperature, messages,
  tools: [{ type: "function", function: { name: "get_weather", parameters, parse: JSON.parse,
    function: ({ city }) => { turns += 1; return `rain in ${city}`; } } }],
});
out.final = await runner.finalContent();
out.turns = turns;
const flat = [{ type: "function", name: "get_weather", parameters, strict: false }];
out.response = (await client.responses.create({ model, temperature, input: "hi", tools: flat })).output;
const events = client.responses.stream({ model, temperature, input: "hi", tools: flat });
out.types = [];
for await (const event of events) out.types.push(event.type);
out.responseStreamed = (await events.finalResponse()).output;
console.log(JSON.stringify(out));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(not MODULES, reason="PHASEWISE_NODE_MODULES names no folder with npm's openai")
def test_chat_with_tools_and_responses(tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(MODULES)
    (tmp_path / "main.mjs").write_text(SCRIPT)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

    def script(prompt: str) -> str:
        return (
            f"So: {prompt.rpartition('tool')[2][1:14]}"
            if "<|im_start|>tool" in prompt
            else f"I look.\n{call}"
        )

    with scripted_server(HERMES, "<|im_start|>assistant\n") as (server, ranks):
        ranks.script = script
        ran = subprocess.run(
            ["node", "main.mjs", server.url], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    for choice in (report["whole"], report["streamed"]):
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look."
        (tool_call,) = choice["message"]["tool_calls"]
        assert json.loads(tool_call["function"]["arguments"]) == {"city": "Paris"}
    assert report["pieces"] > 3
    assert (report["final"], report["turns"]) == ("So: rain in Paris", 1)
    for output in (report["response"], report["responseStreamed"]):
        assert [item["type"] for item in output] == ["message", "function_call"]
        assert json.loads(output[1]["arguments"]) == {"city": "Paris"}
    assert report["types"][0] == "response.created"
    assert report["types"][-1] == "response.completed"
