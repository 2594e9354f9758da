"""Given answers under the chat templates of several model families, with a real BPE tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.builder.requests.prefill import after_turn, given_completion
from draftmill.manifests.errors import RejectedError

pytestmark = pytest.mark.slow  # importing transformers takes seconds

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# name → (template, end of an answer)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "headers": (CHATML.replace("<|im_end|>\n", "<|im_end|>"), "<|im_end|>"),
    "trimmed": (CHATML.replace("m.content", "m.content | trim"), "<|im_end|>"),
    "inst": (
        "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        "</s>",
    ),
    "empty thought in the answer": (
        CHATML.replace(
            "{{ m.content }}",
            "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
            "{{ m.content }}",
        ),
        "<|im_end|>",
    ),
    "empty thought in the prompt": (
        CHATML.replace(
            "{{ m.content }}",
            "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
            "{{ m.content }}",
        ).replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}"),
        "<|im_end|>",
    ),
    "plain": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        "",
    ),
}
DROPPED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

# As in today's models: a run of line feeds is one piece, whatever follows.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

words = st.text(alphabet="ab .!\n\u00e9\u7d20", min_size=1, max_size=30).filter(str.strip)
talks = st.lists(st.tuples(words, words), min_size=1, max_size=3).map(
    lambda turns: [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
)


class Tokenizer:
    """What a server's /tokenize and /detokenize do, in this process."""

    url = "here"

    def __init__(self) -> None:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        text = "assistant: a.\n\nuser: b!\n\n\n [INST] aab [/INST] ab \n a\n\nassistant:\n "
        bpe.train_from_iterator([text] * 9, trainer)
        self._fast: Any = PreTrainedTokenizerFast(tokenizer_object=bpe)
        self.template = CHATML

    async def tokenize(self, request: Mapping[str, Any]) -> list[int]:
        return list(
            self._fast.apply_chat_template(
                request["messages"],
                chat_template=self.template,
                add_generation_prompt=request["add_generation_prompt"],
                return_dict=True,
            )["input_ids"]
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self._fast.decode(token_ids))

    async def given(self, messages: list[dict[str, str]]) -> tuple[list[int], str, str]:
        """(ids of the whole sample, text of its prompt, text of its completion)."""
        after = await after_turn(self, None)
        found = await given_completion(json.dumps({"messages": messages}), self, after)
        return (
            found.token_ids.tolist(),
            await self.detokenize(found.prompt_token_ids.tolist()),
            await self.detokenize(found.completion_token_ids.tolist()),
        )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=talks)
@settings(max_examples=40)
def test_the_answer_ends_where_a_server_stops(
    tokenizer: Tokenizer, name: str, messages: list[dict[str, str]]
) -> None:
    tokenizer.template, end = TEMPLATES[name]

    async def body() -> None:
        whole = await tokenizer.tokenize({"messages": messages, "add_generation_prompt": False})
        prompt = await tokenizer.tokenize(
            {"messages": messages[:-1], "add_generation_prompt": True}
        )
        if whole[: len(prompt)] != prompt:
            # white space at the start of the answer became one token with the prompt's end
            assert messages[-1]["content"][0].isspace()
            with pytest.raises(RejectedError, match="in another way once it is answered"):
                await tokenizer.given(messages)
            return
        try:
            ids, before, said = await tokenizer.given(messages)
        except RejectedError as error:
            # without an end of turn, white space at the end of the answer joins the template's
            if name != "plain" or "after the end of the turn" not in str(error):
                raise
            return
        assert ids == whole[: len(ids)]
        assert before == await tokenizer.detokenize(prompt)
        assert not (await tokenizer.detokenize(whole[len(ids) :])).strip()
        assert said.endswith(end)
        assert said.count(end) == 1 or not end
        answer = messages[-1]["content"].strip()
        assert said.removesuffix(end).strip().removeprefix("<think>\n\n</think>").strip() == answer
        if name == "empty thought in the prompt":
            assert "<think>" not in said

    asyncio.run(body())


@given(messages=talks)
@settings(max_examples=20)
def test_a_mark_that_is_dropped_later_is_told(
    tokenizer: Tokenizer, messages: list[dict[str, str]]
) -> None:
    tokenizer.template = DROPPED
    with pytest.raises(RejectedError, match="tokens are the same"):
        asyncio.run(tokenizer.given(messages))
