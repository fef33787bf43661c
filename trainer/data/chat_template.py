"""A conversation to token ids and what of them is learnt, by the tokenizer's own chat template. Loads no torch.

The template is Hugging Face's jinja, rendered in a sandbox. Ids are those of the whole text, cut at special tokens alone.
What is learnt: what the template puts between ``{% generation %}`` and ``{% endgeneration %}``, if it has these; else of
each answer all that follows the header with which the model is asked to speak (``add_generation_prompt``), up to and with
the special token that ends the turn. What only looks like a special token, in the text of a message, stays text.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.conversations import Conversation
from trainer.data.tokenizer import Tokenizer, tokenizer_file
from trainer.errors import UserError

# In the text of messages a special token is hidden, while the template is rendered, by as many of a character of its own.
_HIDDEN = 0xF0000  # the first of a plane for private use
_BEGIN, _END = "\U000ffffc", "\U000ffffd"  # its last two: around what a template marks as generated
_PRIVATE = re.compile(f"[{chr(_HIDDEN)}-{_END}]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Template:
    """source: of the jinja template. path: where it was found. tokens: such as ``bos_token``, by name."""

    source: str
    path: str
    tokens: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rendered:
    """text: the conversation, with hidden special tokens. trained: places [first, last) in it that are learnt, in order."""

    text: str
    trained: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.text)


def find_template(tokenizer_name: str, override: str | None) -> Template:
    """That of ``data.chat_template``, else the tokenizer's. Raises ``UserError``."""
    file = tokenizer_file(tokenizer_name)
    config_file = file and file.with_name("tokenizer_config.json")
    config = _read_config(config_file) if config_file and config_file.is_file() else {}
    tokens = tuple(
        (key, _content(value)) for key, value in config.items() if key.endswith("_token") and _content(value)
    )
    tokens = tokens if file else (("eos_token", "<end>"),)
    beside = file and file.with_name("chat_template.jinja")
    if override is not None:
        path = Path(override)
    elif beside and beside.is_file():
        path = beside
    else:
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            raise UserError(
                f'data.tokenizer = "{tokenizer_name}" has no chat template (no chat_template.jinja beside it, none in '
                "tokenizer_config.json): name one with data.chat_template, or use the tokenizer of an instruct model"
            )
        return Template(source, str(config_file), tokens)
    try:
        return Template(path.read_text(encoding="utf-8"), str(path), tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'data.chat_template = "{path}": cannot be read: {error}') from None


def _read_config(path: Path) -> dict:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return config if isinstance(config, dict) else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _content(token) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


