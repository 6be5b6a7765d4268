"""Uses a cluster through the official client. Every assertion is a behaviour that users rely on.

Arguments: base URL, model, then the arguments of requests that the model's engine does not honour: they must be refused.
"""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="not-checked-on-loopback", max_retries=0, timeout=120)
model = sys.argv[2]
refused = set(sys.argv[3:])

assert [entry.id for entry in client.models.list()] == [model]

question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
stream = client.chat.completions.create(
    model=model,
    messages=question,
    temperature=0,
    max_tokens=48,
    stream=True,
    stream_options={"include_usage": True},
)
text, usage, reasons, deltas = "", None, [], 0
for chunk in stream:
    usage = chunk.usage or usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        deltas += bool(choice.delta.content)
        reasons += [choice.finish_reason] if choice.finish_reason else []
print(text)
assert "Paris" in text, text
assert deltas > 3, "the answer did not come piece by piece"
assert reasons in (["stop"], ["length"]), reasons
assert usage.prompt_tokens > 0 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

whole = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=48)
assert whole.choices[0].message.content == text, "streamed and whole answers differ"
assert whole.usage.prompt_tokens_details.cached_tokens > 0, "the second sighting of a prompt must hit"

story = {"model": model, "prompt": "Once upon a time", "temperature": 0.9, "max_tokens": 16, "n": 2}
if "seed" in refused:
    assert len(client.completions.create(**story).choices) == 2
else:
    seeded = [client.completions.create(seed=7, **story) for _ in range(2)]
    assert [c.text for c in seeded[0].choices] == [c.text for c in seeded[1].choices], "a seed must replay"
values = {"seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 2, "stop_token_ids": [2]}
for name, value in values.items():
    ask = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "extra_body": {name: value}}
    try:
        client.completions.create(**ask)
        assert name not in refused, f"{name} was accepted"
    except openai.BadRequestError as error:
        assert name in refused and name in error.message, error.body
        assert error.code == "invalid_field", error.body

ranked = client.completions.create(model=model, prompt="Two plus two is", temperature=0, max_tokens=4, logprobs=3)
assert len(ranked.choices[0].logprobs.token_logprobs) == ranked.usage.completion_tokens

try:
    client.chat.completions.create(model="no-such-model", messages=question)
    raise AssertionError("an unknown model was accepted")
except openai.NotFoundError as error:
    assert error.code == "model_not_found", error.body

try:
    client.chat.completions.create(model=model, messages=question, temperature=-1)
    raise AssertionError("a negative temperature was accepted")
except openai.BadRequestError as error:
    assert error.code == "invalid_field" and "temperature" in error.message, error.body
