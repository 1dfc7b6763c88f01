#!/usr/bin/env bash
# Measure on a machine that has torch, a GPU and no network:  bash benchmarks/gpu/bare.sh FOLDER [arguments of benchmarks.gpu.run]
# FOLDER holds archives (.tar.xz) of the packages that the machine lacks, such as vLLM and mars-ray's entry points; tables
# are printed, and figures and logs go to $OUT. An engine that vLLM cannot start is reported, and the others go on.
set -euo pipefail
folder=${1:?folder with archives of packages}; shift
OUT=${OUT:-out/gpu}; packages=/tmp/gpu-packages; mkdir -p "$OUT" "$packages" /tmp/gpu-logs
for archive in "$folder"/*.tar.xz; do tar -C "$packages" -xJf "$archive"; done
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD:$packages${PYTHONPATH:+:$PYTHONPATH}
trap 'tar -C /tmp -czf "$OUT/logs.tar.gz" gpu-logs' EXIT
python3 -m benchmarks.gpu.run --logs /tmp/gpu-logs --json "$OUT/gpu.jsonl" "$@"
