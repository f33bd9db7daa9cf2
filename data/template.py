"""The target's chat template: prompts as token ids, the ids of a turn that the corpus brings, and generated ids as a message.

What a server does with a request is done here the same way: tool calls reach the template as mappings, a row may think or
not whatever the recipe's default, and of a generated turn only what a client gets back goes into the history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from data.conversations import Message
from data.replies import reply_of_text

Tools = Sequence[Mapping[str, Any]]
"""Function schemas in OpenAI's shape, as the template takes them."""


class ChatTemplate:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]):
        """arguments: target.chat_template_kwargs."""
        self._tokenizer = tokenizer
        self._arguments: dict[str, Any] = dict(arguments)
        # only such a template tells thinking from the answer; in others the text stays one piece
        self._knows_thinking = "reasoning_content" in str(tokenizer.chat_template)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Tools = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """The conversation so far and the opening of the assistant's turn, as a server would show it to the target.

        thinking overrides `enable_thinking`; None leaves it to target.chat_template_kwargs.
        """
        return self.encode(self._render(messages, where, tools, thinking, is_prompt=True))

    def response_ids(
        self,
        messages: Sequence[Message],
        response: Message,
        where: str,
        tools: Tools = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """What the target would have to emit after `prompt_ids(messages)` to give `response`, its EOS included.

        Prompt and response are tokenised apart, as decoding does. Raises ValueError if the template is not prefix-stable
        (the rendered conversation must begin with the rendered prompt) or does not end the turn with the EOS token.
        """
        prompt = self._render(messages, where, tools, thinking, is_prompt=True)
        whole = self._render([*messages, response], where, tools, thinking, is_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError(
                f"{where}: the chat template is not prefix-stable: the conversation with its response does not begin with "
                f"the prompt; it differs after {_common_start(prompt, whole)[-40:]!r}. Set target.chat_template_kwargs "
                "(e.g. enable_thinking), or data.responses.generate=true"
            )
        ids = self.encode(whole[len(prompt) :])
        eos = self._tokenizer.eos_token_id
        if eos not in ids:
            raise ValueError(
                f"{where}: the chat template does not end the assistant's turn with the EOS token "
                f"{self._tokenizer.eos_token!r}; correct the tokenizer's eos_token, or set data.responses.generate=true"
            )
        # the template's own line break after the turn is never generated
        return ids[: len(ids) - ids[::-1].index(eos)]

    def reply(self, prompt_ids: Sequence[int], ids: Sequence[int], tools: Tools = ()) -> Message:
        """The generated `ids` as the message that a client would get and send back: thinking and tool calls apart.

        Such a message rendered again is what serving shows at the next turn; it need not be what was generated.
        """
        opened = self._knows_thinking and self._is_thinking(prompt_ids)
        return reply_of_text(self.text(ids), self._knows_thinking, opened, tools)

    def text(self, ids: Sequence[int]) -> str:
        """A response as text, without special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    @property
    def reads_thinking(self) -> bool:
        """Whether `enable_thinking` changes what the target is shown."""
        user = [{"role": "user", "content": "x"}]
        with_, without = (self.prompt_ids(user, "a probe", thinking=t) for t in (True, False))
        return with_ != without

    @property
    def reads_tools(self) -> bool:
        """Whether function schemas reach the target."""
        return "tools" in str(self._tokenizer.chat_template)

    def turn_opening_ids(self) -> list[int]:
        """Ids that begin every assistant's turn, whether it thinks or not: `<|im_start|>assistant` in ChatML."""
        user = [{"role": "user", "content": "x"}]
        before, after = (self._render(user, "the opening", (), None, p) for p in (False, True))
        return self.encode(after[len(before) :].partition("<think>")[0].rstrip("\n"))

    def encode(self, text: str) -> list[int]:
        """Ids of a text that holds its special tokens, as a rendered conversation does."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def last_tokens(self, num_tokens: int) -> str:
        """Text of the vocabulary's last entries, where two versions of a tokenizer differ first."""
        size = len(self._tokenizer)
        text = self._tokenizer.decode(list(range(size - num_tokens, size)))
        assert isinstance(text, str)
        return text

    @property
    def bos_ids(self) -> list[int]:
        """What tokenising a bare text puts before it."""
        bos = self._tokenizer.bos_token_id
        return [bos] if isinstance(bos, int) else []

    def _is_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside a thinking block that the template opened."""
        tail = self.text(prompt_ids[-16:])
        return tail.rfind("<think>") > tail.rfind("</think>")

    def _render(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Tools,
        thinking: bool | None,
        is_prompt: bool,
    ) -> str:
        arguments = dict(self._arguments)
        if thinking is not None:
            arguments["enable_thinking"] = thinking
        try:
            text = self._tokenizer.apply_chat_template(
                [_with_mappings(message, where) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=is_prompt,
                **arguments,
            )
        except TemplateError as error:
            raise ValueError(
                f"{where}: the target's chat template refuses this conversation: {error}; correct or remove the row"
            ) from error
        assert isinstance(text, str)
        return text


def _with_mappings(message: Message, where: str) -> Message:
    """Tool calls carry their arguments as JSON text in OpenAI's shape; templates, and servers before them, want mappings."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_call_with_mapping(c, where) for c in message["tool_calls"]]}


def _call_with_mapping(call: Any, where: str) -> dict[str, Any]:
    found = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError(
            f"{where}: a tool call is not {{function: {{name, arguments}}}}: {json.dumps(call, default=str)[:200]}; "
            "correct or remove the row"
        )
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: the arguments of tool call {found['name']!r} are not JSON ({error}); correct or remove the row"
            ) from error
    return {**call, "function": {"name": found["name"], "arguments": arguments}}


def _common_start(left: str, right: str) -> str:
    length = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    return left[:length]
