"""Tool calls through the official client: whole and streamed, required, named, and followed by their results.

Arguments: base URL, model; then "seed" and "strict" if the model's engine does not honour these, and "pattern" if it
refuses an invalid pattern.
"""

import json
import sys

import jsonschema
import openai

base, model, *refused = sys.argv[1:]
seeds = [] if "seed" in refused else [{"seed": seed} for seed in range(1, 6)]
client = openai.OpenAI(base_url=base, api_key="not-checked-on-loopback", max_retries=0, timeout=240)

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/zone"}},
    "required": ["zone"],
    "additionalProperties": False,
    "$defs": {"zone": {"enum": ["UTC", "CET"]}},
}
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Tells the {name[4:]}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CHAT = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
COMMON = {"model": model, "tools": TOOLS, "max_tokens": 400}


def check(name, arguments):
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def streamed(**extra):
    """Returns the calls and the text of a stream, collected as clients do it, and its finish reasons."""
    calls, text, reasons = {}, "", []
    for chunk in client.chat.completions.create(stream=True, messages=CHAT, **{**COMMON, **extra}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": None, "name": None, "arguments": "", "parts": 0})
                if part.id:
                    assert call["id"] is None and part.type == "function", part
                    call["id"], call["name"] = part.id, part.function.name
                call["arguments"] += part.function.arguments or ""
                call["parts"] += 1
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return calls, text, reasons


for draw in [{"temperature": 0}, *({"temperature": 1, **seed} for seed in seeds)]:
    extra = {"tool_choice": "required", **draw}
    whole = client.chat.completions.create(messages=CHAT, parallel_tool_calls=False, **COMMON, **extra).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
    (call,) = whole.message.tool_calls
    check(call.function.name, call.function.arguments)
    calls, text, reasons = streamed(parallel_tool_calls=False, **extra)
    assert reasons == ["tool_calls"] and text == "" and list(calls) == [0], (calls, text, reasons)
    assert (calls[0]["name"], calls[0]["arguments"]) == (call.function.name, call.function.arguments)
    assert calls[0]["parts"] > 2 and calls[0]["id"], "arguments come piece by piece"

named = {"tool_choice": {"type": "function", "function": {"name": "get_time"}}, "temperature": 1}
answers = client.chat.completions.create(messages=CHAT, n=3, **COMMON, **named, **(seeds[-1] if seeds else {}))
for choice in answers.choices:
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_time"
    check("get_time", call.function.arguments)
assert len({choice.message.tool_calls[0].id for choice in answers.choices}) == 3

# Sends the tool's result. The model answers in words, with or without tools.
call = answers.choices[0].message.tool_calls[0]
chat = [*CHAT, answers.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "It is noon."}]
after = client.chat.completions.create(messages=chat, tool_choice="none", temperature=0, **COMMON).choices[0]
assert after.message.content and not after.message.tool_calls, after
client.chat.completions.create(messages=chat, temperature=0, **COMMON)

for body, field in [
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "strange"}}}]}, "tools[0].function.parameters"),
    # The worker finds this one.
    ({"tools": [*COMMON["tools"], {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"x": {"pattern": "("}}}}}]},
     f"tools[{len(COMMON['tools'])}]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "strange"}}}, "tools": []},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"not": {"type": "null"}}}}, "tools": []},
     "response_format.json_schema.schema"),
    ({"extra_body": {"bad_words": ["x"]}}, "bad_words"),
]:
    if field.startswith("tools[") and field.endswith("]") and "strict" in refused:
        field = "tools.function.strict"
    try:
        client.chat.completions.create(messages=CHAT, stream=True, **{**COMMON, **body})
        raise AssertionError(f"accepted: {body}")
    except openai.BadRequestError as error:
        assert error.param == field, (error.param, error.message)

# Without strict, unsupported keywords are ignored and the others hold.
patterns = [] if "pattern" in refused else [{"type": "string", "pattern": "("}]
for x in [*patterns, {"type": "strange"}, {"type": "array", "uniqueItems": True}, {"$ref": "#/$defs/none"}]:
    loose = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}, "x": x}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": loose}}
    (call,) = client.chat.completions.create(messages=CHAT, **{**COMMON, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}).choices[0].message.tool_calls
    assert call.function.arguments.startswith('{"n": '), call
none = {"type": "function", "function": {"name": "f"}}
(call,) = client.chat.completions.create(messages=CHAT, **{**COMMON, "tools": [none], "tool_choice": "required", "parallel_tool_calls": False}).choices[0].message.tool_calls
assert call.function.arguments == "{}", call

grammar = client.completions.create(
    model=model, prompt="Dial", max_tokens=20, extra_body={"grammar": {"syntax": "regex", "definition": "[0-9]{3}-[0-9]{4}"}}
)
assert len(grammar.choices[0].text) == 8 and grammar.choices[0].text[3] == "-", grammar
print("calls of tools are valid:", answers.choices[0].message.tool_calls[0].function.arguments)
