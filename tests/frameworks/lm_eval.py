"""Runs loglikelihood tasks of lm-evaluation-harness against a cluster, unmodified, and compares each number with the
logits that `kvasir logits` computes.

Arguments: the base URL of OpenAI's API, the model, the folder of the model with its tokenizer, the kvasir command, the
`bin` directory of lm-evaluation-harness. Runs with that environment's interpreter.
"""

import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy
from transformers import AutoTokenizer

base, model, folder, kvasir, bin_directory = sys.argv[1:6]
TOLERANCE = 1e-4
CHOICES = [
    {"question": f"The {noun} is {adjective} and", "choices": [" red", " green and blue", " not"], "answer": at % 3}
    for at, (noun, adjective) in enumerate(
        (noun, adjective) for noun in ("house", "river", "old tree", "sea") for adjective in ("big", "far away")
    )
]
TEXTS = [{"text": "It was the best of times, it was the worst of times. " * times} for times in (1, 3)]
TASKS = {
    "local_choice": (CHOICES, "multiple_choice", ["doc_to_text: question", "doc_to_choice: choices", "doc_to_target: answer"]),
    "local_text": (TEXTS, "loglikelihood_rolling", ['doc_to_text: ""', "doc_to_target: text"]),
}
METRICS = {"multiple_choice": ("acc", "mean"), "loglikelihood_rolling": ("word_perplexity", "weighted_perplexity")}


def write_tasks(directory):
    for name, (lines, kind, mapping) in TASKS.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        metric, aggregation = METRICS[kind]
        settings = [
            f"task: {name}",
            "dataset_path: json",
            f"dataset_kwargs: {{data_files: {{test: {data}}}}}",
            "test_split: test",
            f"output_type: {kind}",
            *mapping,
            f"metric_list: [{{metric: {metric}, aggregation: {aggregation}, higher_is_better: true}}]",
        ]
        (directory / f"{name}.yaml").write_text("\n".join(settings) + "\n")


def logits(directory, prompts):
    """The rows of logits of each prompt."""
    ids, out = directory / "ids.json", directory / "logits.safetensors"
    ids.write_text(json.dumps(prompts))
    subprocess.run([kvasir, "logits", folder, "--tokens", ids, "--out", out, "--no-prefix-cache"], check=True)
    data = out.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    rows = []
    for at in range(len(prompts)):
        tensor = header[f"p{at}.logits"]
        begin, end = tensor["data_offsets"]
        values = numpy.frombuffer(data[8 + length + begin : 8 + length + end], dtype="<f4")
        rows.append(values.reshape(tensor["shape"]).astype(numpy.float64))
    return rows


def scored(rows, ids, context):
    """Sum of the log-probabilities of the tokens behind `context` ones, and whether each is the most likely."""
    total, greedy = 0.0, True
    for at in range(context, len(ids)):
        row = rows[at - 1]
        largest = row.max()
        total += row[ids[at]] - largest - math.log(numpy.exp(row - largest).sum())
        greedy &= int(row.argmax()) == ids[at]
    return total, greedy


tokenizer = AutoTokenizer.from_pretrained(folder)


def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)


with tempfile.TemporaryDirectory() as home:
    home = pathlib.Path(home)
    write_tasks(home)
    settings = f"model={model},base_url={base}/completions,tokenizer={folder},tokenizer_backend=huggingface,max_length=512"
    subprocess.run(
        [f"{bin_directory}/lm_eval", "run", "--model", "local-completions", "--model_args", settings]
        + ["--include_path", home, "--tasks", ",".join(TASKS), "--batch_size", "3"]
        + ["--output_path", home / "out", "--log_samples"],
        env={**os.environ, "HF_HOME": str(home / "hub"), "HF_HUB_OFFLINE": "1"},
        check=True,
    )
    prompts, found = [], []
    for path in sorted((home / "out").rglob("samples_*.jsonl")):
        for sample in map(json.loads, path.read_text().splitlines()):
            for arguments, response in zip(sample["arguments"].values(), sample["filtered_resps"]):
                if len(arguments) == 2:
                    context, text = arguments["arg_0"], arguments["arg_1"]
                    ids = encode(context + text)
                    prompts.append((ids, len(encode(context))))
                    found.append((float(response[0]), response[1] in (True, "True")))
                else:
                    # A text alone follows the token that begins texts.
                    ids = encode(arguments["arg_0"])
                    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
                    prompts.append(([begin, *ids], 1))
                    found.append((float(response if not isinstance(response, list) else response[0]), None))
    assert len(found) == len(CHOICES) * 3 + len(TEXTS), len(found)
    rows = logits(home, [ids for ids, _ in prompts])
    largest = 0.0
    for (ids, context), rows_of, (total, greedy) in zip(prompts, rows, found):
        expected, expected_greedy = scored(rows_of, ids, context)
        largest = max(largest, abs(total - expected))
        assert abs(total - expected) <= TOLERANCE, (total, expected, ids, context)
        assert greedy in (None, expected_greedy), (greedy, expected_greedy, ids)
print(f"{len(found)} numbers of lm-evaluation-harness, largest difference from the logits {largest:.1e}")
