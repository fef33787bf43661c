"""A record of a chat data set, in any of the usual forms, to a list of messages. Loads no torch.

A message is a dict with ``role``, ``content`` and whatever else the template may ask for, and ``trained``, which says
whether what the assistant says in it is to be learnt.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant", "tool": "tool",
    "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip

FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, ...]}, {"conversations": [{"from": "human", "value": "..."}, ...]}, '
    '{"prompt": "...", "completion": "..."} or {"instruction": "...", "input": "...", "output": "..."}'
)


@dataclass(frozen=True)
class Conversation:
    """messages: the model is taught what the assistant says in those with ``trained``. tools: their JSON schemas."""

    messages: list[dict]
    tools: list | None = None

    @property
    def answers(self) -> list[int]:
        """The messages to be learnt."""
        return [number for number, message in enumerate(self.messages) if message["trained"]]


def conversation_of(record) -> Conversation:
    """Raises ``ValueError`` for what is no conversation, or has nothing to learn."""
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: expected {FORMS}")
    form = form_of(record)
    if form is None:
        raise ValueError(f"no conversation: it has {_shown(list(record)) or 'no key'}; expected {FORMS}")
    conversation = Conversation(form(record), _tools(record.get("tools")))
    if not conversation.answers:
        raise ValueError("no message of the assistant that is to be learnt")
    return conversation


def form_of(record: dict) -> Callable[[dict], list[dict]] | None:
    """What reads the messages of a record; None if its keys are of no known form."""
    keys = {key for key, value in record.items() if value is not None}
    for needed, read in (
        ({"messages"}, _from_messages),
        ({"conversations"}, _from_sharegpt),
        ({"prompt", "completion"}, _from_completion),
        ({"instruction", "output"}, _from_alpaca),
    ):
        if needed <= keys:
            return read
    return None


def _from_messages(record: dict) -> list[dict]:
    return _messages(record["messages"], "messages")


def _from_sharegpt(record: dict) -> list[dict]:
    messages = _messages(record["conversations"], "conversations")
    return _with_system(record, messages)


def _from_completion(record: dict) -> list[dict]:
    """Text and text, or messages and messages, of which only the latter are learnt."""
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    before = [message | {"trained": False} for message in _messages(prompt, "prompt")]
    return _with_system(record, [*before, *_messages(completion, "completion")])


def _from_alpaca(record: dict) -> list[dict]:
    parts = [_text(record[key], key) for key in ("instruction", "input") if record.get(key)]
    messages = [
        _message({"role": "user", "content": "\n\n".join(parts)}, "instruction"),
        _message({"role": "assistant", "content": _text(record["output"], "output")}, "output"),
    ]
    return _with_system(record, messages)


def _with_system(record: dict, messages: list[dict]) -> list[dict]:
    text = record.get("system")
    if not text or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": _text(text, "system"), "trained": False}, *messages]


def _messages(value, key: str) -> list[dict]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key}: expected a list of messages, not {_shown(value)}")
    return [_message(message, f"{key}[{number}]") for number, message in enumerate(value)]


def _message(message, where: str) -> dict:
    if not isinstance(message, dict):
        raise ValueError(f"{where}: expected a message, not {_shown(message)}")
    message = {key: value for key, value in message.items() if value is not None}
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message and ours not in message:
            message[ours] = message.pop(theirs)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"{where}: role {_shown(role)}; known are {', '.join(_ROLES)}")
    role = _ROLES[role]
    calls = message.get("tool_calls")
    content = message.get("content", "" if calls else None)
    if content is None:
        raise ValueError(f"{where}: no content")
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"{where}: weight {_shown(weight)}: 0 (not learnt) or 1")
    told = {"role": role, "content": _text(content, f"{where}.content")}
    if calls:
        told["tool_calls"] = _calls(calls, where)
    return message | told | {"trained": role == "assistant" and weight == 1}


def _text(content, where: str) -> str:
    """Of a string, or of a list of parts that are text."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ValueError(f"{where}: a part that is no text, {_shown(part)}")
        content = "".join(_text(part.get("text"), where) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: expected text, not {_shown(content)}")
    return content


def _calls(calls, where: str) -> list[dict]:
    """Arguments as an object, where they are the text of one (as in OpenAI's API): a template writes them out itself."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}.tool_calls: expected a list of objects, not {_shown(calls)}")
    read = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}.tool_calls: a call without the name of a function, {_shown(call)}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise ValueError(f"{where}.tool_calls: arguments that are no JSON, {_shown(arguments)}") from None
        read.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
    return read


def _tools(tools) -> list | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise ValueError(f"tools: not JSON, {_shown(tools)}") from None
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"tools: expected a list of JSON schemas, not {_shown(tools)}")
    return tools or None


def _shown(value) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
