"""Requests answers for many JSON schemas of increasing difficulty and checks each with an independent
validator.

Arguments: base URL, model, number of schemas, number of parallel requests. The last line lists the schemas.
"""

import concurrent.futures
import json
import random
import sys

import jsonschema
import openai

base, model, count, at_once = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = openai.OpenAI(base_url=base, api_key="not-checked-on-loopback", max_retries=0, timeout=240)


def string(rng):
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,6}$", "^[A-Z][0-9]{1,4}$", "^(yes|no|maybe)$"])}
    if kind == 1:
        return {"type": "string", "format": rng.choice(["uuid", "ipv4"])}
    low = rng.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 12)}


def number(rng):
    low = rng.randrange(-1000, 1000)
    if rng.random() < 0.5:
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 5000)}
    return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randrange(2, 60)}


def leaf(rng):
    make = rng.choice(
        [
            string,
            number,
            lambda rng: {"type": "boolean"},
            lambda rng: {"type": "null"},
            lambda rng: {"enum": rng.sample(["red", 7, None, True, "é😀", "a\"b", "", [1], {"k": 2}], rng.randrange(1, 6))},
            lambda rng: {"const": rng.choice(["x y", 42, {"deep": [1, "two"]}])},
            lambda rng: {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        ]
    )
    return make(rng)


def schema(rng, depth):
    """A random schema of `depth` levels. Each level may refer to a definition of the root."""
    if depth == 0:
        return {"$ref": "#/$defs/shared"} if rng.random() < 0.15 else leaf(rng)
    kind = rng.randrange(5)
    if kind == 0:
        low = rng.randrange(3)
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(1, 3)}
    if kind == 1:
        return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}
    if kind == 2:
        first = [schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    names = rng.sample(["id", "name", "kind", "größe", "list of", "a.b", "next", "$x"], rng.randrange(1, 2 + depth))
    properties = {name: schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def bytes_of(made):
    """Maximum length of an answer in bytes. Random models write the longest answers."""
    if "$ref" in made or "pattern" in made or "format" in made:
        return 40
    if "enum" in made or "const" in made:
        return max(len(json.dumps(value, ensure_ascii=False).encode()) for value in made.get("enum", [made.get("const")]))
    if "anyOf" in made:
        return max(map(bytes_of, made["anyOf"]))
    if "properties" in made:
        return 2 + sum(len(name.encode()) + 6 + bytes_of(part) for name, part in made["properties"].items())
    if "prefixItems" in made:
        return 2 + sum(2 + bytes_of(part) for part in made["prefixItems"])
    if "items" in made:
        return 2 + made["maxItems"] * (2 + bytes_of(made["items"]))
    # A character has several bytes or is an escape.
    return 2 + 6 * made["maxLength"] if "maxLength" in made else 6


def whole(number):
    """A schema whose answers fit the context of a small model. Its depth increases with its number."""
    for attempt in range(1000):
        rng = random.Random(number * 1000 + attempt)
        made = {"$defs": {"shared": leaf(rng)}, "title": f"schema {number}", **schema(rng, 1 + number * 4 // count)}
        if bytes_of(made) <= 440:
            return made
    raise AssertionError(f"schema {number} is never small enough")


def ask(number):
    made = whole(number)
    jsonschema.Draft202012Validator.check_schema(made)
    format = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": made}}
    extra = {"temperature": 0} if number % 3 == 0 else {"temperature": 1, "seed": number}
    answer = client.completions.create(
        model=model, prompt=f"{number}: ", max_tokens=480, extra_body={"response_format": format}, **extra
    )
    choice = answer.choices[0]
    if choice.finish_reason == "length":
        return number, "cut", made, choice.text
    value = json.loads(choice.text)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(made, format_checker=checker).validate(value)
    return number, "valid", made, choice.text


with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
    told = list(pool.map(ask, range(count)))
cut = [(number, made, text) for number, outcome, made, text in told if outcome == "cut"]
print(f"{count - len(cut)} of {count} schemas answered and valid, {len(cut)} cut off by their length")
for number, _, made, text in told[:: max(1, count // 8)]:
    print(number, json.dumps(made)[:160], "->", text[:160])
assert not cut, cut[:3]
print(json.dumps([made for _, _, made, _ in told]))
