"""Coding agents and client libraries from their registries, on a server whose model answers by a script.

`make test-agents` installs them; without it all of this is skipped. One that is not installed is skipped too.
"""

# ruff: noqa: E501 (programs)

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tool_templates import HERMES
from tests.support.servers.fake_server import FakeServer
from tests.support.servers.rude_clients import until
from tests.support.servers.scripted_engine import ScriptedRanks, scripted_server

FOLDER = Path(os.environ.get("PHASEWISE_AGENTS", "nowhere")).resolve()
"""The folder of `make test-agents`: `node_modules` and a virtual environment, `python`."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="no agents are installed: make test-agents"),
]
SECRET = "heliotrope"  # the word in the file that agents read
_READS = ("path", "file")
_RUNS = ("cmd", "command", "script")


@dataclass(frozen=True)
class Agent:
    """A client, and how it is started. `url`: of the server, without a path.

    line: the words of its command for a task. settings: files below its home, and its environment.
    """

    name: str
    program: str
    line: str
    settings: Callable[[str], tuple[Mapping[str, str], Mapping[str, str]]]
    has_tools: bool = True
    first: str | None = None
    """A command of its own that is run before, by the address of the server."""
    last: str = ""
    """The call by which the model ends its work, where an answer alone does not."""


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    """As the template of the scripted model has it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _codex(url: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    config = (
        'model = "fake"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    return {".codex/config.toml": config}, {}


def _openai(url: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    return {}, {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_MODEL": "fake"}


def _opencode(url: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "any"},
        "models": {"fake": {"limit": {"context": 400_000, "output": 8192}}},
    }
    config = {"provider": {"local": provider}, "model": "local/fake", "small_model": "local/fake"}
    return {".config/opencode/opencode.json": json.dumps(config)}, {}


def _pi(url: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    model = {"id": "fake", "name": "fake", "reasoning": False, "input": ["text"], "contextWindow": 400_000}
    model |= {"maxTokens": 8192, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}
    provider = {"baseUrl": f"{url}/v1", "apiKey": "any", "api": "openai-completions", "models": [model]}
    return {".pi/agent/models.json": json.dumps({"providers": {"local": provider}})}, {}


def _continue(url: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    model = {"name": "fake", "provider": "openai", "model": "fake", "apiBase": f"{url}/v1", "apiKey": "any"}
    config = {"name": "local", "version": "0.0.1", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
    return {"config.yaml": json.dumps(config)}, {}


def _mini(url: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    own = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    return {}, {**_openai(url)[1], **own}


_CODEX = "exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox {task}"
_CLINE = "auth -p openai-compatible -k any -m fake -b {url}/v1"
_AIDER = (
    "--model openai/fake --no-git --yes-always --no-check-update --no-show-model-warnings --no-analytics "
    "--message {task} note.txt"
)
AGENTS = [
    Agent("codex", "node_modules/.bin/codex", _CODEX, _codex),
    Agent("qwen-code", "node_modules/.bin/qwen", "--auth-type openai --yolo -p {task}", _openai),
    Agent("opencode", "node_modules/.bin/opencode", "run {task}", _opencode),
    Agent("pi", "node_modules/.bin/pi", "--provider local --model fake -p {task}", _pi),
    Agent("continue", "node_modules/.bin/cn", "--config {home}/config.yaml --auto -p {task}", _continue),
    Agent("cline", "node_modules/.bin/cline", "-P openai-compatible -m fake {task}", _openai, first=_CLINE),
    Agent("aider", "python/bin/aider", _AIDER, _openai, has_tools=False),
    Agent(
        *("mini-swe-agent", "python/bin/mini", "-m openai/fake -t {task} -y -l 0 --exit-immediately", _mini),
        last=_call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ),
]


def arguments_for(schema: dict[str, Any], note: Path) -> dict[str, Any]:
    """The arguments by which a tool reads the file."""
    out: dict[str, Any] = {}
    for name in schema.get("required", ()):
        kind = schema.get("properties", {}).get(name, {})
        if any(word in name.lower() for word in _READS):
            out[name] = str(note)
        elif name == "commands":
            out[name] = [f"cat {note}"]
        elif name in _RUNS:
            out[name] = ["cat", str(note)] if kind.get("type") == "array" else f"cat {note}"
        elif "enum" in kind:
            out[name] = kind["enum"][0]
        else:
            out[name] = {"boolean": False, "integer": 1, "number": 1}.get(str(kind.get("type")), "reads")
    return out


def reader_of(prompt: str, note: Path) -> str | None:
    """A call of the first tool of a prompt that reads a file, or runs a command."""
    lines = prompt.partition("<tools>")[2].partition("</tools>")[0].splitlines()
    tools = [json.loads(line)["function"] for line in lines if line.startswith("{")]
    for words in (("exec", "shell", "bash", "command", "terminal"), ("read",)):
        for tool in tools:
            required = tool["parameters"].get("required", ())
            if any(word in tool["name"].lower() for word in words) and required:
                return _call(tool["name"], arguments_for(tool["parameters"], note))
    return None


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeServer, ScriptedRanks]]:
    with scripted_server(HERMES, "<|im_start|>assistant\n", context=400_000) as running:
        running[1].certainty = 100.0
        yield running


@pytest.fixture
def note(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "note.txt"
    path.write_text(f"{SECRET}\n")
    return path


def begun(agent: Agent, url: str, task: str, note: Path) -> subprocess.Popen[str]:
    """The agent at work on a task, in the folder of the note."""
    program = FOLDER / agent.program
    if not program.exists():
        pytest.skip(f"{agent.name} could not be installed here")
    home = note.parent.parent / "home"
    files, more = agent.settings(url)
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    home.mkdir(exist_ok=True)
    own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "OPENAI_API_KEY": "any", "CI": "1"}
    passed = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "SSL_CERT_FILE")}
    environment = {**passed, **own, **more}
    if agent.first is not None:
        subprocess.run(
            [str(program), *(word.format(url=url) for word in agent.first.split())],
            env=environment,
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=300,
        )
    return subprocess.Popen(
        [str(program), *(word.format(home=home, task=task) for word in agent.line.split())],
        cwd=note.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """All that it said, once it has ended by itself."""
    try:
        return process.communicate(timeout=300)[0]
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


by_name = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)


@by_name
def test_a_greeting(served: tuple[FakeServer, ScriptedRanks], agent: Agent, note: Path) -> None:
    server, ranks = served
    ranks.script = lambda _prompt: f"Good morning to you.{agent.last}"
    assert "Good morning to you" in ended(begun(agent, server.url, "Say hello", note))


@by_name
def test_a_file_is_read(served: tuple[FakeServer, ScriptedRanks], agent: Agent, note: Path) -> None:
    if not agent.has_tools:
        pytest.skip("it has no tools: files are part of its prompts")
    server, ranks = served

    def script(prompt: str) -> str:
        turns = prompt.rpartition("<|im_start|>tool\n")[2] if "<|im_start|>tool\n" in prompt else ""
        if SECRET in turns:
            return f"It says {SECRET[::-1]}.{agent.last}"
        return "No." if turns else reader_of(prompt, note) or "No."

    ranks.script = script
    assert f"It says {SECRET[::-1]}" in ended(begun(agent, server.url, "Read note.txt", note))


@by_name
def test_a_prompt_that_is_too_long_ends_it(agent: Agent, note: Path) -> None:
    with scripted_server(HERMES, "<|im_start|>assistant\n", context=300) as (server, ranks):
        ranks.script = lambda _prompt: "Good morning to you."
        assert "Good morning" not in ended(begun(agent, server.url, "Say hello", note))
        server.wait_until_idle()


@by_name
def test_an_agent_that_is_stopped_frees_its_place(
    served: tuple[FakeServer, ScriptedRanks], agent: Agent, note: Path
) -> None:
    server, ranks = served
    ranks.script = lambda _prompt: "word " * 50_000
    process = begun(agent, server.url, "Say hello", note)
    try:
        until(lambda: server.client.n_live > 0 or process.poll() is not None, "it asks nothing")
        assert process.poll() is None, process.communicate()[0]
    finally:
        stop(process)
    server.wait_until_idle()


_NODE = {
    "openai": """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any" });
const stream = client.responses.stream({ model: "fake", input: "hi", tools: [{ type: "custom", name: "patch" }] });
console.log(JSON.stringify((await stream.finalResponse()).output));
""",
    "@anthropic-ai/sdk": """
import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic({ baseURL: process.argv[2], apiKey: "any" });
const tools = [{ name: "patch", input_schema: { type: "object" } }, { type: "web_search_20250305", name: "web" }];
const messages = [{ role: "user", content: "hi" }];
const stream = client.messages.stream({ model: "fake", max_tokens: 100, messages, tools });
console.log(JSON.stringify((await stream.finalMessage()).content));
""",
    "ollama": """
import { Ollama } from "ollama";
const client = new Ollama({ host: process.argv[2] });
const tools = [{ type: "function", function: { name: "patch", parameters: { type: "object" } } }];
const stream = await client.chat({ model: "fake", messages: [{ role: "user", content: "hi" }], tools, stream: true });
const calls = [];
for await (const part of stream) calls.push(...(part.message.tool_calls ?? []));
console.log(JSON.stringify(calls));
""",
}


@pytest.mark.parametrize("package", _NODE)
def test_a_library_for_node_streams_a_call(
    served: tuple[FakeServer, ScriptedRanks], package: str, tmp_path: Path
) -> None:
    server, ranks = served
    if not (FOLDER / "node_modules" / package).is_dir():
        pytest.skip(f"{package} could not be installed here")
    ranks.script = lambda _prompt: (
        '<tool_call>\n{"name": "patch", "arguments": {"input": "+a"}}\n</tool_call>'
    )
    (tmp_path / "node_modules").symlink_to(FOLDER / "node_modules")
    (tmp_path / "main.mjs").write_text(_NODE[package])
    ran = subprocess.run(
        ["node", "main.mjs", server.url], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    (call,) = json.loads(ran.stdout)
    assert "patch" in json.dumps(call)
    assert "+a" in json.dumps(call)


_LITELLM = """
import json, sys, litellm
function = {"name": "patch", "parameters": {"type": "object", "properties": {"input": {"type": "string"}}}}
asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]}
for model, base in (("openai/fake", "/v1"), ("ollama_chat/fake", ""), ("anthropic/fake", "")):
    for stream in (False, True):
        got = litellm.completion(model, api_base=sys.argv[1] + base, api_key="any", stream=stream, **asked)
        got = litellm.stream_chunk_builder(list(got)) if stream else got
        call = got.choices[0].message.tool_calls[0].function
        print(model, stream, call.name, json.loads(call.arguments))
try:
    litellm.completion("openai/fake", [{"role": "user", "content": "a" * 500_000}], api_base=sys.argv[1] + "/v1", api_key="any")
except litellm.ContextWindowExceededError:
    print("too long")
"""


def test_litellm_calls_by_each_api_and_knows_a_prompt_that_is_too_long(
    served: tuple[FakeServer, ScriptedRanks],
) -> None:
    server, ranks = served
    python = FOLDER / "python/bin/python"
    if not (python.parent / "litellm").exists():
        pytest.skip("litellm could not be installed here")
    ranks.script = lambda _prompt: _call("patch", {"input": "+a"})
    ran = subprocess.run(
        [str(python), "-c", _LITELLM, server.url], capture_output=True, text=True, timeout=300, check=False
    )
    said = [
        f"{model} {stream} patch {{'input': '+a'}}"
        for model in ("openai/fake", "ollama_chat/fake", "anthropic/fake")
        for stream in (False, True)
    ]
    told = [line for line in ran.stdout.splitlines() if line in said or line == "too long"]
    assert told == [*said, "too long"], ran.stdout + ran.stderr[-2000:]
