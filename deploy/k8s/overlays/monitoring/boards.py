"""Grafana's boards and Prometheus' rules of this overlay, as code: `python boards.py` writes `boards/*.json` and `rules.yaml`
beside this file. A test compares these with what is said here, and asks a Prometheus before a running cluster for each
expression.

A coordinator shows its workers' metrics with the label `worker`, and every coordinator shows all of them; workers are
scraped themselves, too. So whatever is a worker's is taken once for each: `max by (worker)`. The engines of deployed models
have the label `model`; what they count adds up."""

import json
import pathlib

import yaml

HERE = pathlib.Path(__file__).resolve().parent
ALERTS = HERE.parents[3] / "docs/alerts.yml"

RATE = "$__rate_interval"
SECOND = 'le="1.0"'
BAD = 'status=~"4..|5.."'


# Histograms of coordinators whose buckets carry the trace of the last request that fell into them. A panel of one shows
# these as points; the data source says where a point's trace is (provisioning/datasources).
TRACED = {
    "vllm:time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
}


def rate(metric, labels=""):
    return f"rate({metric}{{{labels}}}[{RATE}])" if labels else f"rate({metric}[{RATE}])"


# Metrics of a worker's machine, and shares: those of its engines do not add up.
NOT_ADDED = ("kvasir_gpu_", "kvasir_host_", "kvasir_rss_bytes", "vllm:kv_cache_usage_perc")


def once(metric, values, labels):
    """Values of a worker's metric, once for each worker and added over its engines."""
    own = ", ".join(["worker", *labels])
    if metric.startswith(NOT_ADDED):
        return f"max by ({own}) ({values})"
    return f"sum by ({own}) (max by ({own}, model) ({values}))"


def of_workers(metric, *labels):
    """A worker's own gauge, once for each worker."""
    return once(metric, f"{metric}{{worker!=\"\"}}", labels)


def worker_rate(metric, *labels):
    """A worker's own counter by second, once for each worker."""
    quoted = 'worker!=""'
    return once(metric, rate(metric, quoted), labels)


def quantile(q, metric, *labels):
    by = ", ".join(["le", *labels])
    return f"histogram_quantile({q}, sum by ({by}) ({rate(metric + '_bucket')}))"


def traced(expression):
    """Whether an expression is a latency whose buckets carry traces."""
    return expression.startswith("histogram_quantile") and any(f"{metric}_bucket" in expression for metric in TRACED)


def quantiles(metric):
    return [(quantile(q, metric), f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99)]


def panel(title, unit, *queries, about="", kind="timeseries", needs=None):
    """One panel. `needs` says why the test cluster cannot show it, if so."""
    return {"title": title, "unit": unit, "queries": list(queries), "about": about, "kind": kind, "needs": needs}


GPU = "the metrics of NVIDIA's DCGM exporter, which reads a GPU"
HOST = "the metrics of Prometheus' node exporter"
OFFERED = "shown by workers with operations"
SEEN = "shown for models that see images"
UNIFIED = "shown by a host whose GPU shares its memory"

