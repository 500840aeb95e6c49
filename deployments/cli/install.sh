#!/usr/bin/env bash
# Makes $VENV and installs the target given ('.' or '.[dev]') with the exact versions of constraints.txt.
#
# Needs: PYTHON (may be empty: then the first interpreter that fits is taken) and VENV.
# While pip works, $VENV/.brimful-installing exists. Found at the start, it means that an earlier installation was cut
# off and the folder may hold half a package: then it is made anew (downloads are still in pip's cache).
set -euo pipefail

readonly target=$1
readonly venv=${VENV:?}
readonly unfinished=$venv/.brimful-installing

fits() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        fits "$PYTHON" && { echo "$PYTHON"; return; }
        echo "error: PYTHON=$PYTHON is not a Python 3.11 or newer with the modules venv and ensurepip" >&2
        return 1
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        fits "$candidate" && { echo "$candidate"; return; }
    done
    echo "error: no Python 3.11 or newer with the modules venv and ensurepip is on the PATH;" \
        "install one (Debian: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3" >&2
    return 1
}

if [[ -e $unfinished ]]; then
    echo "An earlier installation in $venv was cut off: making it anew"
    rm -rf "$venv"
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "Creating $venv with $("$python" --version) ($(command -v "$python"))"
    mkdir -p "$venv"
    touch "$unfinished"
    "$python" -m venv "$venv"
fi

touch "$unfinished"
"$venv/bin/python" -P deployments/cli/install_progress.py "$target"
rm "$unfinished"
