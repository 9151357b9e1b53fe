#!/bin/sh
# Makes the virtual environment DIR with skyinfra and EXTRAS, pinned by constraints.txt: tools/venv.sh DIR EXTRAS
set -eu
dir=$1
extras=$2
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "skyinfra needs Python 3.11 or later; $python is $("$python" --version 2>&1). Set PYTHON to a newer one." >&2
  exit 1
}
if [ ! -x "$dir/bin/python" ]; then
  "$python" -m venv "$dir" || {
    # Debian keeps ensurepip in a package of its own.
    [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv
    "$python" -m venv "$dir"
  }
fi
# Not compiled: most of it is never imported, and what is compiles itself.
"$dir/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable ".[$extras]"
