"""The target's chat template: prompts as token ids, and the ids of a response that the corpus brings itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from data.conversations import Message


class ChatTemplate:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]):
        """arguments: target.chat_template_kwargs."""
        self._tokenizer = tokenizer
        self._arguments = arguments

    def prompt_ids(self, messages: Sequence[Message], where: str) -> list[int]:
        """The conversation so far and the opening of the assistant's turn."""
        return self._encode(self._render(messages, where, is_prompt=True))

    def response_ids(self, messages: Sequence[Message], response: Message, where: str) -> list[int]:
        """What the target would have to emit after `prompt_ids(messages)` to give `response`, its EOS included.

        Prompt and response are tokenised apart, as decoding does. Raises ValueError if the template is not prefix-stable
        (the rendered conversation must begin with the rendered prompt) or does not end the turn with the EOS token.
        """
        prompt = self._render(messages, where, is_prompt=True)
        whole = self._render([*messages, response], where, is_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError(
                f"{where}: the chat template is not prefix-stable: the conversation with its response does not begin with "
                f"the prompt; it differs after {_common_start(prompt, whole)[-40:]!r}. Set target.chat_template_kwargs "
                "(e.g. enable_thinking), or data.responses.generate=true"
            )
        ids = self._encode(whole[len(prompt) :])
        eos = self._tokenizer.eos_token_id
        if eos not in ids:
            raise ValueError(
                f"{where}: the chat template does not end the assistant's turn with the EOS token "
                f"{self._tokenizer.eos_token!r}; correct the tokenizer's eos_token, or set data.responses.generate=true"
            )
        # the template's own line break after the turn is never generated
        return ids[: len(ids) - ids[::-1].index(eos)]

    def text(self, ids: Sequence[int]) -> str:
        """A response as text, without special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _render(self, messages: Sequence[Message], where: str, is_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=is_prompt, **self._arguments
            )
        except TemplateError as error:
            raise ValueError(
                f"{where}: the target's chat template refuses this conversation: {error}; correct or remove the row"
            ) from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        # the template has already written the special tokens
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _common_start(left: str, right: str) -> str:
    length = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    return left[:length]
