"""The HTTP servers under comparison. Each runs on loopback in its own process group, is frozen while another
one is measured, and is stopped at the end.
"""
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error

from load import counter, get

# Long, because vLLM compiles its model at the first start.
READY_LIMIT_S = 900
STOP_LIMIT_S = 15


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One running server. `port` serves OpenAI's API. `computed()` returns the number of prompt tokens that
    it computed.
    """

    name = variant = model = ""
    # A frozen peer uses no CPU during another one's measurement. Members of a cluster are not frozen, because
    # the others would notice.
    freezable = True

    def __init__(self, logs):
        self.log = pathlib.Path(logs) / f"{self.name}-{self.variant}.log".replace(" ", "_")
        self.process = None
        self.port = 0

    def spawn(self, argv, env=None, stdout=None):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([str(a) for a in argv], env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                                            stdout=stdout or log, stderr=log, start_new_session=True)

    def wait_ready(self, path):
        deadline = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                get(f"http://127.0.0.1:{self.port}{path}", timeout=2)
                return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        tail = self.log.read_text(errors="replace")[-1500:]
        self.stop()
        raise RuntimeError(f"{self.name} ({self.variant}) did not become ready; its log ends:\n{tail}")

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def freeze(self):
        if self.freezable:
            self.signal(signal.SIGSTOP)

    def thaw(self):
        if self.freezable:
            self.signal(signal.SIGCONT)

    def stop(self):
        if self.process is None:
            return
        self.thaw()
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        # Children that outlive their parent are still in its process group.
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def computed(self):
        raise NotImplementedError


class Kvasir(Server):
    """A coordinator and one worker, started by `kvasir up`."""

    name, variant, freezable = "kvasir", "default", False

    def __init__(self, logs, binary, model, threads, device="auto"):
        super().__init__(logs)
        self.data = tempfile.TemporaryDirectory(prefix="kvasir-bench-")
        self.spawn([binary, "up", model, "--workers", 1, "--threads", threads, "--device", device, "--http", "127.0.0.1:0",
                    "--ops", "127.0.0.1:0", "--data-dir", self.data.name, "--json"], stdout=subprocess.PIPE)
        try:
            line = self.process.stdout.readline()
        except BaseException:
            self.stop()
            raise
        if not line:
            tail = self.log.read_text(errors="replace")[-1500:]
            self.stop()
            raise RuntimeError(f"kvasir up did not become ready; its log ends:\n{tail}")
        up = json.loads(line)
        self.port = int(up["coordinators"][0]["http"].rsplit(":", 1)[1].rstrip("/"))
        self.ops = int(up["workers"][0]["ops"].rsplit(":", 1)[1].rstrip("/"))
        self.model = json.loads(get(f"http://127.0.0.1:{self.port}/v1/models"))["data"][0]["id"]

    def computed(self):
        return counter(get(f"http://127.0.0.1:{self.ops}/metrics"), "kvasir_prefill_tokens_computed_total")

    def stop(self):
        super().stop()
        self.data.cleanup()


class LlamaServer(Server):
    """llama.cpp's server. Variants: the default, or one slot, which keeps a prefix between requests."""

    name, model = "llama-server", "any"
    FLAGS = {"default": [], "one slot": ["-np", "1"], "no repack": ["--no-repack"],
             "one slot, no repack": ["-np", "1", "--no-repack"]}

    def __init__(self, logs, binary, model, threads, variant, longest):
        self.variant = variant
        super().__init__(logs)
        self.port = free_port()
        # There are four slots by default. Each must have room for the longest request.
        context = max(8192, 4 * (longest + 255) // 256 * 256)
        self.spawn([binary, "-m", model, "-t", threads, "-tb", threads, "-c", context, "--host", "127.0.0.1",
                    "--port", self.port, "--no-ui", "--metrics", *self.FLAGS[variant]],
                   env={"OMP_PROC_BIND": "true"} if threads > 1 else None)
        self.wait_ready("/health")

    def computed(self):
        return counter(get(f"http://127.0.0.1:{self.port}/metrics"), "llamacpp:prompt_tokens_total")


class Vllm(Server):
    """vLLM on the CPU, bf16 weights, prefix caching on, one CPU per thread."""

    name, variant, model = "vllm", "bf16", "bench"

    def __init__(self, logs, python, folder, threads, cache):
        super().__init__(logs)
        self.port = free_port()
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        env = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
               "VLLM_CACHE_ROOT": str(cache), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": str(threads)}
        # `vllm serve` requires a package of another name. The module does not.
        self.spawn([python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "bench",
                    "--dtype", "bfloat16", "--enable-prefix-caching", "--enable-prompt-tokens-details",
                    "--host", "127.0.0.1", "--port", self.port], env=env)
        self.wait_ready("/health")

    def computed(self):
        text = get(f"http://127.0.0.1:{self.port}/metrics")
        return counter(text, "vllm:prompt_tokens_total") - counter(text, "vllm:prefix_cache_hits_total")
