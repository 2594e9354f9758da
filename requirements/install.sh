#!/bin/sh
# install.sh VENV LOCK: makes VENV and installs the pinned packages of requirements/LOCK.lock;
# `make install` and `make bench-env` run it.
# Uses uv where it is on the PATH, else venv and pip. PYTHON chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

venv=$1
lock=requirements/$2.lock
shift 2
supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

# Version managers leave commands on the PATH that only say "not found": run each candidate.
runs() { "$1" -c "$supported" >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        runs "$PYTHON" && echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3 python3.12 python3.13 python; do
        if runs "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null 2>&1; then
        UV_PYTHON_DOWNLOADS=never uv python find '>=3.11,<3.14' 2>/dev/null || true
    fi
}

if ! runs "$venv/bin/python"; then
    python=$(find_python || true)
    if [ -z "$python" ]; then
        echo "install: no Python 3.11 to 3.13 found${PYTHON:+ (PYTHON=$PYTHON is none)}." >&2
        echo "install: install Python 3.11, or name one: make install PYTHON=/path/to/python3.11" >&2
        exit 1
    fi
    rm -rf "$venv"
    if command -v uv >/dev/null 2>&1; then
        UV_PYTHON_DOWNLOADS=never uv venv --quiet --python "$(command -v "$python")" "$venv"
    elif ! "$python" -m venv "$venv"; then
        echo "install: '$python -m venv' failed; on Debian it is the package python3-venv." >&2
        exit 1
    fi
fi

version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$version" != 3.11 ]; then
    echo "install: the lock was resolved and tested for Python 3.11, this is $version: going on," >&2
    echo "install: but a pinned package may have no build for it. PYTHON=python3.11 is the safe way." >&2
fi

# A folder of wheels that pip is told to look in (for a CPU build of torch, say); uv has to be
# told, too. With --no-deps the lock alone decides what is installed: packages that it leaves out
# (torchvision, torchaudio, torchcodec) break transformers beside a CPU torch.
if command -v uv >/dev/null 2>&1; then
    links=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
    install() { uv pip install --python "$venv/bin/python" "$@"; }
else
    links=
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
    install() { "$venv/bin/python" -m pip install --no-compile ${CI:+--quiet} "$@"; }
fi
# Whitespace separates several folders.
for link in $links; do
    set -- "$@" --find-links "$link"
done

echo "install: $(grep -c == $lock) pinned packages into $venv, up to 3.5 GB on disk"
install "$@" --no-deps -r $lock

# The public index has torch for Linux as a CUDA build, whose libraries are packages of their own.
if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
    torch=$(grep '^torch==' $lock)
    echo "install: this $torch is not a CPU build: adding the libraries it needs (some GB)." >&2
    echo "install: to avoid that, point PIP_FIND_LINKS at a folder with a CPU wheel of it." >&2
    install "$@" "$torch"
fi