BOARDS = {
    "fleet": (
        "Kvasir: fleet",
        [
            panel("Workers", "none", ("max by (state) (kvasir_workers)", "{{state}}"), about="As the coordinators see them."),
            panel("Nodes that answer", "none", ('sum by (job) (up{job=~".*kvasir.*"})', "{{job}}")),
            panel("Coordinators that know a leader", "none", ("sum(kvasir_raft_quorum)", "quorum"), kind="stat",
                  about="Fewer than all for longer than an election: see the runbook of KvasirNoQuorum."),
            panel("Who leads", "none", ('max by (instance) (kvasir_raft_role{role="leader"})', "{{instance}}")),
            panel("Term", "none", ("max(kvasir_raft_term)", "term")),
            panel("Entries that others have not confirmed", "none", ("max by (coordinator) (kvasir_raft_peer_lag_entries)", "{{coordinator}}")),
            panel("Since the last report", "ms", ("max by (worker) (kvasir_worker_silent_milliseconds)", "{{worker}}")),
            panel("Memory of workers", "bytes", (of_workers("kvasir_rss_bytes"), "{{worker}}")),
            panel("Weights", "bytes", (of_workers("kvasir_weight_bytes"), "{{worker}}")),
            panel("Bytes of model chunks", "Bps", (worker_rate("kvasir_shard_fetched_bytes_total"), "{{worker}} fetches"),
                  (worker_rate("kvasir_shard_served_bytes_total"), "{{worker}} sends")),
            panel("Findings of kvasir doctor", "none",
                  ('max by (worker, check) (kvasir_worker_check{worker!=""}) or max by (instance, check) (kvasir_check)', "{{worker}}{{instance}} {{check}}"),
                  about="0 ok, 1 warning, 2 problem; `kvasir doctor` on the node says the fact and the remedy."),
            panel("Clocks of workers, ahead", "s",
                  ("max by (instance, worker) (kvasir_worker_time_seconds - on (instance) group_left () kvasir_time_seconds)", "{{worker}} of {{instance}}")),
            panel("Clocks moved since the start", "s", ("max by (instance) (kvasir_clock_moved_seconds)", "{{instance}}")),
            panel("Writes of what is agreed on, p99", "s", (quantile(0.99, "kvasir_raft_write_seconds", "instance"), "{{instance}}")),
        ],
    ),
    "slo": (
        "Kvasir: what users see",
        [
            panel("Requests", "reqps", (f"sum by (status) ({rate('kvasir_http_requests_total')})", "{{status}}")),
            panel("Ended because of", "reqps", (f"sum by (finished_reason) ({rate('vllm:request_success_total')})", "{{finished_reason}}")),
            panel("Tokens", "none", (f"sum({rate('vllm:prompt_tokens_total')})", "prompt/s"),
                  (f"sum({rate('vllm:generation_tokens_total')})", "generated/s")),
            panel("Time to the first token", "s", *quantiles("vllm:time_to_first_token_seconds")),
            panel("Time between tokens", "s", *quantiles("vllm:inter_token_latency_seconds")),
            panel("Time to the end", "s", *quantiles("vllm:e2e_request_latency_seconds")),
            panel("First token within a second", "percentunit",
                  (f"sum({rate('vllm:time_to_first_token_seconds_bucket', SECOND)}) / sum({rate('vllm:time_to_first_token_seconds_count')})", "share")),
            panel("Refused or failed", "reqps", (f"sum by (path, status) ({rate('kvasir_http_requests_total', BAD)})", "{{path}} {{status}}")),
            panel("Waiting", "none", ("sum(kvasir_queue_requests)", "requests"), ("sum(kvasir_inflight_requests)", "at workers")),
            panel("Prompt tokens waiting", "none", ("sum(kvasir_queue_tokens)", "tokens")),
            panel("Time in the queue", "s", *quantiles("vllm:request_queue_time_seconds")),
            panel("Computing prompts", "s", *quantiles("vllm:request_prefill_time_seconds")),
            panel("Generating", "s", *quantiles("vllm:request_decode_time_seconds")),
            panel("Prompt lengths", "none", *quantiles("vllm:request_prompt_tokens")),
        ],
    ),
    "locality": (
        "Kvasir: locality",
        [
            panel("Prompt tokens that were cached", "percentunit",
                  (f"sum({worker_rate('vllm:prefix_cache_hits_total')}) / sum({worker_rate('vllm:prefix_cache_queries_total')})", "share")),
            panel("Prompt tokens", "none", (f"sum({worker_rate('vllm:prefix_cache_hits_total')})", "from the cache/s"),
                  (f"sum({worker_rate('kvasir_prefill_tokens_computed_total')})", "computed/s")),
            panel("Why a worker was chosen", "reqps", (f"sum by (reason) ({rate('kvasir_route_decisions_total')})", "{{reason}}")),
            panel("Why lookups stopped", "ops", (f"sum by (stop) ({worker_rate('kvasir_prefix_lookups_total', 'stop')})", "{{stop}}")),
            panel("Cached tokens expected and found", "none", (f"sum({rate('kvasir_cached_tokens_predicted_total')})", "expected/s"),
                  (f"sum({rate('kvasir_cached_tokens_actual_total')})", "found/s")),
            panel("Tokens by which that was wrong", "none", (f"sum by (direction) ({rate('kvasir_cached_tokens_mispredicted_total')})", "{{direction}}"),
                  about="0 when all is well."),
            panel("Prefill by worker", "none", (worker_rate("kvasir_prefill_tokens_computed_total"), "{{worker}}"), about="Tokens computed in a second."),
            panel("Imbalance of steps", "none",
                  (f"stddev({worker_rate('kvasir_steps_total')}) / avg({worker_rate('kvasir_steps_total')})", "coefficient of variation")),
            panel("KV pulled and sent", "Bps", (worker_rate("kvasir_block_transfer_bytes_total", "direction"), "{{worker}} {{direction}}")),
            panel("Pulls", "ops", (worker_rate("kvasir_block_transfer_seconds_count"), "{{worker}}")),
            panel("Tokens that tiers have saved", "none", (worker_rate("kvasir_tier_hit_tokens_total"), "{{worker}}")),
            panel("Prefixes credited ahead of events", "none", ("sum by (instance) (kvasir_reservations)", "{{instance}}")),
        ],
    ),
    "index": (
        "Kvasir: index and decisions",
        [
            panel("Hash units in the index", "none", ("max by (instance) (kvasir_index_blocks)", "{{instance}}")),
            panel("Its memory of what it may take", "percentunit", ("max by (instance) (kvasir_index_bytes / kvasir_index_max_bytes)", "{{instance}}")),
            panel("Units not recorded for lack of memory", "none", ("max by (instance) (kvasir_index_refused_blocks)", "{{instance}}")),
            panel("Gaps in event streams", "none", ("max by (instance, worker) (kvasir_event_stream_gaps)", "{{instance}} of {{worker}}")),
            panel("Streams that are behind", "none", ("max by (instance, worker) (kvasir_event_stream_behind)", "{{instance}} of {{worker}}")),
            panel("Prefixes asked of other coordinators", "none", ("sum by (outcome) (kvasir_index_imports_total)", "{{outcome}}")),
            panel("Stages in the coordinator, p50", "s", (quantile(0.5, "kvasir_stage_seconds", "stage"), "{{stage}}")),
            panel("Stages in the coordinator, p99", "s", (quantile(0.99, "kvasir_stage_seconds", "stage"), "{{stage}}")),
            panel("CPU for making tokens of texts", "percentunit", (f"sum by (model_name) ({rate('kvasir_tokenise_seconds_total')})", "{{model_name}}")),
            panel("Text and tokens remembered", "percentunit",
                  (f"sum by (memo) ({rate('kvasir_memo_hits_total')}) / (sum by (memo) ({rate('kvasir_memo_hits_total')}) + sum by (memo) ({rate('kvasir_memo_misses_total')}))", "{{memo}}")),
            panel("Memory of the memos", "bytes", ("sum by (memo) (kvasir_memo_bytes)", "{{memo}}")),
            panel("Reads of what is agreed on, p99", "s", (quantile(0.99, "kvasir_raft_read_index_seconds", "instance"), "{{instance}}")),
        ],
    ),
    "workers": (
        "Kvasir: workers",
        [
            panel("Running", "none", (of_workers("vllm:num_requests_running"), "{{worker}}")),
            panel("Waiting", "none", (of_workers("vllm:num_requests_waiting"), "{{worker}}")),
            panel("KV held by sequences", "percentunit", (of_workers("vllm:kv_cache_usage_perc"), "{{worker}}")),
            panel("Steps", "ops", (worker_rate("kvasir_steps_total"), "{{worker}}")),
            panel("Rows of a step", "none", (quantile(0.5, "vllm:iteration_tokens_total"), "p50"), (quantile(0.95, "vllm:iteration_tokens_total"), "p95")),
            panel("Preemptions", "ops", (worker_rate("vllm:num_preemptions_total"), "{{worker}}")),
            panel("Prompt tokens computed again", "none", (worker_rate("kvasir_prefill_tokens_recomputed_total"), "{{worker}}")),
            panel("Blocks evicted", "ops", (worker_rate("kvasir_kv_evictions_total"), "{{worker}}")),
            panel("Checkpoints of states", "ops", (worker_rate("kvasir_checkpoints_total"), "{{worker}} kept"),
                  (worker_rate("kvasir_checkpoints_skipped_total"), "{{worker}} skipped")),
            panel("KV of groups, held by sequences", "bytes", (of_workers("kvasir_kv_group_used_bytes", "group"), "{{worker}} {{group}}")),
            panel("KV in tiers", "bytes", (of_workers("kvasir_tier_bytes", "tier"), "{{worker}} {{tier}}")),
            panel("Stages: share of time that they compute", "percentunit", (worker_rate("kvasir_shard_busy_seconds_total", "stage"), "{{worker}} {{stage}}")),
            panel("Stages: share of time that they wait", "percentunit", (worker_rate("kvasir_shard_stalled_seconds_total", "stage"), "{{worker}} {{stage}}")),
        ],
    ),
    "operations": (
        "Kvasir: operations and images",
        [
            panel("Sessions", "none", ("sum by (operation) (kvasir_operation_client_sessions)", "{{operation}}"), needs=OFFERED),
            panel("Ended because of", "ops",
                  (f"sum by (operation, reason) ({rate('kvasir_operation_client_sessions_ended_total')})", "{{operation}} {{reason}}"), needs=OFFERED),
            panel("Audio", "none", (f"sum by (operation) ({rate('kvasir_operation_client_audio_seconds_total')})", "{{operation}}"),
                  about="Seconds of audio in a second.", needs=OFFERED),
            panel("Time until a session is open, p95", "s", (quantile(0.95, "kvasir_operation_open_seconds", "operation"), "{{operation}}"), needs=OFFERED),
            panel("Workers that offer an operation", "none", ("max by (operation) (kvasir_operation_workers)", "{{operation}}"), needs=OFFERED),
            panel("Computing, p95", "s", (quantile(0.95, "kvasir_operation_compute_seconds", "operation"), "{{operation}}"),
                  about="Of one piece of audio.", needs=OFFERED),
            panel("Images of requests", "ops", (f"sum({rate('kvasir_images_decoded_total')})", "decoded/s"),
                  (f"sum({rate('kvasir_images_known_total')})", "known/s"), (f"sum({rate('kvasir_images_refused_total')})", "refused/s"), needs=SEEN),
            panel("Images encoded", "ops", (worker_rate("kvasir_images_encoded_total"), "{{worker}}"),
                  (worker_rate("kvasir_image_cache_hits_total"), "{{worker}} from the cache"),
                  (worker_rate("kvasir_image_encodings_shared_total"), "{{worker}} shared")),
            panel("Time to encode an image", "s", *quantiles("kvasir_image_encode_seconds")),
            panel("Embeddings of images", "bytes", (of_workers("kvasir_image_cache_bytes"), "{{worker}}")),
        ],
    ),
    "gpu": (
        "Kvasir: GPUs and memory",
        [
            panel("Weights", "bytes", (of_workers("kvasir_weight_bytes"), "{{worker}}")),
            panel("KV arena", "bytes", (of_workers("kvasir_kv_bytes"), "{{worker}}")),
            panel("Memory that GPU and host share, left", "bytes", (of_workers("kvasir_host_available_bytes"), "{{worker}}"),
                  about="Of a Spark, whose driver tells no memory of its own. Below 12 GiB no new work is taken.", needs=UNIFIED),
            panel("Free memory of the host", "bytes", ("node_memory_MemAvailable_bytes", "{{instance}}"), needs=HOST),
            panel("Power", "watt", (of_workers("kvasir_gpu_power_watts", "gpu"), "{{worker}} {{gpu}}"),
                  (of_workers("kvasir_gpu_power_limit_watts", "gpu"), "{{worker}} {{gpu}} limit")),
            panel("Temperature", "celsius", (of_workers("kvasir_gpu_temperature_celsius", "gpu"), "{{worker}} {{gpu}}")),
            panel("Clocks", "hertz", (of_workers("kvasir_gpu_clock_hertz", "gpu", "clock"), "{{worker}} {{gpu}} {{clock}}")),
            panel("Reasons of lower clocks", "none", (of_workers("kvasir_gpu_throttled", "gpu", "reason"), "{{worker}} {{gpu}} {{reason}}")),
            panel("PCIe lanes", "none", (of_workers("kvasir_gpu_pcie_width", "gpu"), "{{worker}} {{gpu}}"),
                  (of_workers("kvasir_gpu_pcie_width_max", "gpu"), "{{worker}} {{gpu}} at most")),
            panel("Link errors", "ops", (worker_rate("kvasir_gpu_pcie_replays_total", "gpu"), "{{worker}} {{gpu}} PCIe"),
                  (worker_rate("kvasir_gpu_nvlink_errors_total", "gpu", "link", "error"), "{{worker}} {{gpu}} NVLink {{link}} {{error}}")),
            panel("Memory errors", "none", (of_workers("kvasir_gpu_ecc_errors_total", "gpu", "error"), "{{worker}} {{gpu}} {{error}}")),
            panel("GPUs that answer", "none", (of_workers("kvasir_gpu_readable", "gpu"), "{{worker}} {{gpu}}")),
            panel("GPU busy", "percent", ("DCGM_FI_DEV_GPU_UTIL", "{{Hostname}}"), needs=GPU),
            panel("Memory interface busy", "percent", ("DCGM_FI_DEV_MEM_COPY_UTIL", "{{Hostname}}"), needs=GPU, about="Nothing on a Spark."),
            panel("Errors of the driver (Xid)", "none", ("DCGM_FI_DEV_XID_ERRORS", "{{Hostname}}"), needs=GPU),
        ],
    ),
    "change": (
        "Kvasir: change",
        [
            panel("Versions", "none", ("count by (version) (kvasir_build_info)", "{{version}}"), about="More than one: an upgrade is under way."),
            panel("Workers by state", "none", ("max by (state) (kvasir_workers)", "{{state}}")),
            panel("What operators changed", "none", ("sum by (change, outcome) (kvasir_admin_changes_total)", "{{change}} {{outcome}}")),
            panel("Proposed changes", "ops", (f"sum({rate('kvasir_raft_proposals_total')})", "changes")),
            panel("Leaders since the start", "none", ("max by (instance) (kvasir_raft_leader_changes_total)", "{{instance}}")),
            panel("Voters of the group", "none", ("max(kvasir_raft_voters)", "voters"), ("max(kvasir_raft_learners)", "learners")),
            panel("Attempts made again", "none", ("sum by (cause) (kvasir_retries_total)", "{{cause}}"), about="Their requests went on at another worker."),
            panel("Model chunks here of those wanted", "percentunit",
                  ("max by (worker) (kvasir_shard_present_bytes{worker!=\"\"}) / (max by (worker) (kvasir_shard_wanted_bytes{worker!=\"\"}) > 0 or max by (worker) (kvasir_weight_bytes{worker!=\"\"}))", "{{worker}}"),
                  about="Of a worker that has the file itself: 0."),
            panel("Time to the first token, p95", "s", (quantile(0.95, "vllm:time_to_first_token_seconds", "instance"), "{{instance}}"),
                  about="By coordinator: compare one that has been upgraded with those that have not."),
        ],
    ),
}


