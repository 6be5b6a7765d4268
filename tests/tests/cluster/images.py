"""Pictures through the official clients of OpenAI and Anthropic.

Arguments: OpenAI's base URL, model, a PNG file, the greedy answer to it, its prompt's tokens, its rows.
"""

import base64
import io
import pathlib
import sys
import zlib

import anthropic
import openai

base, model, path, expected, prompt_tokens, rows = sys.argv[1:7]
picture = pathlib.Path(path).read_bytes()
client = openai.OpenAI(base_url=base, api_key="any", max_retries=0, timeout=240)
other = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key="any", max_retries=0, timeout=240)
QUESTION = "Describe this image."
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def encoded(data):
    return base64.b64encode(data).decode()


def url(data, kind="image/png"):
    return f"data:{kind};base64,{encoded(data)}"


def chat(data, **fields):
    parts = [{"type": "image_url", "image_url": {"url": url(data)}}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": parts}]
    return client.chat.completions.create(model=model, messages=messages, max_tokens=32, **GREEDY, **fields)


said = chat(picture)
assert said.choices[0].message.content == expected, (said.choices[0].message.content, expected)
assert said.usage.prompt_tokens == int(prompt_tokens), said.usage
assert said.usage.prompt_tokens_details.image_tokens == int(rows), said.usage
pieces = [chunk.choices[0].delta.content or "" for chunk in chat(picture, stream=True) if chunk.choices]
assert "".join(pieces) == expected, pieces

parts = [{"type": "input_image", "image_url": url(picture), "detail": "auto"}, {"type": "input_text", "text": QUESTION}]
answer = client.responses.create(model=model, input=[{"role": "user", "content": parts}], max_output_tokens=32, **GREEDY)
assert answer.output_text == expected, (answer.output_text, expected)

source = {"type": "base64", "media_type": "image/png", "data": encoded(picture)}
blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
answer = other.messages.create(
    model=model, max_tokens=32, messages=[{"role": "user", "content": blocks}], extra_body={"temperature": 0, "ignore_eos": True}
)
assert answer.content[0].text == expected, (answer.content[0].text, expected)


def bomb(side):
    """A small PNG of many pixels."""
    data = zlib.compress(bytes(side * 3 + 1) * 64, 9)
    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    chunks = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    file.seek(0, io.SEEK_END)
    for kind, body in chunks:
        file.write(len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big"))
    return file.getvalue()


FIELD = "messages[0].content[0].image_url"
for data, named in [
    (picture[: len(picture) // 2], "damaged"),
    (b"", "PNG"),
    (b"GIF89a", "GIF"),
    (b"no image at all", "PNG, JPEG, WebP or GIF"),
    (bomb(60_000), "60000 x 60000"),
    (bomb(12_000), "MiB to decode"),
]:
    try:
        chat(data)
    except openai.BadRequestError as error:
        assert named in error.message and FIELD in error.message, error.message
        assert error.param and error.param.startswith(FIELD), error.param
    else:
        raise AssertionError(f"{named}: not refused")
print(expected)