class ChatTemplate:
    """Renders conversations and turns them into ids. Raises ``UserError`` for a template that cannot be used at all."""

    def __init__(self, template: Template, tokenizer: Tokenizer):
        self.template, self.tokenizer = template, tokenizer
        try:
            self._compiled = _environment().from_string(template.source)
        except Exception as error:  # jinja's
            raise UserError(f"the chat template {template.path} is not valid: {error}") from None
        self._has_marks = re.search(r"\{%-?\s*generation\b", template.source) is not None
        self._ids = tokenizer.special_ids
        names = sorted(self._ids, key=len, reverse=True)
        self._hidden = {name: chr(_HIDDEN + number) * len(name) for number, name in enumerate(names)}
        self._shown = {hidden: name for name, hidden in self._hidden.items()}
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._is_hidden = re.compile("|".join(map(re.escape, self._shown)) or r"(?!)")
        _check_cuts(tokenizer, names)

    def render(self, conversation: Conversation) -> Rendered:
        """Raises ``ValueError``: the template refuses it, or does not show what is learnt."""
        messages, tools = self._hide([conversation.messages, conversation.tools])
        whole, spans = self._render(messages, tools)
        if self._has_marks:
            said = [message["trained"] for message in messages if message["role"] == "assistant"]
            if len(spans) == len(said):
                spans = [span for span, is_trained in zip(spans, said) if is_trained]
            elif not all(said):
                raise ValueError(
                    f"the chat template {self.template.path} marks {len(spans)} places as generated, and the assistant has "
                    f"{len(said)} messages: which of them is not to be learnt cannot be told"
                )
        else:
            spans = [self._answer(whole, messages, tools, number) for number in conversation.answers]
        if not any(last > first for first, last in spans):
            raise ValueError(f"the chat template {self.template.path} marks nothing of it as generated")
        return Rendered(whole, tuple(spans))

    def encode(self, conversations: list[Rendered]) -> Iterator[np.ndarray]:
        """Ids of each up to the last that is learnt, int32 [n]; those that are not learnt as their complement, ``~id``."""
        for conversation, (ids, firsts, lasts) in zip(
            conversations, self._ids_of([each.text for each in conversations])
        ):
            yield _marked(ids, firsts, lasts, conversation.trained)

    def encode_question(self, messages: list[dict]) -> list[int]:
        """Ids of messages, and of the header with which the model is asked to speak. Raises ``ValueError``."""
        text, _ = self._render(self._hide(messages), None, ask=True)
        ((ids, _, _),) = self._ids_of([text])
        return ids.tolist()

    def _ids_of(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Ids of each text, and the places in it where each token begins and ends: int64 [n] each."""
        pieces = [list(self._pieces(text)) for text in texts]
        plain = [piece for of_one in pieces for _, piece in of_one if isinstance(piece, str)]
        encoded = iter(self.tokenizer.encode_with_places(plain))
        for of_one in pieces:
            ids, firsts, lasts = [], [], []
            for place, piece in of_one:
                if isinstance(piece, str):
                    of_piece, places = next(encoded)
                    ids.append(of_piece)
                    firsts.append(places[:, 0] + place)
                    lasts.append(places[:, 1] + place)
                else:
                    ids.append(np.array([self._ids[piece.name]], np.int32))
                    firsts.append(np.array([place]))
                    lasts.append(np.array([place + len(piece.name)]))
            yield tuple(map(np.concatenate, (ids, firsts, lasts)))

    def _answer(self, whole: str, messages: list[dict], tools, number: int) -> tuple[int, int]:
        """Where in ``whole`` the answer in message ``number`` stands, with the token that ends it."""
        prompt, _ = self._render(messages[:number], tools, ask=True)
        turn, _ = self._render(messages[: number + 1], tools)
        for text, what in ((whole, "the whole conversation"), (turn, "the same with its answer")):
            if not text.startswith(prompt):
                first = "the assistant speaks first, for which " if number == 0 else ""
                raise ValueError(
                    f"{first}the chat template {self.template.path} does not render what comes before message {number} as a "
                    f"beginning of {what}: what is learnt cannot be told; mark it with {{% generation %}} in a template of your own "
                    "(data.chat_template)"
                )
        end = self._end_in(whole, turn, len(prompt))
        if end is None:
            raise ValueError(
                f"the chat template {self.template.path} ends message {number} with no special token that stands there in the whole "
                "conversation too: the model could not learn to stop; use one that does (data.chat_template)"
            )
        return len(prompt), end

    def _end_in(self, whole: str, turn: str, first: int) -> int | None:
        """Where in ``whole`` the answer that begins at ``first`` ends. ``turn``: the same, ended behind that answer.

        A template may put a token behind the last message alone (as Phi's does), or leave thoughts out of an answer that is
        not the last: what is learnt of ``whole`` must be an end of what ``turn`` says up to the same token.
        """
        ends = [match for match in self._special.finditer(turn, first)]
        for last in reversed(ends):
            for match in self._special.finditer(whole, first, len(turn)):
                if match[0] == last[0] and turn[first : last.end()].endswith(whole[first : match.end()].lstrip()):
                    return match.end()
        return None

    def _render(self, messages: list[dict], tools, ask: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The text, and what of it the template marks. ask: the model to speak next."""
        try:
            text = self._compiled.render(
                messages=messages, tools=tools, add_generation_prompt=ask, **dict(self.template.tokens)
            )
        except Exception as error:  # whatever a template does
            raise ValueError(f"the chat template {self.template.path}: {type(error).__name__}: {error}") from None
        return _without_marks(text)

    def _hide(self, value):
        """The same, with no text in it that is a special token to the tokenizer."""
        if isinstance(value, str):
            if found := _PRIVATE.search(value):
                raise ValueError(f"the character U+{ord(found[0]):X}, which is for private use")
            if found := _SURROGATE.search(value):  # JSON can spell half a UTF-16 pair
                raise ValueError(f"a lone surrogate, U+{ord(found[0]):X}, which is not a character")
            return self._special.sub(lambda match: self._hidden[match[0]], value)
        if isinstance(value, list):
            return [self._hide(entry) for entry in value]
        if isinstance(value, dict):
            return {self._hide(key): self._hide(entry) for key, entry in value.items()}
        return value

    def _pieces(self, text: str) -> Iterator[tuple[int, "str | _Special"]]:
        """(place, piece): special tokens, and the text between them, in which what was hidden is shown again."""
        place = 0
        for match in self._special.finditer(text):
            if match.start() > place:
                yield place, self._show(text[place : match.start()])
            yield match.start(), _Special(match[0])
            place = match.end()
        if place < len(text):
            yield place, self._show(text[place:])

    def _show(self, text: str) -> str:
        return self._is_hidden.sub(lambda match: self._shown[match[0]], text)


@dataclass(frozen=True)
class _Special:
    name: str


def _marked(ids: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, trained) -> np.ndarray:
    """``encode``'s result: a token is learnt if a character of it is."""
    is_trained = np.zeros(len(ids), bool)
    for first, last in trained:
        is_trained |= (lasts > first) & (firsts < last)
    is_trained[:1] = False  # the first token is nobody's label
    n = len(ids) - int(np.argmax(is_trained[::-1])) if is_trained.any() else 0
    return np.where(is_trained, ids, ~ids)[:n].astype(np.int32)


def _check_cuts(tokenizer: Tokenizer, names: list[str]) -> None:
    """Raise ``UserError`` for a tokenizer that reads text differently after a special token."""
    for name in names[:1]:
        text = "one two"
        ids = tokenizer.encode(text).tolist()
        if tokenizer.encode_with_special(f"{text}{name}{text}") != [*ids, tokenizer.special_ids[name], *ids]:
            raise UserError(
                "data.tokenizer: what stands behind a special token is read in another way than the same text alone (as SentencePiece "
                "does); conversations need one that does not, such as Llama 3's, Qwen's or SmolLM2's"
            )


def _environment():
    """As ``transformers`` makes it: a sandbox without access to anything, and a few functions that templates expect.

    Not its ``strftime_now``: what a run reads must not depend on the day.
    """
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller):
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )  # without jinja's escapes for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the places in it that stood between marks."""
    parts, spans, place = [], [], 0
    for part in re.split(f"({_BEGIN}|{_END})", text):
        if part == _BEGIN:
            spans.append((place, place))
        elif part == _END:
            spans[-1] = (spans[-1][0], place)
        else:
            parts.append(part)
            place += len(part)
    return "".join(parts), spans
