"""Command lines for vLLM, and what its log is read as."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftmill.builder.serving.command import (
    ServerSpec,
    ServeSettings,
    fingerprint,
    printable_command,
    serve_command,
    serve_environment,
)
from draftmill.builder.serving.log import last_line, why_it_ended
from draftmill.builder.serving.state import free_port


def options(command: list[str]) -> dict[str, str]:
    """Each option with the value that follows it."""
    following = [*command[1:], ""]
    return {
        option: "" if value.startswith("--") else value
        for option, value in zip(command, following, strict=True)
        if option.startswith("--")
    }


def extraction(tmp_path: Path, **settings: Any) -> ServerSpec:
    return ServerSpec(
        kind="extract",
        model="org/big",
        name="big",
        settings=ServeSettings(**settings),
        layer_ids=(2, 15, 27, 30),
        staging=tmp_path / "staging",
    )


def test_generation_server() -> None:
    settings = ServeSettings(
        tensor_parallel_size=8,
        max_model_len=4096,
        reasoning_parser="kimi_k2",
        args=("--trust-remote-code",),
        generate_args=("--max-num-seqs", "512"),
        extract_args=("--max-num-seqs", "8"),
    )
    spec = ServerSpec(kind="generate", model="org/big", name="big", settings=settings)
    command = serve_command(spec, engine="gpu", port=1234)
    assert command[:5] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "org/big",
    ]
    found = options(command)
    assert found["--served-model-name"] == "big"
    assert (found["--host"], found["--port"]) == ("127.0.0.1", "1234")
    assert found["--tensor-parallel-size"] == "8"
    assert found["--max-model-len"] == "4096"
    assert found["--reasoning-parser"] == "kimi_k2"
    assert found["--max-num-seqs"] == "512"
    assert {"--enable-prefix-caching", "--trust-remote-code"} <= found.keys()
    assert "--enforce-eager" not in found


def test_extraction_server(tmp_path: Path) -> None:
    spec = extraction(tmp_path, reasoning_parser="kimi_k2", generate_args=("--no",))
    found = options(serve_command(spec, engine="cpu", port=1))
    assert {"--no-enable-prefix-caching", "--enforce-eager"} <= found.keys()
    assert not {"--reasoning-parser", "--no", "--tensor-parallel-size"} & found.keys()
    speculative = json.loads(found["--speculative-config"])
    assert speculative["method"] == "extract_hidden_states"
    assert speculative["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]
    }
    transfer = json.loads(found["--kv-transfer-config"])
    assert transfer["kv_connector_module_path"] == "draftmill_connector"
    assert transfer["kv_connector_extra_config"]["shared_storage_path"] == str(tmp_path / "staging")
    with pytest.raises(ValueError, match="layer_ids"):
        replace(spec, layer_ids=())


def test_evaluation_server(tmp_path: Path) -> None:
    spec = ServerSpec(kind="eval", model="m", name="m", draft=tmp_path, spec_tokens=5)
    found = options(serve_command(spec, engine="gpu", port=1))
    assert json.loads(found["--speculative-config"]) == {
        "method": "eagle3",
        "model": str(tmp_path),
        "num_speculative_tokens": 5,
    }
    plain = options(serve_command(replace(spec, draft=None), engine="gpu", port=1))
    assert "--speculative-config" not in plain


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    spec = extraction(tmp_path, kv_cache_gib=3)
    found = serve_environment(spec, engine="cpu", connector_folder=tmp_path)
    assert found["PYTHONPATH"] == f"{tmp_path}:/elsewhere"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert "HF_HUB_OFFLINE" not in found
    local = replace(spec, model=str(tmp_path), kind="eval")
    found = serve_environment(local, engine="gpu", connector_folder=tmp_path)
    assert found["HF_HUB_OFFLINE"] == "1"
    assert not {"PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE"} & found.keys()


def test_a_folder_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = ServerSpec(kind="generate", model="model", name="model")
    assert options(serve_command(spec, engine="gpu", port=1))["--model"] == str(tmp_path / "model")


def test_fingerprint_ignores_what_changes_nothing(tmp_path: Path) -> None:
    def of(spec: ServerSpec, port: int, **more: str) -> str:
        environment = serve_environment(spec, engine="gpu", connector_folder=tmp_path)
        return fingerprint(serve_command(spec, engine="gpu", port=port), environment | more)

    spec = extraction(tmp_path)
    assert of(spec, 1) == of(spec, 2) == of(spec, 1, PYTHONPATH="/x")
    assert of(spec, 1) != of(replace(spec, layer_ids=(1, 15, 27, 30)), 1)
    assert of(spec, 1) != of(extraction(tmp_path, max_model_len=9), 1)


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_printed_command_can_be_typed(tmp_path: Path, engine: Any) -> None:
    spec = extraction(tmp_path, args=("--note", "it's two words"))
    text = printable_command(
        spec, engine=engine, port=8000, host="0.0.0.0", connector_folder=tmp_path
    )
    words = shlex.split(text.replace("\\\n", ""))
    command = serve_command(spec, engine=engine, port=8000, host="0.0.0.0")
    if engine == "gpu":
        assert words[words.index("serve") - 1] == "vllm"
        assert words[words.index("serve") + 1 :] == command[4:]
    else:
        assert words[-len(command) :] == command
    assert f"PYTHONPATH={tmp_path}" in text
    assert max(len(line) for line in text.splitlines()) < 400


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"kv_cache_gib": 0}, "kv_cache_gib"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}: "):
        ServeSettings(**settings)


def test_ports_are_free_and_not_for_outgoing_connections() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    assert all(20_000 <= port <= 32_000 for port in ports)


HEAD = "(EngineCore pid=81) ERROR 11-29 15:00:09 [core.py:402] "


@pytest.mark.parametrize(
    ("text", "code", "wanted"),
    [
        pytest.param(
            f"{HEAD}Traceback (most recent call last):\n{HEAD}  File x\n"
            f"{HEAD}ValueError: No available memory for the cache blocks.\n"
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause\n",
            1,
            "ValueError: No available memory for the cache blocks. (raise serve.kv_cache_gib or "
            "--gpu-memory-utilization) [exit code 1]",
            id="the child's reason, not the parent's",
        ),
        pytest.param(
            "usage: x\napi_server.py: error: unrecognized arguments: --nope\n",
            2,
            "api_server.py: error: unrecognized arguments: --nope (correct serve.args, or use a "
            "vLLM that knows them) [exit code 2]",
            id="wrong argument",
        ),
        pytest.param(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, no config.json in /m\n  more\n",
            1,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, no config.json in /m [exit code 1]",
            id="validation error",
        ),
        pytest.param(
            "INFO:     Started\nloading:  10%\rloading:  90%\r\n",
            -9,
            "killed by SIGKILL (is the machine out of memory?); last line: loading:  90%",
            id="killed",
        ),
        pytest.param("", None, "no reason given; last line: starting", id="empty"),
    ],
)
def test_why_it_ended(tmp_path: Path, text: str, code: int | None, wanted: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert why_it_ended(log, code) == wanted


def test_last_line_is_readable(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == "starting"
    log.write_text("\x1b[0;36m(Worker pid=8)\x1b[0;0m INFO 11-29 14:59:56 [a.py:5] Loading\n\n")
    assert last_line(log) == "Loading"
    log.write_bytes(b"x" * 1000 + b"\xff\n")
    assert len(last_line(log)) == 300


def test_rotary_embedding_of_mla_on_the_cpu(tmp_path: Path) -> None:
    """vLLM's own is wrong there; other models and GPUs keep theirs."""
    config = {
        "model_type": "kimi_k25",
        "text_config": {
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "vocab_size": 512,
            "max_position_embeddings": 64,
            "kv_lora_rank": 32,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = replace(extraction(tmp_path), model=str(tmp_path))
    found = options(serve_command(spec, engine="cpu", port=1))
    assert json.loads(found["--compilation-config"])["custom_ops"] == ["all", "-rotary_embedding"]
    assert "--compilation-config" not in options(serve_command(spec, engine="gpu", port=1))
    del config["text_config"]["kv_lora_rank"]  # type: ignore[attr-defined]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "--compilation-config" not in options(serve_command(spec, engine="cpu", port=1))
