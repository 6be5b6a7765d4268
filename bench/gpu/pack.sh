#!/usr/bin/env bash
# pack.sh [KVASIR]: packs what a machine with a GPU needs that has neither Rust nor NVRTC nor a network into
# target/bench/gpu/kit.tar.xz: a stripped executable, its kernels compiled for every checked architecture, variants of the
# products, and the commit. It needs NVRTC 13 (`./test setup`, or KVASIR_CUDA_LIBRARIES) and no GPU.
# CUBINS=DIR takes kernels that an executable with the same sources has compiled before.
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=$(realpath "${1:-target/release/kvasir}")
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
kit=$target/bench/gpu/kit
# A copy of the tree with the kit must stay below what such machines are sent.
most=$((64 << 20))

if [ -z "${KVASIR_CUDA_LIBRARIES:-}" ]; then
    KVASIR_CUDA_LIBRARIES=$(find -L "$target/cuda-venv" -path '*/nvidia/cu13/lib' -type d 2>/dev/null | head -1) || true
    [ -n "$KVASIR_CUDA_LIBRARIES" ] || { echo "no NVRTC: run ./test setup, or name its folder in KVASIR_CUDA_LIBRARIES" >&2; exit 1; }
fi
export KVASIR_CUDA_LIBRARIES
rm -rf "$kit" "$kit.tar.xz"
mkdir -p "$kit"
git rev-parse --short HEAD >"$kit/commit" 2>/dev/null || echo "an unknown commit" >"$kit/commit"
cp "$binary" "$kit/kvasir"
strip -s "$kit/kvasir"
if [ -n "${CUBINS:-}" ]; then
    cp -r "$CUBINS" "$kit/cubins"
else
    "$kit/kvasir" gpu-check --prebuild "$kit/cubins"
fi
python3 bench/gpu/variants.py "$kit/variants"
# Whole or not at all for each architecture: what came compiled by another version of the sources is of no use.
KVASIR_CUBINS=$kit/cubins "$kit/kvasir" gpu-check | grep '^compiled' | tee "$kit/kernels" || true
if ! awk '{ if ($3 != $5) exit 1; lines++ } END { exit lines == 0 }' "$kit/kernels"; then
    echo "not all kernels are there" >&2
    exit 1
fi
tar -c -C "$kit" . | xz -T0 -6 >"$kit.tar.xz"
rm -r "$kit"
packed=$(stat -c %s "$kit.tar.xz")
tracked=$(git ls-files -z 2>/dev/null | xargs -0 -r du -cb 2>/dev/null | tail -1 | cut -f1)
needs=$(objdump -T "$binary" 2>/dev/null | grep -oE 'GLIBC_[0-9.]+' | sort -Vu | tail -1 || true)
echo "$kit.tar.xz: $((packed >> 20)) MiB, beside $((${tracked:-0} >> 20)) MiB of tracked files; it needs ${needs:-no glibc}"
[ $((packed + ${tracked:-0})) -le $most ] || { echo "together more than $((most >> 20)) MiB" >&2; exit 1; }
