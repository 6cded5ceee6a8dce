"""Chat templates: where they come from, what they may use, and how they write a conversation.

A template is a program in a file that others wrote. It runs in jinja2's sandbox, with the functions and options that
transformers gives it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoints.huggingface import read_json

# what a template can raise: its own errors, and those of Python expressions in it
_TEMPLATE_ERRORS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
_EXAMPLE = 'a list like [{"role": "user", "content": "Hello"}]'


class ChatTemplate:
    """A jinja2 template that writes conversations.

    Args:
        source: its text. It is compiled when it is first used.
    """

    def __init__(self, source: str):
        self.source = source
        self._compiled: Any = None

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The text of a conversation.

        Args:
            messages: as `check_messages` takes them.
            values: what else the template sees, such as `add_generation_prompt` and `bos_token`.

        Raises:
            ValueError: the template is not valid, or raises an error for these messages.
        """
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            return self._compiled.render(messages=messages, tools=None, documents=None, **values)
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template refused these messages: {error}") from error


def read_template(given: str | Path) -> str:
    """The text of a template that a caller gives: itself, or in a file.

    Raises:
        ValueError: a path that is no file, or a text that cannot be a template.
    """
    if not isinstance(given, (str, Path)):
        raise ValueError(f"chat_template must be a jinja2 template or the path of one, got {given!r:.80}")
    if isinstance(given, Path) or _is_file(given):
        try:
            return Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template={str(given)!r} cannot be read: {error}") from error
    if "{" not in given:
        raise ValueError(
            f"chat_template={given!r:.80} is no file, and no template either: a jinja2 template of conversations holds "
            "something in {{ }} or {% %}"
        )
    return given


def stored_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The template beside a tokenizer, in transformers' order: own file, JSON file, configuration.

    Args:
        path: a directory.
        config: its tokenizer_config.json.
    """
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    stored: Any = config.get("chat_template")
    if (path / "chat_template.json").is_file():
        stored = read_json(path / "chat_template.json").get("chat_template")
    if isinstance(stored, list):  # several, by name
        return {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored


def check_messages(messages: Any) -> None:
    """Raises ValueError for what is no conversation: a list of dictionaries with the strings "role" and "content"."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be {_EXAMPLE}, got {messages!r:.80}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a dictionary, got {message!r:.80}; messages are {_EXAMPLE}")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"messages[{i}] has no {key!r}; messages are {_EXAMPLE}")
            check_text(message[key], f"messages[{i}][{key!r}]")


def check_text(text: Any, what: str) -> None:
    """Raises ValueError unless `text` is a string that UTF-8 can hold. `what` names it."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds half of a surrogate pair at position {error.start}: it is not valid Unicode text"
        ) from error


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, by which transformers marks what an assistant said. Here it is a
    scope that writes what is in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [_Generation, loopcontrols]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _is_file(text: str) -> bool:
    try:
        return "\n" not in text and Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long for a name, a null in it, no home of that user
        return False
