#!/usr/bin/env python3
"""Measures the gain of draft tokens: decode speed of `kvasir run` with and without --spec, in turns.

  python3 bench/spec/run.py --kvasir target/release/kvasir [--spec ngram] [--threads 1] [--repeat 3] [--tasks quote] [--json FILE]

Fails if the outputs differ. Tasks: `quote` continues a document of the prompt (greedy), like an answer that
quotes its sources. `adversarial` samples at temperature 1 after a prompt whose repeated token runs continue
differently each time. A row is the median over prompts of the ratio of medians over repetitions.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys

MODELS = ["smollm2-135m", "gemma3-270m"]
TOKENS = 160
DOCUMENTS = [
    "The Harlan bridge was opened in 1931 after four years of work. It carries two lanes of road and a narrow path for "
    "people on foot across the river Ane, and is 412 metres long. Its towers are built of granite from the quarries at "
    "Morvik, while the deck hangs from cables that were spun on the spot by a crew of ninety. In the spring of 1958 ice "
    "damaged the eastern pier, and for eleven months a ferry took its place. Today about nine thousand vehicles cross it "
    "on a working day, most of them between seven and nine in the morning.",
    "Every tenant pays a deposit of two months' rent before the keys are handed over. The deposit is kept in a separate "
    "account and bears interest at the usual rate for savings. When the lease ends the landlord inspects the rooms "
    "together with the tenant, and both sign a list of what was found. Damage that goes beyond ordinary wear may be "
    "deducted, but only against receipts. What is left of the deposit, with all interest, must be paid back within six "
    "weeks of the day on which the keys were returned.",
    "To descale the machine, fill the tank with half a litre of water and one bag of powder, and place a bowl under the "
    "spout. Hold the left button for five seconds until the red lamp blinks. The pump now runs for twelve minutes with "
    "short breaks; do not switch the machine off during this time. When the lamp stays lit, empty the bowl, rinse the tank "
    "twice, fill it with fresh water and press the right button. After two more minutes the lamp goes out, and the machine "
    "can be used again.",
    "Grey herons nest in colonies, often in the crowns of old oaks or pines near shallow water. The pair builds a wide "
    "platform of sticks, to which further sticks are added every year. Four or five pale blue eggs are laid in March and "
    "hatch after twenty-five days. Both parents feed the young with fish, frogs and voles, which they bring up from their "
    "crops. At seven weeks the young birds can fly, but they return to the nest to be fed for another ten days or so.",
]


def quote(index):
    """Prompt with all documents, then the first words of one of them again."""
    sources = "\n\n".join(f"Document {at + 1}: {text}" for at, text in enumerate(DOCUMENTS))
    begin = " ".join(DOCUMENTS[index].split()[:6])
    return [f"{sources}\n\nDocument {index + 1} again, word for word: {begin}", "--temperature", "0"]


def adversarial(seed):
    """Prompt with runs that repeat and continue differently. Sampling follows none of them."""
    words = "red blue green stone river lamp cloud iron paper glass wheel salt".split()
    lines = [
        f"The value of the {words[at % len(words)]} is {(at * 7919 + seed * 104729) % 9973}, and the value of the"
        for at in range(60)
    ]
    return [" ".join(lines), "--temperature", "1", "--seed", str(seed)]


TASKS = {"quote": quote, "adversarial": adversarial}


def run(args, model, request, spec):
    command = [args.kvasir, "run", model, "-p", *request, "-n", str(TOKENS), "--threads", str(args.threads)]
    done = subprocess.run([*command, "--spec", spec], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    speed = re.search(r"\(([\d.]+) t/s after the first\)", done.stderr)
    guesses = re.search(r"(\d+) of (\d+) draft tokens accepted", done.stderr)
    right, all_ = map(int, guesses.groups()) if guesses else (0, 0)
    return done.stdout, float(speed.group(1)) if speed else None, right, all_


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", default="target/release/kvasir")
    parser.add_argument("--spec", default="ngram")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    print(f"| model | task | plain t/s | {args.spec} t/s | ratio (worst prompt) | right of guessed | per 100 tokens |")
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        for task in args.tasks:
            prompt = TASKS[task]
            ratios, speeds, counts, tokens = [], [], [0, 0], 0
            for index in range(4):
                seen = {"off": [], args.spec: []}
                texts = set()
                for _ in range(args.repeat):
                    for spec, speed in seen.items():
                        text, rate, right, all_ = run(args, model, prompt(index), spec)
                        texts.add(text)
                        if rate:
                            speed.append(rate)
                        if spec != "off":
                            counts = [counts[0] + right, counts[1] + all_]
                            tokens += TOKENS
                if len(texts) != 1:
                    sys.exit(f"{model}, {task} {index}: the answers differ")
                plain, guessed = (statistics.median(speed) for speed in seen.values())
                ratios.append(guessed / plain)
                speeds.append((plain, guessed))
            plain, guessed = (statistics.median(side) for side in zip(*speeds))
            ratio, worst = statistics.median(ratios), min(ratios)
            share = counts[0] / counts[1] if counts[1] else 0
            print(
                f"| {model} | {task} | {plain:.0f} | {guessed:.0f} | {ratio:.2f} ({worst:.2f}) "
                f"| {share:.0%} | {100 * counts[1] / tokens:.0f} |",
                flush=True,
            )
            rows.append({"model": model, "task": task, "plain": plain, "guessed": guessed, "ratio": ratio, "worst": worst,
                         "right": counts[0], "guesses": counts[1], "tokens": tokens})
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()
