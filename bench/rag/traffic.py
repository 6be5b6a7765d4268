#!/usr/bin/env python3
"""RAG traffic: each question has a few of many documents, and some documents are much more frequent than
others.

    bench/rag/traffic.py --questions 4000 > target/bench/traffic.jsonl

prints the questions for `bench/fleet`, each in two forms: with the documents in the prompt, and with the
`documents` field.
"""
import argparse
import json
import random

WORDS = 12_000


class Traffic:
    """The same questions in the same order for every server.

    There are `documents` texts of `length` words. Each question has `least` to `most` of them, drawn by
    Zipf's law with exponent `skew`. Their rank is random, because a retriever's order depends on the
    question.
    """

    def __init__(self, documents=200, length=120, least=3, most=8, skew=1.0, seed=1):
        draw = random.Random(seed)
        self.documents = []
        for number in range(documents):
            words = " ".join(_word(draw.randrange(WORDS)) for _ in range(length))
            self.documents.append({"id": f"doc{number:03}", "text": words})
        self.weights = [1 / (rank + 1) ** skew for rank in range(documents)]
        self.least, self.most, self.seed = least, most, seed

    def questions(self, count):
        draw = random.Random(self.seed + 1)
        for number in range(count):
            wanted, chosen = draw.randint(self.least, self.most), {}
            while len(chosen) < wanted:
                [place] = draw.choices(range(len(self.documents)), self.weights)
                chosen[place] = None
            ranked = list(chosen)
            draw.shuffle(ranked)
            question = " ".join(_word(draw.randrange(WORDS)) for _ in range(12))
            yield {"documents": [self.documents[place] for place in ranked], "question": f"{number}: {question}?"}


def _word(number):
    syllables = ["ka", "ro", "mi", "te", "su", "lo", "ne", "da", "vi", "pu", "go", "fa"]
    text = ""
    for _ in range(3):
        number, place = divmod(number, len(syllables))
        text += syllables[place]
    return text


def by_rank(request):
    """Chat with the documents in the prompt, in rank order."""
    texts = "\n".join(f"<document id=\"{d['id']}\">\n{d['text']}\n</document>" for d in request["documents"])
    content = f"Documents:\n{texts}\n\n{request['question']}"
    return {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]}


def by_popularity(request):
    """Chat with the `documents` field. The server orders the documents."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request["question"]}]
    return {"messages": messages, "documents": request["documents"]}


SYSTEM = "You answer questions from the documents given, and say so when they do not hold the answer."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=4000)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--words", type=int, default=120, help="words of a document")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for question in Traffic(documents=args.documents, length=args.words, seed=args.seed).questions(args.questions):
        print(json.dumps({shape.__name__: shape(question) for shape in (by_rank, by_popularity)}))


if __name__ == "__main__":
    main()
