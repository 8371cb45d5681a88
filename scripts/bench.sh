#!/usr/bin/env bash
# Measures what the guard costs, guarded and unguarded servers by turns; see scripts/bench.py. About ten minutes on two cores.
#
#   scripts/bench.sh [--version V] [--rounds N]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rig_home=$(scripts/env.sh)
export PD_GUARD_RIG_HOME=$rig_home
exec "$rig_home/venv/bin/python" scripts/bench.py "$@"
