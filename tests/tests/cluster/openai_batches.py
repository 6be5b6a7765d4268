"""Runs batches through the official client: files, states, results, errors, cancellation.

Arguments: base URL, model.
"""

import io
import json
import sys
import time

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="not-checked-on-loopback", max_retries=0, timeout=120)
model = sys.argv[2]
CHAT = "/v1/chat/completions"


def line(custom_id, **more):
    body = {"model": model, "messages": [{"role": "user", "content": f"Count to {custom_id}."}], "max_tokens": 4}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {**body, **more}}) + "\n"


def upload(text):
    return client.files.create(file=("requests.jsonl", io.BytesIO(text.encode())), purpose="batch")


def ended(batch):
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(file_id):
    return {read["custom_id"]: read for read in map(json.loads, client.files.content(file_id).text.splitlines())}


file = upload("".join(line(str(n)) for n in range(8)) + line("hot", temperature=-1) + line("stream", stream=True))
assert (file.object, file.purpose, file.status, file.filename) == ("file", "batch", "processed", "requests.jsonl")
assert client.files.retrieve(file.id) == file
assert [listed.id for listed in client.files.list(purpose="batch")] == [file.id]

batch = client.batches.create(
    input_file_id=file.id,
    endpoint=CHAT,
    completion_window="24h",
    metadata={"night": "1"},
    output_expires_after={"anchor": "created_at", "seconds": 3600},
)
assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"night": "1"})
done = ended(batch)
assert done.status == "completed", done
assert done.request_counts.model_dump() == {"total": 10, "completed": 8, "failed": 2}, done
good, bad = results(done.output_file_id), results(done.error_file_id)
assert sorted(good) == [str(n) for n in range(8)] and sorted(bad) == ["hot", "stream"]
for read in good.values():
    answer = openai.types.chat.ChatCompletion.model_validate(read["response"]["body"])
    assert read["response"]["status_code"] == 200 and answer.choices[0].message.content, read
assert bad["hot"]["response"]["body"]["error"]["param"] == "temperature", bad
output = client.files.retrieve(done.output_file_id)
assert output.purpose == "batch_output" and output.expires_at - output.created_at == 3600
assert [listed.id for listed in client.batches.list(limit=1)] == [batch.id]

failed = ended(client.batches.create(input_file_id=upload(line("a") + line("a")).id, endpoint=CHAT, completion_window="24h"))
assert failed.status == "failed" and failed.errors.data[0].line == 2, failed
assert failed.errors.data[0].code == "duplicate_custom_id", failed

many = upload("".join(line(str(n), max_tokens=200, ignore_eos=True) for n in range(200)))
long = client.batches.create(input_file_id=many.id, endpoint=CHAT, completion_window="24h")
assert client.batches.cancel(long.id).status == "cancelling"
assert ended(long).status == "cancelled"

for call, error in [
    (lambda: client.files.create(file=b"x", purpose="fine-tune"), openai.BadRequestError),
    (lambda: client.files.retrieve("file-unknown"), openai.NotFoundError),
    (lambda: client.batches.cancel(long.id), openai.ConflictError),
    (lambda: client.batches.create(input_file_id=file.id, endpoint="/v1/x", completion_window="24h"), openai.BadRequestError),
]:
    try:
        call()
    except error:
        continue
    raise AssertionError(f"no {error.__name__}")

assert client.files.delete(file.id).deleted
