#!/usr/bin/env python3
"""Sends the requests of an arrival log (`kvasir plan --fleet .. --save-traffic LOG`) to a cluster at their times.

Prompts are random token ids, so no prefix is cached. Prints requests, refusals and seconds to the first token of each
model as JSON, in the form of `kvasir plan --json`.
"""

import argparse
import http.client
import json
import random
import threading
import time


def percentiles(values):
    values = sorted(values)
    rank = lambda share: values[max(0, -(-int(share * len(values) * 1000) // 1000) - 1)] if values else 0.0
    mean = sum(values) / len(values) if values else 0.0
    return {"mean": mean, "p50": rank(0.5), "p95": rank(0.95), "p99": rank(0.99)}


def ask(address, line, seed, results):
    ids = random.Random(seed)
    body = {
        "model": line["model"],
        "prompt": [ids.randrange(1000, 20000) for _ in range(line["prompt_tokens"])],
        "max_tokens": line["output_tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    begun, ttft, status = time.monotonic(), None, 0
    try:
        connection = http.client.HTTPConnection(address, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        status = answer.status
        for row in answer:
            if row.startswith(b"data: {"):
                data = json.loads(row[6:])
                if "error" in data:
                    status = 500
                elif ttft is None:
                    ttft = time.monotonic() - begun
    except OSError as error:
        print(f"{line['model']}: {error}", flush=True)
    results.append((line["model"], status, ttft, begun))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", default="127.0.0.1:8080")
    parser.add_argument("--log", required=True)
    arguments = parser.parse_args()
    with open(arguments.log) as log:
        lines = [json.loads(line) for line in log]
    results, threads, start = [], [], time.monotonic()
    for seed, line in enumerate(lines):
        time.sleep(max(0.0, start + line["t"] - time.monotonic()))
        thread = threading.Thread(target=ask, args=(arguments.http, line, seed, results))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    answered = [result for result in results if result[1] == 200 and result[2] is not None]
    models = {}
    for model in sorted({result[0] for result in results}):
        ttfts = [result[2] for result in answered if result[0] == model]
        sent = sum(result[0] == model for result in results)
        models[model] = {"requests": sent, "refused": sent - len(ttfts), "ttft": percentiles(ttfts)}
    all_ttfts = percentiles([result[2] for result in answered])
    print(json.dumps({"seconds": time.monotonic() - start, "ttft": all_ttfts, "models": models}, indent=1))


main()
