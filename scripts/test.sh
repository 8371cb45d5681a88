#!/usr/bin/env bash
# Runs the tests.
#
#   scripts/test.sh [fast|engine|all] [pytest arguments]      default: all
#
# fast    unit and property tests, no SGLang; under a minute once the environment exists
# engine  real SGLang servers on the CPU, several versions; needs 10 GB of memory
#
# `scripts/test.sh engine -k release` runs what concerns one guard.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier=${1:-all}
[ $# -gt 0 ] && shift
case $tier in
    fast) paths=(tests/unit tests/property) ;;
    engine) paths=(tests/engine) ;;
    all) paths=(tests/unit tests/property tests/engine) ;;
    *) echo "usage: scripts/test.sh [fast|engine|all] [pytest arguments]" >&2; exit 2 ;;
esac

rig_home=$(scripts/env.sh)
export PD_GUARD_RIG_HOME=$rig_home
exec "$rig_home/venv/bin/python" -m pytest "${paths[@]}" "$@"
