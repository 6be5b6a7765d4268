#!/usr/bin/env python3
"""Measures how often greedy answers change with the order of the documents in the prompt.

    bench/rag/greedy.py --questions 100

Sends each question twice to one `kvasir up`: with the documents in rank order, and with the `documents`
field, whose documents the coordinator orders by popularity. Before that, all questions are sent once, so that
popularity has settled. The answers have `--out` tokens. Prints the share of answers that differ, and the
share that differ in their first token. Prints the same shares for prompts that differ only in the added
sentence with the ranks, so that the effects of order and sentence are separate.
"""
import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from load import post_json  # noqa: E402
from replay import Cluster, model_id  # noqa: E402
from traffic import Traffic, by_popularity, by_rank  # noqa: E402


def by_rank_told(request):
    """Prompt with the documents in rank order, in the coordinator's format."""
    texts = "".join(f"<document id=\"{d['id']}\">\n{d['text']}\n</document>\n" for d in request["documents"])
    ranks = ", ".join(d["id"] for d in request["documents"])
    system, user = by_popularity(request)["messages"]
    content = f"{system['content']}\n\nDocuments:\n{texts}Most relevant first: {ranks}"
    return {"messages": [{**system, "content": content}, user]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", type=pathlib.Path, default=ROOT / "target/release/kvasir")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kv-bytes", default="512MiB")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--words", type=int, default=120)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--out", type=int, default=16)
    args = parser.parse_args()
    logs = ROOT / "target/bench/rag"
    logs.mkdir(parents=True, exist_ok=True)
    questions = list(Traffic(documents=args.documents, length=args.words).questions(args.questions))
    server = Cluster(logs, args, "prefix")
    try:
        def answer(body, tokens):
            common = {"model": model_id(args), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                      "return_token_ids": True}
            answered = post_json(f"http://127.0.0.1:{server.port}/v1/chat/completions", {**body, **common})
            return answered["choices"][0]["token_ids"]

        for question in questions:
            answer(by_popularity(question), 1)
        shapes = (by_rank, by_rank_told, by_popularity)
        answers = [[answer(shape(question), args.out) for shape in shapes] for question in questions]
    finally:
        server.stop()

    def changed(one, other, length):
        return round(sum(a[one][:length] != a[other][:length] for a in answers) / len(answers), 4)

    print(json.dumps({
        "model": args.model, "questions": args.questions, "tokens": args.out,
        "changed_by_order": changed(1, 2, args.out), "first_token_changed_by_order": changed(1, 2, 1),
        "changed_by_telling_the_rank": changed(0, 1, args.out), "first_token_changed_by_telling_the_rank": changed(0, 1, 1),
    }))


if __name__ == "__main__":
    main()
