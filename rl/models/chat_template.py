"""Chat templates: where a folder keeps its own, and how it is rendered.

The template language is Jinja as transformers sets it up: the templates that models ship assume
trimmed blocks, `raise_exception`, and `tojson` that leaves non-ASCII as it is.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox

from rl.errors import MeshdialError


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words; here it only prints."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(folder: Path, tokenizer_config: dict) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's chat_template (of several, `default`)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def render(
    template: str,
    messages: Sequence[dict],
    named_tokens: dict[str, str],
    folder: str,
    is_open: bool = True,
) -> str:
    """The chat as text, with the assistant's turn opened where `is_open`."""
    try:
        return _compile(template).render(
            messages=list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=is_open,
            **named_tokens,
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise MeshdialError(f"the chat template of {folder} refuses this chat: {error}") from error


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """`strftime_now` is left out on purpose: a prompt must not depend on the day it is made, and
    templates that use the date have a fixed one for where it is undefined."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


def _to_json(value, ensure_ascii=False, **style) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **style)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