def grafana(name):
    """A board in Grafana's own form."""
    title, panels = BOARDS[name]
    source = {"type": "prometheus", "uid": "${source}"}
    drawn = []
    for at, spec in enumerate(panels):
        targets = [
            {"refId": chr(65 + n), "expr": expr, "legendFormat": legend, "datasource": source, "exemplar": traced(expr)}
            for n, (expr, legend) in enumerate(spec["queries"])
        ]
        drawn.append(
            {
                "id": at + 1,
                "type": spec["kind"],
                "title": spec["title"],
                "description": spec["about"],
                "datasource": source,
                "gridPos": {"x": 8 * (at % 3), "y": 8 * (at // 3), "w": 8, "h": 8},
                "fieldConfig": {"defaults": {"unit": spec["unit"], "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
    return {
        "uid": f"kvasir-{name}",
        "title": title,
        "tags": ["kvasir"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "title": "Kvasir", "tags": ["kvasir"], "asDropdown": True}],
        "templating": {"list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]},
        "panels": drawn,
    }


def alerts():
    """docs/alerts.yml."""
    return yaml.safe_load(ALERTS.read_text())


def prometheus_rule():
    """docs/alerts.yml as the Prometheus operator reads it."""
    head = "# Written by boards.py from docs/alerts.yml.\n"
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvasir", "labels": {"release": "prometheus"}},
        "spec": alerts(),
    }
    return head + yaml.safe_dump(rule, sort_keys=False, width=160)


def files():
    """Everything that is written, by path."""
    boards = {HERE / "boards" / f"kvasir-{name}.json": json.dumps(grafana(name), indent=1) + "\n" for name in BOARDS}
    return {**boards, HERE / "rules.yaml": prometheus_rule()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
