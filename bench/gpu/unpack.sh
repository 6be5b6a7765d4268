#!/usr/bin/env bash
# unpack.sh KIT.tar.xz [ARGUMENTS of run.py]: on the machine with the GPU, in a copy of this repository: unpacks what
# pack.sh has packed beside the tree's build folder and runs the checks with it. Results go to --out.
set -euo pipefail
cd "$(dirname "$0")/../.."
kit=$PWD/target/bench/gpu/unpacked
rm -rf "$kit"
mkdir -p "$kit"
# Python's tarfile reads .xz where neither xz nor a tar that knows it is installed.
python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$1" "$kit"
shift
# The driver, where the loader does not know it.
if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
    driver=$(find /usr/local/nvidia /usr/lib /usr/lib64 /usr/local/cuda* -name libcuda.so.1 -not -path '*stubs*' 2>/dev/null | head -1) || true
    [ -z "$driver" ] || export LD_LIBRARY_PATH=$(dirname "$driver")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
nvidia-smi 2>/dev/null || echo "no nvidia-smi" >&2
exec python3 bench/gpu/run.py --bin "$kit" "$@"
