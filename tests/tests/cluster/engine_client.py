"""A model behind an engine of another project, through the official clients of three APIs: one shape of answers,
whichever engine made them.

Arguments: base URL, model, a key, the engine's name, then the arguments that it does not honour.
"""

import json
import sys

import anthropic
import openai

base, model, key, engine, *refused = sys.argv[1:]
client = openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=240)
messages = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key=key, max_retries=0, timeout=240)
SYSTEM = "You are a brief assistant."
QUESTION = "What is the capital of France? Answer in one short sentence."
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]

said = client.chat.completions.create(model=model, messages=CHAT, temperature=0, max_tokens=48, logprobs=True, top_logprobs=2)
text, usage = said.choices[0].message.content, said.usage
assert "Paris" in text, text
entries = said.choices[0].logprobs.content
assert "".join(entry.token for entry in entries).startswith(text), entries
assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries), entries
assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

again = client.responses.create(model=model, instructions=SYSTEM, input=QUESTION, temperature=0, max_output_tokens=48)
assert again.output_text == text and again.usage.input_tokens == usage.prompt_tokens, again
assert again.usage.input_tokens_details.cached_tokens > 0, "the second sighting of a prompt must hit"
whole = messages.messages.create(
    model=model,
    system=SYSTEM,
    messages=[{"role": "user", "content": QUESTION}],
    max_tokens=48,
    extra_body={"temperature": 0},
)
assert whole.content[0].text == text, whole
stopped = client.chat.completions.create(model=model, messages=CHAT, temperature=0, max_tokens=48, stop=[" Paris"])
assert stopped.choices[0].finish_reason == "stop" and "Paris" not in stopped.choices[0].message.content, stopped
short = client.chat.completions.create(model=model, messages=CHAT, temperature=0, max_tokens=2)
assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 2, short

schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "country": {"enum": ["France", "Spain"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
formed = client.chat.completions.create(model=model, messages=CHAT, max_tokens=64, temperature=0, response_format=form)
place = json.loads(formed.choices[0].message.content)
assert set(place) == {"city", "country"} and place["country"] in ("France", "Spain"), place

tools = [{"type": "function", "function": {"name": "get_city", "description": "Finds a city.", "parameters": schema}}]
free = client.chat.completions.create(model=model, messages=CHAT, tools=tools, max_tokens=32, temperature=0)
assert free.choices[0].finish_reason in ("stop", "length", "tool_calls"), free
for extra, field in (
    ({"tools": tools, "tool_choice": "required"}, "tools"),
    ({"extra_body": {"grammar": {"syntax": "regex", "definition": "[a-z]+"}}}, "grammar"),
    ({"extra_body": {"guided_choice": ["yes", "no"]}}, "guided_choice"),
):
    if field not in refused:
        served = client.chat.completions.create(model=model, messages=CHAT, max_tokens=16, **extra).choices[0].message
        assert served.content or served.tool_calls, (field, served)
        continue
    try:
        client.chat.completions.create(model=model, messages=CHAT, max_tokens=16, **extra)
        raise AssertionError(f"{field} was accepted")
    except openai.BadRequestError as error:
        assert field in error.message and engine in error.message, error.body
print(text, place)
