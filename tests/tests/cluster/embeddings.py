"""Embeds texts through the official client and compares with the vectors of the model's own library."""

import json
import math
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="not-checked-on-loopback", max_retries=0, timeout=120)
model = sys.argv[2]
with open(sys.argv[3], encoding="utf-8") as file:
    items = json.load(file)["items"]
texts = [item["text"] for item in items]


def worst(found, expected):
    assert len(found) == len(expected), (len(found), len(expected))
    return max(abs(a - b) for a, b in zip(found, expected))


# The client requests base64 by default and decodes it.
answer = client.embeddings.create(model=model, input=texts)
assert answer.model == model and answer.object == "list"
assert [entry.index for entry in answer.data] == list(range(len(items)))
assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(item["ids"]) for item in items)
for item, entry in zip(items, answer.data):
    difference = worst(entry.embedding, item["embedding"])
    print(f"{item['text'][:40]!r}: {difference:.2e}")
    assert difference <= 1e-4, item["text"]

# A text's vector is the same alone or in a batch, from text or tokens, in base64 or as numbers.
for item, entry in zip(items, answer.data):
    for given in (item["text"], item["ids"]):
        alone = client.embeddings.create(model=model, input=given, encoding_format="float")
        assert alone.data[0].embedding == entry.embedding or worst(alone.data[0].embedding, entry.embedding) < 1e-7
many = client.embeddings.create(model=model, input=texts * 20)
for index, entry in enumerate(many.data):
    assert entry.embedding == answer.data[index % len(items)].embedding, index

short = client.embeddings.create(model=model, input=texts[0], dimensions=64).data[0].embedding
assert len(short) == 64 and abs(math.hypot(*short) - 1) < 1e-6
scale = math.hypot(*answer.data[0].embedding[:64])
assert worst(short, [x / scale for x in answer.data[0].embedding[:64]]) < 1e-6

for wrong, code, field in [
    ({"input": "word " * 600}, "context_length_exceeded", None),
    ({"input": "a", "dimensions": 1000}, "invalid_field", "dimensions"),
    ({"input": [[1], []]}, "invalid_field", "input[1]"),
]:
    try:
        client.embeddings.create(model=model, **wrong)
        raise AssertionError(f"accepted: {str(wrong)[:60]}")
    except openai.BadRequestError as error:
        assert (error.code, error.param) == (code, field), error.body

try:
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
    raise AssertionError("an encoder was let chat")
except openai.BadRequestError as error:
    assert error.param == "model" and "/v1/embeddings" in error.message, error.body
