"""A load generator for OpenAI completion servers: raw sockets in one event loop, the same for every engine.

Prompts are token ids and answers are streamed, so that all engines do the same work. The client shares the
machine with the server, so it does as little as possible: it parses the last event only.
"""
import asyncio
import json
import random
import time
import urllib.request

# Range of ids that are ordinary tokens in every vocabulary of the comparison.
FIRST_ID, LAST_ID = 1000, 40000


class LoadError(Exception):
    """A server returned something other than the requested completion."""


def prompt(length, *seed):
    """Random token ids that depend on the seed alone."""
    draw = random.Random(repr(seed))
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(length)]


def get(url, timeout=10):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


def post_json(url, body, timeout=600):
    """Sends a JSON body and returns the JSON answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def counter(text, name):
    """Sum of a counter's series in a Prometheus text."""
    total = 0.0
    for line in text.splitlines():
        key = line.split("{")[0].split(" ")[0]
        if key == name:
            total += float(line.rsplit(" ", 1)[1])
    return total


async def _body(reader):
    """Pieces of an HTTP/1.1 body, after its status and headers."""
    status = await reader.readline()
    chunked = False
    while (line := await reader.readline()).strip():
        chunked |= line.lower().startswith(b"transfer-encoding:") and b"chunked" in line.lower()
    if b" 200 " not in status:
        rest = await reader.read(2000)
        raise LoadError(f"{status.decode().strip()}: {rest.decode(errors='replace')}")
    if not chunked:
        while piece := await reader.read(65536):
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _complete(connection, request, start):
    reader, writer = connection
    writer.write(request)
    first = last = None
    pending, usage = b"", None
    async for piece in _body(reader):
        now = time.monotonic() - start
        lines = (pending + piece).split(b"\n")
        pending = lines.pop()
        for line in lines:
            if not line.startswith(b"data:") or line.endswith(b"[DONE]") or line.endswith(b"[DONE]\r"):
                continue
            first = first or now
            last = now
            if b'"usage":{' in line or b'"usage": {' in line:
                usage = line
            elif b'"error"' in line:
                raise LoadError(line.decode(errors="replace"))
    writer.close()
    if usage is None:
        raise LoadError("the stream ended without usage")
    return {"first": first, "last": last, "usage": json.loads(usage[5:])["usage"]}


async def _burst(port, requests):
    connections = await asyncio.gather(*[asyncio.open_connection("127.0.0.1", port, limit=2**20) for _ in requests])
    start = time.monotonic()
    return await asyncio.gather(*[_complete(c, r, start) for c, r in zip(connections, requests)])


def burst(port, model, prompts, out, timeout):
    """Sends all prompts at once. Returns the wall time, the times to the first token, and the prompt tokens
    that were sent and not found in a cache.
    """
    requests = []
    for ids in prompts:
        body = {"model": model, "prompt": ids, "max_tokens": out, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = (f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n")
        requests.append(head.encode() + data)

    async def limited():
        return await asyncio.wait_for(_burst(port, requests), timeout)

    answers = asyncio.run(limited())
    for answer in answers:
        if answer["usage"]["completion_tokens"] != out:
            raise LoadError(f"{out} tokens were asked for: {answer['usage']}")
    cached = [(answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for answer in answers]
    firsts = sorted(answer["first"] for answer in answers)
    return {
        "wall": max(answer["last"] for answer in answers),
        "ttft_first": firsts[0], "ttft_p50": firsts[len(firsts) // 2], "ttft_max": firsts[-1],
        "sent": sum(len(ids) for ids in prompts),
        "uncached": sum(len(ids) for ids in prompts) - sum(cached),
    }
