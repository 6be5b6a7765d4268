"""A real llama.cpp server, from the library in xllamacpp: MODEL.gguf PORT. Prints one line when it listens, and ends
with its parent."""

import ctypes
import signal
import sys

import xllamacpp

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = int(sys.argv[2])
params.n_ctx = 8192
params.n_parallel = 2
params.cache_ram_mib = 0
params.cpuparams.n_threads = 2
# Its matrix product for AMX fails on some processors.
params.no_extra_bufts = True
params.warmup = False
params.endpoint_metrics = True
params.endpoint_slots = True
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
