"""Anthropic's Messages API through its official client, against OpenAI chats with the same messages and
seeds.

Arguments: OpenAI's base URL, model, a key, a key with one request per minute.
"""

import sys
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel, Field

base, model, key, few = sys.argv[1:5]
beside = openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=240)
client = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key=key, max_retries=0, timeout=240)
SYSTEM = "You are a brief assistant."
QUESTION = "What is the capital of France? Answer in one short sentence."
USER = [{"role": "user", "content": QUESTION}]
ask = {"model": model, "system": SYSTEM, "messages": USER, "max_tokens": 48}


def chat(**extra):
    messages = [{"role": "system", "content": SYSTEM}, *USER]
    return beside.chat.completions.create(model=model, messages=messages, max_tokens=48, **extra).choices[0]


for draw in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}):
    said = chat(extra_body=draw)
    whole = client.messages.create(extra_body=draw, **ask)
    (block,) = whole.content
    assert block.type == "text" and block.text == said.message.content, (block, said.message.content)
    assert whole.stop_reason == ("end_turn" if said.finish_reason == "stop" else "max_tokens"), whole
    assert whole.id.startswith("msg_") and whole._request_id == whole.id.removeprefix("msg_")
    assert whole.usage.cache_read_input_tokens > 0, "the second sighting of a prompt must hit"
    counted = client.messages.count_tokens(model=model, system=SYSTEM, messages=USER).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    with client.messages.stream(extra_body=draw, **ask) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == block.text and len(pieces) > 1, "the answer did not come piece by piece"
    assert (final.content[0].text, final.stop_reason) == (block.text, whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in client.messages.create(stream=True, extra_body=draw, **ask)]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == [
        "content_block_stop", "message_delta", "message_stop"
    ], kinds
print(block.text)

cached = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
again = client.messages.create(**{**ask, "system": cached}, extra_body={"temperature": 0})
assert again.content[0].text == chat(temperature=0).message.content
stopped = client.messages.create(stop_sequences=["capital"], extra_body={"temperature": 0}, **ask)
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "capital"), stopped
assert "capital" not in stopped.content[0].text


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=130)
    mood: Literal["happy", "sad"]


parsed = client.messages.parse(
    model=model,
    messages=[{"role": "user", "content": "Tell me about Ada, who is 36 and happy."}],
    output_format=Person,
    max_tokens=400,
    extra_body={"temperature": 0},
)
assert isinstance(parsed.parsed_output, Person), parsed

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"name": "get_weather", "description": "Tells the weather.", "input_schema": WEATHER}]
tools = {"model": model, "tools": TOOLS, "max_tokens": 200, "extra_body": {"temperature": 0}}
history = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
    forced = client.messages.create(messages=history, tool_choice=choice, **tools)
    (call,) = forced.content
    assert forced.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "get_weather", forced
    assert set(call.input) == {"city", "unit"}, call
    with client.messages.stream(messages=history, tool_choice=choice, **tools) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(parts) > 2, "arguments come piece by piece"
    assert (final.content[0].input, final.stop_reason) == (call.input, "tool_use")

# Sends the tool's result with the call as received.
history += [
    {"role": "assistant", "content": forced.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "It is 21 degrees."}]},
]
after = client.messages.create(messages=history, tool_choice={"type": "none"}, **tools)
assert after.content[0].text and after.stop_reason in ("end_turn", "max_tokens"), after
assert client.messages.count_tokens(model=model, messages=history, tools=TOOLS).input_tokens > 50

# The answer continues a last message of the assistant.
begun = [*USER, {"role": "assistant", "content": "The capital of France is"}]
continued = client.messages.create(extra_body={"temperature": 0}, **{**ask, "messages": begun})
assert continued.content[0].text.startswith(" Paris"), continued


@anthropic.beta_tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


# The runner asks for a history on the server, and falls back to sending the whole history.
turns = client.beta.messages.tool_runner(
    model=model,
    max_tokens=60,
    max_iterations=2,
    tools=[weather],
    tool_choice={"type": "tool", "name": "weather"},
    messages=[{"role": "user", "content": "What is the weather in Paris?"}],
)
prompts = [turn.usage.input_tokens + (turn.usage.cache_read_input_tokens or 0) for turn in turns]
assert len(prompts) == 2 and prompts[1] > prompts[0], prompts

for wrong, error_class, kind, code in [
    ({"model": "no-such-model"}, anthropic.NotFoundError, "not_found_error", "model_not_found"),
    ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "invalid_request_error", "invalid_field"),
    ({"max_tokens": 10**6}, anthropic.BadRequestError, "invalid_request_error", "context_length_exceeded"),
    ({"messages": [{"role": "assistant", "content": ""}]}, anthropic.BadRequestError, "invalid_request_error", "invalid_field"),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "invalid_field",
    ),
    (
        {"tools": [{"name": "f", "strict": True, "input_schema": {"type": "strange"}}], "tool_choice": {"type": "any"}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "invalid_field",
    ),
]:
    for stream in (False, True):
        try:
            client.messages.create(**{**ask, **wrong}, stream=stream)
            raise AssertionError(f"accepted: {wrong}")
        except error_class as error:
            assert (error.type, error.body["error"]["code"]) == (kind, code), (error.body, wrong)
            assert error.request_id
for bad, error_class, code in [
    ("kv-no", anthropic.AuthenticationError, "invalid_api_key"),
    (few, anthropic.RateLimitError, "rate_limited"),
]:
    other = client.with_options(api_key=bad)
    try:
        for _ in range(2):
            other.messages.create(**{**ask, "max_tokens": 1})
        raise AssertionError(f"accepted: {code}")
    except error_class as error:
        assert error.body["error"]["code"] == code, error.body
