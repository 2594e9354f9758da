"""The states that benches run on are those of the layers they are named after."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftmill.manifests.codec.numbers import to_floats

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_layers_are_those_of_transformers(model_folder: Path, tmp_path: Path) -> None:
    from draftmill.tools.bench import states as bench_states

    path = bench_states.saved_states(model_folder, tmp_path, num_tokens=600)
    states = np.load(path)
    assert states.shape == (600, 4, 32)
    assert "-2-4-5-8-600" in path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer(bench_states.text(600))["input_ids"][: bench_states.WINDOW]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.inference_mode():
        layers = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for place, layer in enumerate((2, 4, 5)):
        wanted = layers[layer][0].to(torch.bfloat16).float().numpy()
        assert np.array_equal(to_floats(states[: len(ids), place]), wanted)
    # transformers' last entry is after the final norm, whose weight is 1 here
    last = to_floats(states[: len(ids), 3])
    normed = last / np.sqrt((last**2).mean(axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(normed, layers[8][0].numpy(), rtol=0.02, atol=0.02)


def test_states_are_made_once(model_folder: Path, tmp_path: Path) -> None:
    from draftmill.tools.bench import states as bench_states

    path = bench_states.saved_states(model_folder, tmp_path, num_tokens=20)
    before = path.stat().st_mtime_ns
    assert bench_states.saved_states(model_folder, tmp_path, num_tokens=20) == path
    assert path.stat().st_mtime_ns == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert json.loads((model_folder / "config.json").read_text())["num_hidden_layers"] == 8
