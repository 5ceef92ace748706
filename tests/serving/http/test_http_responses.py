"""`/v1/responses` through the OpenAI client; every object and event is held to the client's own types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.requests.response_schemas import messages_of
from tests.support.models.tool_templates import HERMES
from tests.support.servers.scripted_engine import Scripted, ScriptedRanks, scripted_server

EVENTS: Any = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'


def asked(running: Scripted, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "input": "hi", "temperature": 0, **fields}
    return httpx.post(f"{running[0].url}/v1/responses", json=body, timeout=60)


def events_of(response: httpx.Response) -> list[Any]:
    """Each validated; their numbers count up."""
    raw_events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [raw_event["sequence_number"] for raw_event in raw_events] == list(range(len(raw_events)))
    return [EVENTS.validate_python(raw_event) for raw_event in raw_events]


def test_a_text(running: Scripted, ranks: ScriptedRanks, api: openai.OpenAI) -> None:
    ranks.script = lambda _prompt: "Paris is it."
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}}
    whole = Response.model_validate(asked(running, **fields).json())
    assert (whole.output_text, whole.status, whole.metadata) == ("Paris is it.", "completed", {"a": "b"})
    assert whole.usage is not None
    assert whole.usage.output_tokens == len("Paris is it.") + 1

    events = events_of(asked(running, stream=True, **fields))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == "Paris is it."
    )
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Paris is it."
    with api.responses.stream(model="fake", input="hi", temperature=0) as stream:
        assert stream.get_final_response().output_text == "Paris is it."


def test_thoughts_text_and_calls_are_items(
    running: Scripted, ranks: ScriptedRanks, api: openai.OpenAI
) -> None:
    ranks.script = lambda _prompt: f"<think>\nHm.\n</think>\n\nI add.\n{CALL}"
    whole = Response.model_validate(asked(running, tools=TOOLS).json())
    assert [output.type for output in whole.output] == ["reasoning", "message", "function_call"]
    events = events_of(asked(running, tools=TOOLS, stream=True))
    streamed = events[-1].response
    assert [output.type for output in streamed.output] == [output.type for output in whole.output]
    assert (streamed.output[2].name, json.loads(streamed.output[2].arguments)) == ("add", {"n": 1})
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm."
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1, 2]
    answer = api.responses.create(model="fake", input="hi", tools=TOOLS, temperature=0)
    assert answer.output[2].type == "function_call"


def test_an_answer_cut_short_is_incomplete(running: Scripted, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: "a long answer"
    whole = Response.model_validate(asked(running, max_output_tokens=4).json())
    assert (whole.status, whole.output_text) == ("incomplete", "a lo")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert events_of(asked(running, max_output_tokens=4, stream=True))[-1].type == "response.incomplete"


def test_a_conversation_goes_on_by_the_id_of_its_last_response(
    running: Scripted, ranks: ScriptedRanks
) -> None:
    seen: list[str] = []
    answers = {0: CALL, 1: "It is 2.", 2: "Yes."}
    ranks.script = lambda prompt: (seen.append(prompt), answers[prompt.count("<|im_start|>assistant\n") - 1])[
        1
    ]
    first = asked(running, tools=TOOLS, instructions="Once only.").json()
    (call,) = first["output"]
    result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "2"}]
    second = asked(running, tools=TOOLS, input=result, previous_response_id=first["id"], stream=True)
    second_id = events_of(second)[-1].response.id
    third = asked(running, input="sure?", previous_response_id=second_id).json()
    assert third["output"][0]["content"][0]["text"] == "Yes."
    assert "Once only." in seen[0]
    assert "Once only." not in seen[-1]
    assert seen[-1].count("<tool_call>") == 1
    assert "<|im_start|>tool\n2" in seen[-1]
    assert "It is 2." in seen[-1]


def test_what_is_not_stored_is_not_there_and_cannot_be_continued(
    running: Scripted, ranks: ScriptedRanks
) -> None:
    ranks.script = lambda _prompt: "a"
    left_out = asked(running, store=False).json()["id"]
    for unknown in (left_out, "resp_none"):
        answer = asked(running, previous_response_id=unknown)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "previous_response_not_found"
    for method in ("GET", "DELETE"):
        refusal = httpx.request(method, f"{running[0].url}/v1/responses/{left_out}")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (404, "response_not_found")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_call_can_be_required(running: Scripted, ranks: ScriptedRanks, choice: Any) -> None:
    ranks.script = lambda _prompt: "no"
    said = asked(running, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).json()
    assert [output["type"] for output in said["output"]] == ["function_call"]


def test_a_schema_is_kept(running: Scripted, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: "no"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    wanted = {
        "format": {"type": "json_schema", "name": "x", "schema": schema | {"additionalProperties": False}}
    }
    whole = Response.model_validate(asked(running, text=wanted).json())
    assert json.loads(whole.output_text) == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "usr", "content": "a"}]}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": None}, "input"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
    ],
)
def test_what_cannot_be_is_refused(running: Scripted, fields: dict[str, Any], param: str) -> None:
    answer = asked(running, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not answer.json()["error"]["message"].startswith("messages")


def test_items_of_one_answer_are_one_message() -> None:
    from phasewise.serving.http.requests.response_schemas import ResponsesRequest

    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "message", "role": "assistant", "content": "c"},
        {"type": "message", "role": "assistant", "content": "d"},
    ]
    body = ResponsesRequest.model_validate_json(json.dumps({"model": "m", "input": items}))
    chat = messages_of(body.input)
    assert [turn["role"] for turn in chat] == ["user", "assistant", "tool", "assistant", "assistant"]
    assert (chat[1]["content"], chat[1]["reasoning_content"], len(chat[1]["tool_calls"])) == ("b", "hm", 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_can_be_read_again_and_deleted(
    running: Scripted, ranks: ScriptedRanks, api: openai.OpenAI, stream: bool
) -> None:
    ranks.script = lambda _prompt: "Paris is it."
    answer = asked(running, stream=stream)
    sent = events_of(answer)[-1].response if stream else Response.model_validate(answer.json())

    assert api.responses.retrieve(sent.id) == sent
    assert httpx.delete(f"{running[0].url}/v1/responses/{sent.id}").json() == {
        "id": sent.id,
        "object": "response",
        "deleted": True,
    }
    for again in (api.responses.retrieve, api.responses.delete):
        with pytest.raises(openai.NotFoundError, match=sent.id):
            again(sent.id)
    continued = asked(running, previous_response_id=sent.id)
    assert continued.json()["error"]["code"] == "previous_response_not_found"


def test_no_key_reads_or_deletes_the_responses_of_another() -> None:
    keys = ("first", "second")
    with scripted_server(HERMES, "<|im_start|>assistant\n", limits=HttpLimits(api_keys=keys)) as (
        server,
        ranks,
    ):
        ranks.script = lambda _prompt: "mine"

        def send(key: str, method: str, path: str = "", **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.request(
                method, f"{server.url}/v1/responses{path}", headers=headers, json=body or None, timeout=60
            )

        response = send("first", "POST", model="fake", input="hi").json()
        for method in ("GET", "DELETE"):
            assert send("second", method, f"/{response['id']}").status_code == 404
            assert httpx.request(method, f"{server.url}/v1/responses/{response['id']}").status_code == 401
        assert send("first", "GET", f"/{response['id']}").json() == response
        assert send("first", "DELETE", f"/{response['id']}").status_code == 200
        server.wait_until_idle()
