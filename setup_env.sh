# Sourced by run_train.sh and run_tests.sh: sets PYTHON to an interpreter with everything that $1 needs
# ("run" or "test"), setting up .venv the first time. An active Python that has it all is used as it is.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

meshloom_ready() { # INTERPRETER PURPOSE: does it have our dependencies, within pyproject.toml's bounds?
    "$1" "$root/check_env.py" "$2" >/dev/null 2>&1
}

meshloom_find_python() { # a Python 3.10 or later to make .venv with
    local candidate
    for candidate in "${PYTHON:-}" python3 python python3.13 python3.12 python3.11 python3.10; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.10 or later found; install one, or set PYTHON to its path" >&2
    return 1
}

meshloom_setup() { # PURPOSE
    local base
    base=$(meshloom_find_python) || exit 2
    if meshloom_ready "$base" "$1"; then
        PYTHON=$base
        return
    fi
    PYTHON="$root/.venv/bin/python"
    if [ -x "$PYTHON" ] && meshloom_ready "$PYTHON" "$1"; then
        return
    fi
    echo "setting up $root/.venv (once; PyTorch is a large download)" >&2
    { [ -x "$PYTHON" ] || "$base" -m venv "$root/.venv"; } &&
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$root[test]" -c "$root/constraints.txt" >&2 &&
        meshloom_ready "$PYTHON" "$1" && return
    echo "error: the set-up of $root/.venv failed; see above. To use a Python of your own: PYTHON=/path/to/python $0" >&2
    [ -x "$PYTHON" ] && "$PYTHON" "$root/check_env.py" "$1" >&2
    exit 1
}
