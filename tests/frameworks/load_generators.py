"""Measures a cluster with GuideLLM and AIPerf, unmodified, and checks their reports.

Arguments: the base URL without /v1, the model, the directory of a tokenizer for synthetic prompts, the directory for the
reports, the `bin` directories of GuideLLM and of AIPerf.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

url, model, tokenizer, reports, guidellm, aiperf = sys.argv[1:7]
REQUESTS = 24
reports = pathlib.Path(reports)
reports.mkdir(parents=True, exist_ok=True)
offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

report = reports / "guidellm.json"
subprocess.run(
    [f"{guidellm}/guidellm", "run", "--disable-progress"]
    + ["--backend", f"kind=openai_http,target={url},model={model}"]
    + ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    + ["--tokenizer", f"kind=hf_auto,model={tokenizer}"]
    + ["--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=32"]
    + ["--output", f"kind=json,path={report}"],
    env=offline,
    check=True,
)
(run,) = json.loads(report.read_text())["benchmarks"]
totals = run["metrics"]["request_totals"]
assert totals["successful"] == totals["total"] == REQUESTS, totals

with tempfile.TemporaryDirectory() as home:
    # AIPerf reads tokenizers from the hub or its cache alone.
    revision = "0" * 40
    cached = pathlib.Path(home, "hub/models--local--tokenizer")
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text(revision)
    shutil.copytree(tokenizer, cached / "snapshots" / revision)
    subprocess.run(
        [f"{aiperf}/aiperf", "profile", "-m", model, "--url", url, "--endpoint-type", "chat", "--streaming"]
        + ["--tokenizer", "local/tokenizer", "--use-server-token-count", "--ui-type", "none"]
        + ["--concurrency", "4", "--request-count", str(REQUESTS)]
        + ["--synthetic-input-tokens-mean", "128", "--output-tokens-mean", "32"]
        + ["--artifact-dir", str(reports / "aiperf")],
        env={**offline, "HF_HOME": home},
        check=True,
    )
found = json.loads((reports / "aiperf/profile_export_aiperf.json").read_text())
assert found["request_count"]["avg"] == REQUESTS and not found.get("error_request_count"), found
