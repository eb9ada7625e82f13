"""Prompts become tokens: messages through the tokenizer's chat template, plain texts as they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from paddock.data.tables import bad_row
from paddock.data.templates import TOO_LONG, TemplateTimeLimit, Watch, try_template
from paddock.errors import UserError
from paddock.facts.files import as_messages

Message = dict[str, Any]
Messages = str | list[Message]
"""A plain text, or the turns of a conversation."""


MARK = "~answer~"
"""Stands for an answer where a template is asked what it writes around answers."""
REMEDY = "mend the tokenizer's chat_template, or set data.apply_chat_template_kwargs.chat_template"
ONLY_TOKENS = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}


class PromptEncoder:
    """Turns prompts into token ids. Thread-safe while no other code changes the tokenizer's padding or truncation."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        tokenizer("")  # drops a padding or truncation that the tokenizer came with: threads must not find one to drop

    def encode(self, prompts: Sequence[Messages], locations: Sequence[str], column: str) -> list[list[int]]:
        """Returns token ids of each prompt; `locations` and `column` name a prompt that cannot be encoded. A last
        message of the assistant's is the beginning of its answer: the policy goes on behind its last character."""
        texts = self.render(prompts, locations, column, continued=True)
        encoded: list[list[int]] = [[] for _ in prompts]
        for plain in (True, False):  # a chat template writes its special tokens itself
            chosen = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) is plain]
            if chosen:
                rows = self.tokenizer([texts[i] for i in chosen], add_special_tokens=plain, **ONLY_TOKENS)["input_ids"]
                for i, ids in zip(chosen, rows, strict=True):
                    encoded[i] = ids
        for ids, location in zip(encoded, locations, strict=True):
            if not ids:
                raise bad_row(location, column, "becomes no tokens: there is nothing to answer", "write a prompt")
        return encoded

    def render(
        self, prompts: Sequence[Messages], locations: Sequence[str], column: str, continued: bool = False
    ) -> list[str]:
        """Returns each prompt as the text to tokenise. `continued`: a last message of the assistant's is not ended."""
        asked = list(zip(prompts, locations, strict=True))
        chat = next(((prompt, location) for prompt, location in asked if not isinstance(prompt, str)), None)
        if chat is None:
            return [self.rendered(prompt, location, column) for prompt, location in asked]
        self._require_template(chat, column, continued)
        texts = []
        with limited(chat[1], column) as begin:
            for prompt, location in asked:
                begin(location)
                texts.append(self.rendered(prompt, location, column, continued))
        return texts

    def _require_template(self, chat: tuple[Messages, str], column: str, continued: bool) -> None:
        """Checks that there is a chat template, and that it ends: one conversation is tried in a process of its own."""
        prompt, location = chat
        if self.tokenizer.chat_template is None and "chat_template" not in self.template_kwargs:
            raise bad_row(
                location,
                column,
                "holds messages, and the tokenizer has no chat template to write them with",
                "use an instruct model, set data.apply_chat_template_kwargs.chat_template, or make prompts plain texts",
            )
        arguments = {**self.tokenizer.special_tokens_map, **self._arguments(prompt, continued)}
        template = arguments.pop("chat_template", None) or self.tokenizer.get_chat_template()
        if problem := try_template(template, prompt, arguments):
            raise bad_row(location, column, problem, REMEDY)

    def _arguments(self, prompt: Messages, continued: bool) -> dict[str, Any]:
        """Returns the template's arguments. Who sets add_generation_prompt has it as it is set."""
        if continued and "add_generation_prompt" not in self.template_kwargs and is_begun(prompt):
            return {**self.template_kwargs, "add_generation_prompt": False, "continue_final_message": True}
        return {"add_generation_prompt": True, **self.template_kwargs}

    def rendered(self, prompt: Messages, location: str, column: str, continued: bool = False) -> str:
        """Returns one prompt as the text that is tokenised, with no limit of time: `render` has one."""
        if isinstance(prompt, str):
            return whole_text(prompt, location, column)
        try:
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, **self._arguments(prompt, continued))
        except TemplateTimeLimit:
            raise
        except Exception as error:  # a template is a program of its own: it raises what it likes
            reason = f"the chat template refuses it: {type(error).__name__}: {error}"
            raise bad_row(location, column, reason, "mend the row's messages, or change the template") from error
        return whole_text(text, location, column)

    @cached_property
    def closing(self) -> list[int]:
        """The tokens that the chat template writes behind an answer: the end of the turn, often with a line break."""
        turns: list[Message] = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
        ended = PromptEncoder(self.tokenizer, {**self.template_kwargs, "add_generation_prompt": False})
        [text] = ended.render([turns], ["a conversation"], "prompt")
        return self.tokenizer(text.rpartition(MARK)[2], add_special_tokens=False, **ONLY_TOKENS)["input_ids"]

    def identity(self) -> bytes | None:
        """Equal where every prompt gets equal tokens; None where that cannot be told."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        template = str(self.template_kwargs.get("chat_template", self.tokenizer.chat_template))
        if backend is None or "strftime_now" in template:
            return None
        parts = {
            "tokenizer": backend.to_str(),
            "class": type(self.tokenizer).__qualname__,
            "special": {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()},
            "template": template,
            "kwargs": repr(sorted(self.template_kwargs.items())),
            "begun": "continued",
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


@contextmanager
def limited(location: str, column: str) -> Iterator[Callable[[str], None]]:
    """Limits the time of chat templates in the block, for each row that it begins by what it is given."""
    here = location
    try:
        with Watch() as watch:

            def begin(location: str) -> None:
                nonlocal here
                here = location
                watch.next()

            yield begin
    except TemplateTimeLimit as error:
        raise bad_row(here, column, TOO_LONG, REMEDY) from error


def is_begun(prompt: Messages) -> bool:
    """True if the last message is the beginning of the assistant's answer, for the policy to go on with."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


