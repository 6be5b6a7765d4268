"""OpenAI's Responses API through the official client, against chats with the same messages and seeds.

Arguments: base URL, model, a key, a key with one request per minute.
"""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field

base, model, key, few = sys.argv[1:5]
client = openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=240)
SYSTEM = "You are a brief assistant."
QUESTION = "What is the capital of France? Answer in one short sentence."
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def chat(**extra):
    return client.chat.completions.create(model=model, messages=CHAT, max_tokens=48, **extra).choices[0]


for draw in ({"temperature": 0}, {"temperature": 0.9, "extra_body": {"seed": 7}}):
    said = chat(**draw)
    ask = {"model": model, "instructions": SYSTEM, "input": QUESTION, "max_output_tokens": 48, **draw}
    whole = client.responses.create(**ask)
    assert whole.output_text == said.message.content, (whole.output_text, said.message.content)
    assert whole.status == ("completed" if said.finish_reason == "stop" else "incomplete"), whole.status
    assert whole.store is True and whole.object == "response" and whole.id.startswith("resp_")
    usage = whole.usage
    assert usage.input_tokens_details.cached_tokens > 0, "the second sighting of a prompt must hit"
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > usage.input_tokens > 0
    assert usage.output_tokens_details.reasoning_tokens == 0
    pieces, kinds, last = "", [], -1
    for event in client.responses.create(stream=True, **ask):
        assert event.sequence_number == last + 1, event
        last = event.sequence_number
        kinds.append(event.type)
        pieces += event.delta if event.type == "response.output_text.delta" else ""
    assert pieces == whole.output_text, "streamed and whole answers differ"
    assert kinds.count("response.output_text.delta") > 1, "the answer did not come piece by piece"
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ], kinds
    assert kinds[-1] == f"response.{whole.status}", kinds
print(whole.output_text)

# The client's own function to collect a stream.
with client.responses.stream(model=model, instructions=SYSTEM, input=QUESTION, temperature=0) as stream:
    snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    final = stream.get_final_response()
assert final.status == "completed" and final.output_text == snapshots[-1] and "Paris" in final.output_text


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=130)
    mood: Literal["happy", "sad"]


parsed = client.responses.parse(
    model=model, input="Tell me about Ada, who is 36 and happy.", text_format=Person, temperature=0, max_output_tokens=400
)
assert isinstance(parsed.output_parsed, Person), parsed
beside = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Tell me about Ada, who is 36 and happy."}],
    response_format=Person,
    temperature=0,
    max_tokens=400,
)
assert beside.choices[0].message.content == parsed.output_text

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": "get_weather", "description": "Tells the weather.", "parameters": WEATHER}]
ask = {"model": model, "tools": TOOLS, "temperature": 0, "max_output_tokens": 200}
history = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
for choice in ("required", {"type": "function", "name": "get_weather"}):
    forced = client.responses.create(input=history, tool_choice=choice, parallel_tool_calls=False, **ask)
    (call,) = forced.output
    assert call.type == "function_call" and call.name == "get_weather" and call.call_id, call
    assert set(json.loads(call.arguments)) == {"city", "unit"}, call
    events = list(client.responses.create(input=history, tool_choice=choice, parallel_tool_calls=False, stream=True, **ask))
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == call.arguments and len(parts) > 2, "arguments come piece by piece"
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments]
    assert events[-1].response.output[0].name == "get_weather"

# Sends the tool's result with the call as received.
history += [item.to_dict() for item in forced.output]
history.append({"type": "function_call_output", "call_id": call.call_id, "output": "It is 21 degrees."})
after = client.responses.create(input=history, tool_choice="none", **ask)
assert after.output_text and all(item.type == "message" for item in after.output), after

# Continues from the kept response, and reads and deletes it.
result = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is 21 degrees."}]
continued = client.responses.create(input=result, previous_response_id=forced.id, tool_choice="none", **ask)
assert continued.output_text == after.output_text and continued.previous_response_id == forced.id, continued
assert client.responses.retrieve(continued.id).output_text == continued.output_text
kinds = [item.type for item in client.responses.input_items.list(continued.id, order="asc")]
assert kinds == ["message", "function_call", "function_call_output"], kinds
client.responses.delete(forced.id)

for wrong, error_class, code, param in [
    ({"model": "no-such-model"}, openai.NotFoundError, "model_not_found", "model"),
    ({"temperature": -1}, openai.BadRequestError, "invalid_field", "temperature"),
    ({"previous_response_id": "resp_none"}, openai.BadRequestError, "invalid_field", "previous_response_id"),
    ({"conversation": "conv_1"}, openai.BadRequestError, "invalid_field", "conversation"),
    ({"background": True}, openai.BadRequestError, "invalid_field", "background"),
    (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        openai.BadRequestError,
        "invalid_field",
        "tools[0].type",
    ),
    ({"max_output_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", None),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "strange"}}}},
        openai.BadRequestError,
        "invalid_field",
        "text.format.schema",
    ),
]:
    try:
        client.responses.create(**{"model": model, "input": QUESTION, **wrong})
        raise AssertionError(f"accepted: {wrong}")
    except error_class as error:
        assert (error.code, error.param) == (code, param), (error.body, wrong)
for bad, error_class, code in [("kv-no", openai.AuthenticationError, "invalid_api_key"), (few, openai.RateLimitError, "rate_limited")]:
    other = client.with_options(api_key=bad)
    try:
        for _ in range(2):
            other.responses.create(model=model, input=QUESTION, max_output_tokens=1)
        raise AssertionError(f"accepted: {code}")
    except error_class as error:
        assert error.code == code, error.body
