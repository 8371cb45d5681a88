#!/usr/bin/env bash
# Builds the CPU rig: one virtual environment, and one folder per SGLang version.
#
#   scripts/env.sh [VERSION ...]     default: every version the tests use
#
# Safe to run again: what is there already is kept. Everything lies under
# $PD_GUARD_RIG_HOME (default ~/.cache/sglang-pd-guard), about 9 GB.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
rig_home=${PD_GUARD_RIG_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-pd-guard}
all_versions=(0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23 0.5.12.post1 0.5.15.post1)
debian_packages=(libibverbs1 librdmacm1 libnuma1)
python=${PYTHON:-python3.11}

say() { printf 'rig: %s\n' "$*" >&2; }
die() { printf 'rig: %s\n' "$*" >&2; exit 3; }

command -v "$python" >/dev/null || die "Python 3.11 not found; install it (apt-get install python3.11 python3.11-venv) or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || die "$python is not Python 3.11; set PYTHON to one"
"$python" -c 'import ensurepip, venv' 2>/dev/null || debian_packages+=("$(basename "$python")-venv")
[ "$(uname -m)" = x86_64 ] || die "the CPU rig needs x86_64 (Mooncake's and SGLang's wheels), this is $(uname -m)"

missing=()
for p in "${debian_packages[@]}"; do
    dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || die "Debian packages missing, run: sudo apt-get update && sudo apt-get install -y ${missing[*]}"
    say "installing Debian packages: ${missing[*]}"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"; } >&2 \
        || die "could not install ${missing[*]}; install them by hand and run this again"
fi

mkdir -p "$rig_home"
exec 9>"$rig_home/.lock"
flock 9

venv=$rig_home/venv
stamp=$(cat "$root"/tests/rig/requirements*.txt | sha256sum | cut -c1-16)
free_gb=$(($(df -Pk "$rig_home" | awk 'NR==2 {print $4}') / 1048576))
if [ "$(cat "$venv/.rig-stamp" 2>/dev/null)" != "$stamp" ]; then
    [ "$free_gb" -ge 12 ] || die "needs 12 GB free under $rig_home, there are $free_gb; set PD_GUARD_RIG_HOME to a larger disk"
    say "building $venv (PyTorch, Mooncake, the router: some minutes, about 7 GB)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -q --no-deps -r "$root/tests/rig/requirements.txt" -r "$root/tests/rig/requirements-dev.txt"
    echo "$stamp" >"$venv/.rig-stamp"
fi
# The rig's own distribution and the product, both editable: a change in the tree is live at once.
"$venv/bin/pip" install -q --no-deps --no-build-isolation -e "$root/tests/rig" -e "$root"

for v in "${@:-${all_versions[@]}}"; do
    overlay=$rig_home/sglang-$v
    [ -e "$overlay/.complete" ] && continue
    [ "$free_gb" -ge 2 ] || die "needs 2 GB free under $rig_home for SGLang $v, there are $free_gb"
    say "adding SGLang $v"
    rm -rf "$overlay"
    legacy=()
    [ "$(printf '%s\n' "$v" 0.5.22 | sort -V | head -n 1)" = 0.5.22 ] || legacy=(-r "$root/tests/rig/requirements-legacy.txt")
    "$venv/bin/pip" install -q --no-deps --target "$overlay" "sglang==$v" ${legacy[@]+"${legacy[@]}"}
    touch "$overlay/.complete"
done
echo "$rig_home"