def with_answer(asked: Messages, said: Sequence[Message]) -> list[Message]:
    """Returns a conversation: what was asked, and what was said behind it. An answer that the prompt begins is one
    message."""
    before: list[Message] = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    begun, first = before[-1] if is_begun(before) else {}, said[0] if said else {}
    if first.get("role") == "assistant" and isinstance(begun.get("content"), str):
        return [*before[:-1], {**first, "content": begun["content"] + str(first.get("content") or "")}, *said[1:]]
    return [*before, *said]


def plain_text(prompt: Messages, location: str, column: str) -> str:
    """Returns a prompt for `data.apply_chat_template=False`: a text, or what its only message says."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[0].get("content") if len(prompt) == 1 else None
    if isinstance(content, str):
        return content
    reason = f"holds {len(prompt)} messages, and only a chat template makes one text of them"
    raise bad_row(location, column, reason, "make prompts plain texts, or leave out data.apply_chat_template=False")


def whole_text(text: str, location: str, column: str) -> str:
    """Returns the text, which must be Unicode: JSON can hold half of a surrogate pair, and no tokenizer takes that."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"holds half of a surrogate pair, {text[error.start]!r}, which is no character"
        raise bad_row(location, column, reason, "write the row again, in UTF-8") from None
    return text


def messages_of(value: Any, location: str, column: str) -> Messages:
    """Returns a row's prompt, checked. Keys that Arrow filled with null, because another row has them, are left out."""
    value = as_messages(value)
    if isinstance(value, str) and value:
        return value
    fix = 'a text, or messages: [{"role": "user", "content": "..."}]'
    if not isinstance(value, list) or not value:
        given = "is empty" if value in ("", [], None) else f"is {value!r:.80}"
        raise bad_row(location, column, f"{given}, not a prompt", fix)
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_row(location, column, f"a message has no role: {message!r:.80}", fix)
        if message.get("content") is None and not message.get("tool_calls"):
            raise bad_row(location, column, f"a message has no content: {message!r:.80}", fix)
        if not isinstance(message.get("content"), str | list | dict | None):
            raise bad_row(location, column, f"the content of a message is no text: {message!r:.80}", fix)
    return [{"content": message.get("content")} | _present(message) for message in value]


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def truncated(tokens: list[int], longest: int, how: str, location: str) -> list[int]:
    """Returns at most `longest` tokens, by `data.truncation`: cut on the left, on the right, or in the middle."""
    if len(tokens) <= longest:
        return tokens
    if how == "error":
        raise UserError(
            f"{location} has a prompt of {len(tokens)} tokens",
            key="data.max_prompt_length",
            value=longest,
            fix=f"data.max_prompt_length={len(tokens)} or more, data.filter_overlong_prompts=True, or "
            "data.truncation=left|right|middle where there are no images, which are never cut",
        )
    if how == "left":
        return tokens[-longest:]
    head = longest if how == "right" else longest // 2
    return tokens[:head] + tokens[len(tokens) - (longest - head) :]
