#!/usr/bin/env bash
# Measures what the guard costs, guarded and unguarded servers by turns; see scripts/bench.py. About ten minutes on two cores.
# With --batch: what the limit on one write brings and costs; see scripts/bench_batch.py.
# With --ownership: what the look at a batch's pages costs by itself; see scripts/bench_ownership.py.
#
#   scripts/bench.sh [--version V] [--rounds N] [--flags="FLAG ..."]
#   scripts/bench.sh --batch [--version V] [--rounds N] [--mib M] [--wire W]
#   scripts/bench.sh --ownership [--device cpu|cuda] [--rounds N]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rig_home=$(scripts/env.sh)
export PD_GUARD_RIG_HOME=$rig_home
script=scripts/bench.py
case ${1:-} in
    --batch | --ownership)
        script=scripts/bench_${1#--}.py
        shift
        ;;
esac
exec "$rig_home/venv/bin/python" "$script" "$@"
