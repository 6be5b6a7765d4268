"""Queries a real Prometheus, which scrapes a running cluster, for every expression of the boards and the
alerts.

An expression without a result names a metric or a label that does not exist. `python tests/boards.py BINARY
MODEL.gguf`
"""

import http.server
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "deploy/k8s/overlays/monitoring"))
import boards  # noqa: E402

PATIENCE = 60
# Alerts whose expressions have no result in a healthy cluster without a GPU, with the reason.
NOT_HERE = {
    "KvasirSourceStruck": "counted from the first worker on that sends wrong chunks; worker/tests/shipping asks for it by name after one has",
    "KvasirHostMemoryShort": boards.UNIFIED,
}


def ask(url, body=None, method=None):
    """Returns the JSON of an answer, and its headers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        text = answer.read()
        return (json.loads(text) if text else None), answer.headers


def until(what, probe):
    deadline = time.monotonic() + PATIENCE
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < deadline, f"no {what} in {PATIENCE} s"
        time.sleep(0.5)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Prometheus:
    """A Prometheus that scrapes the nodes as the operator does with the monitors of the overlay."""

    def __init__(self, nodes, directory):
        self.port = free_port()
        target = lambda node, labels: {"targets": [node["ops"]], "labels": labels}
        jobs = {
            "kvasir-coordinators": [target(node, {}) for node in nodes["coordinators"]],
            "kvasir-workers": [target(node, {"worker": node["id"]}) for node in nodes["workers"]],
        }
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": job, "honor_labels": True, "static_configs": targets} for job, targets in jobs.items()],
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        log = open(directory / "prometheus.log", "wb")
        flags = ["--enable-feature=exemplar-storage", f"--config.file={file}", f"--storage.tsdb.path={directory}/tsdb", f"--web.listen-address=127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log)

    def query(self, path, expression, **more):
        """Returns the result of an expression, or None while Prometheus does not answer."""
        query = urllib.parse.urlencode({"query": expression, **more})
        try:
            answer, _ = ask(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        except OSError:
            return None
        return answer["data"]

    def series(self, expression):
        """Number of series of an expression now."""
        found = self.query("query", expression)
        return len(found["result"]) if found else 0

    def traces(self, expression):
        """Trace ids of the exemplars of an expression."""
        now = time.time()
        found = self.query("query_exemplars", expression, start=now - 600, end=now + 1) or []
        return {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}


class Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP receiver that discards all spans. With it, requests are traced."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Load:
    """Sends requests of all kinds to the coordinators in turn until `stop`."""

    def __init__(self, nodes):
        self.nodes, self.model, self.ends = nodes, nodes["model"], threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(at,)) for at in range(4)]
        for thread in self.threads:
            thread.start()

    def api(self, at):
        coordinators = self.nodes["coordinators"]
        return f"http://{coordinators[at % len(coordinators)]['http']}/v1/completions"

    def run(self, at):
        turn = 0
        while not self.ends.is_set():
            shared = "One passage that many ask about. " * 6
            bodies = [
                {"prompt": f"{shared} Question {turn} of {at}?", "max_tokens": 8},
                {"prompt": [3 + (turn + i) % 200 for i in range(96)], "max_tokens": 8},
                {"prompt": "", "max_tokens": -1},
            ]
            for body in bodies:
                try:
                    ask(self.api(at + turn), {"model": self.model, **body})
                except OSError:
                    # The invalid request, and requests in flight at the worker that is killed.
                    pass
            turn += 1
            self.ends.wait(0.1)

    def stop(self):
        self.ends.set()
        for thread in self.threads:
            thread.join()


def change_things(nodes, data_dir):
    """Drains and undrains a worker. Kills a worker while a request is in flight."""
    ops = f"http://{nodes['coordinators'][0]['ops']}/admin/v1/workers"
    worker = nodes["workers"][-1]["id"]

    def agreed(change):
        try:
            return ask(f"{ops}/{worker}/{change}", {}, "POST")
        except urllib.error.HTTPError as error:
            # With a slow disk the change is not committed in time. It is sent again.
            assert error.code == 503, error.read().decode()

    for change in ("drain", "undrain"):
        until(f"{change} that is agreed on", lambda change=change: agreed(change))
    api = f"http://{nodes['coordinators'][0]['http']}/v1/completions"
    body = {"model": nodes["model"], "prompt": [5, 6, 7, 8], "max_tokens": 400, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(api, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as stream:
        stream.readline()
        chosen = stream.headers["x-kvasir-worker"]
        now = json.loads((data_dir / "up.json").read_text())
        (pid,) = [node["pid"] for node in now["workers"] if node["id"] == chosen]
        subprocess.run(["kill", "-9", str(pid)], check=True)
        stream.read()


def expressions():
    """Yields (name, expression, reason why the test cluster has no result for it, or None) of all boards and
    alerts.
    """
    for board, (_, panels) in boards.BOARDS.items():
        for panel in panels:
            for expression, _ in panel["queries"]:
                yield f"{board}: {panel['title']}", expression.replace(boards.RATE, "1m"), panel["needs"]
    for group in boards.alerts()["groups"]:
        for rule in group["rules"]:
            value = re.sub(r" (==|>|<) [\d.]+$", "", rule["expr"])
            assert value != rule["expr"], f"{rule['alert']}: no bound at the end of {rule['expr']}"
            yield rule["alert"], value, NOT_HERE.get(rule["alert"])


def files_are_written():
    for path, text in boards.files().items():
        assert path.read_text() == text, f"{path.name} is not what boards.py says: run it"
    written = {path.name for path in (boards.HERE / "boards").iterdir()}
    assert written == {f"kvasir-{name}.json" for name in boards.BOARDS}, written


def latencies_lead_to_traces():
    """Checks that the boards ask for exemplars of exactly the right targets, and the destination of their
    links. Returns these expressions by panel.
    """
    asked = {}
    for path in sorted((boards.HERE / "boards").iterdir()):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                assert target["exemplar"] == boards.traced(target["expr"]), f"{path.name}: {panel['title']}"
                if target["exemplar"]:
                    asked.setdefault(panel["title"], target["expr"].replace(boards.RATE, "1m"))
    assert {"Time to the first token", "Time to the end", "Time in the queue"} <= asked.keys(), asked.keys()
    source, *others = yaml.safe_load((boards.HERE / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    (destination,) = source["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["name"] == "trace_id" and destination["datasourceUid"] in [other["uid"] for other in others]
    return asked


def alerts_have_runbooks():
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    rules = [rule for group in boards.alerts()["groups"] for rule in group["rules"]]
    assert headings == [rule["alert"] for rule in rules], "docs/runbooks.md has one section an alert, in their order"
    for rule in rules:
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/runbooks.md#{rule['alert'].lower()}"), rule["alert"]
    subprocess.run(["promtool", "check", "rules", str(boards.ALERTS)], check=True, stdout=subprocess.DEVNULL)


# Values of a GPU that reports everything, for the fake management library.
GPU = """gpus 1
power 45000
power_limit 140000
state 0
sm_clock 2400
sm_clock_max 3003
memory_clock 9001
memory_clock_max 9501
temperature 60
slowdown 95
reasons 0
pcie_generation 5
pcie_generation_max 5
pcie_width 16
pcie_width_max 16
pcie_replays 0
nvlinks 1
nvlink_replays 0
ecc_corrected 0
ecc_uncorrected 0
"""


def fake_gpu(directory):
    """Compiles the fake management library; returns the variable by which the loader finds it."""
    source = ROOT / "tests/src/fake_nvml.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", directory / "libnvidia-ml.so.1", source], check=True)
    (directory / "values").write_text(GPU)
    return {"LD_LIBRARY_PATH": str(directory)}


def every_expression_finds_something(binary, model, latencies):
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="kvasir-boards-") as directory:
        directory = pathlib.Path(directory)
        data = directory / "data"
        command = [binary, "up", model, "--json", "--coordinators", "3", "--workers", "4", "--shards", "2", "--threads", "1"]
        command += ["--http", "127.0.0.1:0", "--ops", "127.0.0.1:0", "--data-dir", str(data), "--kv-host-bytes", "16MiB"]
        with open(directory / "up.log", "wb") as log:
            traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
            up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **traced, **fake_gpu(directory)})
        try:
            nodes = json.loads(up.stdout.readline())
            prometheus = Prometheus(nodes, directory)
            load = Load(nodes)
            try:
                change_things(nodes, data)
                missing = {(name, expression) for name, expression, needs in expressions() if not needs}

                def look():
                    missing.difference_update([asked for asked in missing if prometheus.series(asked[1])])
                    return not missing

                try:
                    until("series for each expression", look)
                except AssertionError as error:
                    told = "\n".join(f"  {name}: {expression}" for name, expression in sorted(missing))
                    raise AssertionError(f"nothing is found by\n{told}") from error
                assert not prometheus.series("count(kvasir_no_such_metric)"), "anything is found"
                for title, expression in latencies.items():
                    until(f"traces on the panel {title}", lambda: prometheus.traces(expression))
            finally:
                load.stop()
                prometheus.process.terminate()
                prometheus.process.wait()
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(PATIENCE)
    listed = {name: needs for name, _, needs in expressions() if needs}
    for name, needs in listed.items():
        print(f"not asked for: {name} ({needs})")


def main(binary, model):
    files_are_written()
    alerts_have_runbooks()
    latencies = latencies_lead_to_traces()
    started = time.monotonic()
    every_expression_finds_something(binary, model, latencies)
    asked = sum(1 for _ in expressions())
    print(f"{asked} expressions of boards and alerts ({time.monotonic() - started:.1f} s)")
    print(f"traces on {len(latencies)} panels")
    print("4 passed, 0 failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
