"""The parts of a chat request that completions do not have: messages and tools.

Pure.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from loadtest.engine_errors import missing, value_error
from loadtest.engine_text import count_tokens

# The captured server's chat template cost 13 tokens with one message and 20 with two.
TEMPLATE_TOKENS: Final = 6
MESSAGE_TOKENS: Final = 7
ROLES: Final = (
    "'system', 'assistant', 'tool', 'function', 'developer', 'latest_reminder' (case-insensitive)"
)


class Tool(msgspec.Struct, frozen=True):
    """A function that the answer must call."""

    name: str
    arguments: str  # JSON


def message_tokens(messages: list[Any]) -> int:
    """Tokens of a conversation, the template's own included."""
    words = sum(
        _content_words(message.get("content")) for message in messages if isinstance(message, dict)
    )
    return TEMPLATE_TOKENS + MESSAGE_TOKENS * len(messages) + words


def _content_words(content: Any) -> int:
    if isinstance(content, str):
        return count_tokens(content)
    if isinstance(content, list):
        return sum(
            count_tokens(part["text"])
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return 0


def message_problems(at: int, message: Any) -> list[dict[str, Any]]:
    """What pydantic says of a message: it tries two models, and each has its own complaint."""
    generic = "function-after[validate_thinking_parts_role(), ChatCompletionMessageGenericParam]"
    user = "function-after[validate_thinking_parts_role(), ChatCompletionMessageUserParam]"
    if not isinstance(message, dict):
        return [
            {
                "type": "model_type",
                "loc": ("body", "messages", at, model),
                "msg": f"Input should be a valid dictionary or instance of {model[44:-1]}",
                "input": message,
            }
            for model in (generic, user)
        ]
    if "role" not in message:
        return [
            missing(("body", "messages", at, model, "role"), message) for model in (generic, user)
        ]
    role = message["role"]
    known = {word.strip("'") for word in ROLES.split(" (")[0].split(", ")} | {"user"}
    if isinstance(role, str) and role.lower() in known:
        return []
    return [
        value_error(
            ("body", "messages", at, generic, "role"), f"'role' must be one of {ROLES}.", role
        ),
        {
            "type": "literal_error",
            "loc": ("body", "messages", at, user, "role"),
            "msg": "Input should be 'user'",
            "input": role,
            "ctx": {"expected": "'user'"},
        },
    ]


def forced_call(values: dict[str, Any]) -> Tool | None:
    """The function that must be called: the first if any will do, or the one that is named."""
    choice, tools = values.get("tool_choice"), values.get("tools")
    if not isinstance(tools, list) or not tools:
        return None
    functions = [tool.get("function") or {} for tool in tools if isinstance(tool, dict)]
    if isinstance(choice, dict):
        named = (choice.get("function") or {}).get("name")
        functions = [function for function in functions if function.get("name") == named]
    elif choice != "required":
        return None
    if not functions:
        return None
    return tool_call(str(functions[0].get("name", "")), functions[0].get("parameters"))


def tool_call(name: str, schema: Any) -> Tool:
    """A call with the simplest arguments that fit the schema's required properties."""
    samples = {"string": "two", "integer": 2, "number": 2.0, "boolean": True, "array": []}
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    required = schema.get("required", []) if isinstance(schema, dict) else []
    arguments = {
        key: samples.get(str(properties.get(key, {}).get("type")), {})
        if "enum" not in properties.get(key, {})
        else properties[key]["enum"][0]
        for key in required
    }
    return Tool(name, msgspec.json.encode(arguments).decode())
