#!/usr/bin/env bash
# Makes .venv with Python 3.12, everything in requirements.txt and requirements-peers.txt, and Miles itself in editable
# form.
# Safe to repeat after a failure or an interruption: what was downloaded is kept until the set-up has succeeded.
# PYTHON=... names the interpreter to use. uv installs in a third of pip's time and 2.5 GB less space at the peak.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME  # without .pyc files SGLang takes three times as long to start
uv_version=0.13.9
needed_gb=6
venv=$PWD/.venv
log=$PWD/.venv.cache/setup.log
unfinished=$venv/.unfinished

fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

runs_python312() {
  "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python() {  # by running each candidate: a pyenv shim exists even where pyenv has selected another version
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    runs_python312 "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.12."
    echo "$PYTHON"
    return
  fi
  for candidate in python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    if runs_python312 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.12 found, neither on the path nor among pyenv's versions." \
    "Install one (apt install python3.12 python3.12-venv, or pyenv install 3.12), or name one:" \
    "make setup PYTHON=/path/to/python3.12"
}

make_venv() {
  local python
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python lacks the modules venv and ensurepip (on Debian and Ubuntu: apt install python3.12-venv)."
  echo "setup: making .venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv" || fail "$python could not make $venv."
}

check_disk() {  # counts what an earlier run has already put there
  local free_kb have_kb
  have_kb=$(du -sck "$venv" .venv.cache | tail -n 1 | cut -f1)
  free_kb=$(df -Pk "$venv" | awk 'NR == 2 {print $4}')
  [ $((free_kb + have_kb)) -ge $((needed_gb * 1000 * 1000)) ] ||
    fail "not enough disk: $((free_kb / 1000)) MB are free at $PWD, and the packages take about $needed_gb GB."
}

logged() {  # runs a command; its output goes to the log, and to the screen without the list of what was installed
  "$@" 2>&1 | tee "$log" | { grep -vE '^ [+~-] |^WARNING: |^ +Downloaded ' || true; }
}

explain_failure() {
  if grep -q 'No space left on device' "$log"; then
    fail "the disk is full: the packages take about $needed_gb GB. Make room, then run the same command again."
  elif grep -qE 'from versions: none|Failed to fetch|Failed to download|error sending request' "$log"; then
    rm "$unfinished"  # packages are installed only once all are there: nothing was touched
    fail "no network: the package index could not be reached (see above). Run the same command again when it can."
  fi
  fail "an installation failed (see above; all of its output is in $log)."
}

mkdir -p .venv.cache/tmp
exec 9>.venv.lock
flock 9  # two set-ups at once would write into the same folder
started=$SECONDS
if [ -e "$unfinished" ] || ! runs_python312 "$venv/bin/python"; then
  make_venv
fi
check_disk
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
index=${PIP_INDEX_URL:-$(pip config get global.index-url 2>/dev/null || true)}
if [ -n "$index" ]; then
  export UV_DEFAULT_INDEX=$index  # uv does not read pip's settings
fi
# The cache lies on the environment's disk: uv then links its files instead of copying them.
export TMPDIR=$PWD/.venv.cache/tmp UV_CACHE_DIR=$PWD/.venv.cache/uv VIRTUAL_ENV=$venv
touch "$unfinished"
echo "setup: installing the packages of requirements.txt (2.5 GB to download)"
logged pip install --quiet "uv==$uv_version" || explain_failure
logged "$venv/bin/uv" pip install --compile-bytecode -r requirements.txt -e . || explain_failure
logged "$venv/bin/uv" pip install --compile-bytecode --no-deps -r requirements-peers.txt || explain_failure
rm -rf "$venv"/lib/python3.12/site-packages/{tests,scripts}  # verl's wheel brings them; they would hide ours
rm -rf "$unfinished" .venv.cache
touch "$venv/.installed"
echo "setup: done in $((SECONDS - started)) s"
