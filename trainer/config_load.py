"""From a TOML file and ``--section.key=value`` overrides to one validated ``Config``.

Both go through one decoder: an override's value is parsed as TOML, merged over the file's tables, and
the result is validated once, with every problem reported together.
"""

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import tomli
import tomli_w
from pydantic import ValidationError

from trainer.config import Config
from trainer.errors import UserError
from trainer.extend import extension_of

CONFIG_DIR = Path(__file__).resolve().parent.parent / "train_configs"


@dataclass(frozen=True)
class Override:
    """One ``--section.key=value`` of the command line."""

    key: str
    text: str

    @property
    def shown(self) -> str:
        return f"--{self.key}={self.text}"

    @property
    def value(self):
        """As the config takes it."""
        return _parse_value(self)


def split_overrides(arguments: list[str]) -> tuple[list[str], list[Override]]:
    """Take ``--section.key=value`` and ``--section.key value`` out of a command line; keep the rest in order.

    ``--import FILE`` is ``job.imports``, and may come several times.
    """
    rest, overrides, imports = [], [], []
    arguments = list(arguments)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        if name == "--import":
            if not equals and (not arguments or arguments[0].startswith("--")):
                raise UserError("--import needs a value: --import FILE.py")
            imports.append(value if equals else arguments.pop(0))
            continue
        if not (name.startswith("--") and "." in name):
            rest.append(argument)
            continue
        if not equals:
            if not arguments or arguments[0].startswith("--"):
                raise UserError(f"{name} needs a value: {name}=VALUE")
            value = arguments.pop(0)
        overrides.append(Override(name[2:], value))
    return rest, overrides + ([Override("job.imports", toml_text(imports))] if imports else [])


def find_config(name_or_path: str) -> Path:
    """A path as given, or a bare name of ``train_configs/`` with or without ``.toml``."""
    given = Path(name_or_path)
    for candidate in (given, CONFIG_DIR / name_or_path, CONFIG_DIR / f"{name_or_path}.toml"):
        if candidate.is_file():
            return candidate
    shipped = sorted(path.name for path in CONFIG_DIR.glob("*.toml"))
    raise UserError(
        f"config file {name_or_path!r} not found{_nearest(given.name, shipped)}; shipped: {', '.join(shipped)}"
    )


def load_config(name_or_path: str | None, overrides: list[Override] = ()) -> Config:
    """Read, merge and validate. ``None`` means the defaults alone. Raises ``UserError`` listing every problem.

    ``job.output_dir``, ``data.tokenizer`` and how documents become rows are always set in the result.
    """
    path = None if name_or_path is None else find_config(name_or_path)
    text = _read(path) if path else ""
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    problems = [problem for override in overrides if (problem := _merge(tables, override))]
    config = None
    try:
        config = Config.model_validate(_tuples(tables))
    except ValidationError as error:
        problems += _explain(error, tables, path, text, {override.key: override for override in overrides})
    if problems:
        raise UserError(*problems)
    if config.job.output_dir is None:
        job = config.job.model_copy(update={"output_dir": _default_output_dir(path, overrides)})
        config = config.model_copy(update={"job": job})
    if config.data.tokenizer is None:
        data = config.data.model_copy(update={"tokenizer": config.model.hf_path or "bytes"})
        config = config.model_copy(update={"data": data})
    return _with_own_loss(with_rows_of_method(config))


def _with_own_loss(config: Config) -> Config:
    """A loss of the user's sees whole logits: neither in pieces nor spread over tensor parallel ranks."""
    if not config.job.imports or extension_of(config.job.imports).loss is None:
        return config
    for section, key, needed in (("training", "loss_chunk_tokens", 0), ("parallel", "loss_parallel", False)):
        table = getattr(config, section)
        matters = section == "training" or config.parallel.tp > 1
        if matters and key in table.model_fields_set and getattr(table, key) != needed:
            given = _toml(getattr(table, key))
            raise UserError(f"{section}.{key} = {given}: a loss of your own needs {_toml(needed)}: leave it out")
        config = config.model_copy(update={section: table.model_copy(update={key: needed})})
    return config


def with_rows_of_method(config: Config) -> Config:
    """How documents become rows, where the config leaves it to ``training.method``."""
    tunes, data = config.training.method != "pretrain", config.data
    packing = data.packing or ("best_fit" if tunes else "concatenate")
    isolate = tunes if data.isolate_documents is None else data.isolate_documents
    return config.model_copy(
        update={"data": data.model_copy(update={"packing": packing, "isolate_documents": isolate})}
    )


def _default_output_dir(path: Path | None, overrides: list[Override]) -> str:
    """ "outputs/debug", or "outputs/debug-tp2-pp2" where the command line sets ``parallel.tp`` and ``parallel.pp``."""
    layout = {override.key: override for override in overrides if override.key.startswith("parallel.")}
    parts = [path.stem if path else "default", *(f"{key.split('.')[1]}{o.text}" for key, o in layout.items())]
    return "outputs/" + re.sub(r"[^\w.,=+-]", "", "-".join(parts))


def dump_config(config: Config) -> str:
    """The resolved config as TOML that ``load_config`` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


@functools.cache
def key_schemas() -> dict[str, dict]:
    """Dotted key -> its JSON schema (type, bounds, choices, default, description), in the order of the config."""
    schema = Config.model_json_schema()
    keys = {}
    for section, reference in schema["properties"].items():
        definition = schema["$defs"][reference["$ref"].rsplit("/", 1)[1]]
        keys |= {f"{section}.{key}": entry for key, entry in definition["properties"].items()}
    return keys


def type_text(schema: dict) -> str:
    """A JSON schema as words: "an integer, at least 1"."""
    if schema.get("type") == "object":
        of = _values_of(schema)
        kinds = "tables" if "$ref" in of else {"string": "strings", "number": "numbers"}[of["type"]]
        return f"a table of names (letters, digits, _ and -) and {kinds}"
    if "$ref" in schema:
        return "a table"
    if "anyOf" in schema:
        return " or ".join(type_text(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "pattern" in schema:
        return schema["description"]
    if "const" in schema or "enum" in schema:
        return " or ".join(_toml(choice) for choice in schema.get("enum", [schema.get("const")]))
    if schema["type"] == "array":
        items = schema.get("prefixItems")
        return (
            f"a list of {len(items)}: {type_text(items[0])}" if items else f"a list, each {type_text(schema['items'])}"
        )
    words = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "a string"}[
        schema["type"]
    ]
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    words += f", at least {low}" if low is not None else ""
    words += f", above {above}" if above is not None else ""
    words += f", at most {high}" if high is not None else ""
    words += f", below {below}" if below is not None and below < 2**60 else ""
    return words + (", not empty" if schema.get("minLength") else "")


def _values_of(schema: dict) -> dict:
    """The JSON schema of the values of a table with names of the user's; {} of anything else."""
    by_pattern = schema.get("patternProperties", {})
    return next(iter(by_pattern.values()), schema.get("additionalProperties") or {})


def compared_keys(config: Config) -> dict[str, int | float | bool | str]:
    """Key -> value of what runs are told apart by: not where they write, and no lists."""
    tables = config.model_dump(
        exclude_none=True, exclude={"job": {"output_dir"}, "checkpoint": True, "metrics": True, "debug": True}
    )
    return {
        f"{section}.{key}": value
        for section, table in tables.items()
        for key, value in table.items()
        if isinstance(value, (int, float, str))
    }


def key_help() -> str:
    """Every key with its type, default and meaning, for ``--help``."""
    lines, section = [], None
    for key, schema in key_schemas().items():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", f"[{section}]"]
        default = schema.get("default")
        shown = "" if default is None else f", default {_toml(default)}"
        lines += [f"  --{key}=  ({type_text(schema)}{shown})", f"      {schema['description']}"]
    return "\n".join(lines)


def key_page() -> str:
    """The same as a page: docs/config.md."""
    lines = [
        "# Every configuration key",
        "",
        "Made by `python -m trainer schema --markdown`. A key goes into a TOML file under its section, or on the command line as",
        "`--section.key=value`, which wins. Unknown keys, wrong types and contradictions are errors.",
    ]
    section = None
    for key, schema in key_schemas().items():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", f"## [{section}]", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        default = schema.get("default")
        cells = [f"`{key}`", type_text(schema), "" if default is None else f"`{_toml(default)}`", schema["description"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def toml_text(value) -> str:
    """A value on one line, as an override takes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {toml_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return _toml(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None


def _merge(tables: dict, override: Override) -> str | None:
    """Put an override into the tables; the problem in words where its place is taken by something else."""
    *parents, key = override.key.split(".")
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {}) if parent else None
        if not isinstance(table, dict):
            return f"{override.shown}: {'.'.join(parents)} is not a table"
    table[key] = _parse_value(override)
    return None


def _parse_value(override: Override):
    """The value as TOML; what is not valid TOML is a bare string, as is anything given to a string key."""
    try:
        value = tomli.loads(f"value = {override.text}")["value"]
    except tomli.TOMLDecodeError:
        return override.text
    schema = key_schemas().get(override.key, {})
    takes_strings_only = all(option.get("type") in ("string", "null") for option in schema.get("anyOf", [schema]))
    return override.text if takes_strings_only and schema and not isinstance(value, str) else value


def _tuples(value):
    """TOML arrays as tuples: the config is immutable throughout."""
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value


def _explain(
    error: ValidationError, tables: dict, path: Path | None, text: str, overrides: dict[str, Override]
) -> list[str]:
    """One line a faulty key, in the words of our keys rather than of the validation library."""
    problems: dict[str, str] = {}
    for entry in error.errors(include_url=False):
        key = ".".join(str(part) for part in entry["loc"][:2])
        if key in problems:  # a union reports each of its branches
            continue
        where = f" ({path.name}:{line_of(text, key)})" if path else ""
        where = f" (from {overrides[key].shown})" if key in overrides else where
        if len(entry["loc"]) > 3 and (of_table := _explain_in_table(entry, where)):
            problems[of_table[0]] = of_table[1]
        elif entry["type"] == "extra_forbidden":
            problems[key] = f"unknown key {key}{where}{suggestion(key)}"
        elif key not in key_schemas():
            problems[key] = f"{key}{where} must be a table: [{key}]"
        else:
            section, name = key.split(".")
            value = tables[section][name]  # the whole of it: the library names the faulty element of a list
            problems[key] = f"{key} = {_toml(value)}{where}: expected {type_text(key_schemas()[key])}{_hint(value)}"
    return list(problems.values())


def _explain_in_table(entry: dict, where: str) -> tuple[str, str] | None:
    """(key, problem) of a fault in a table below a section's key, such as ``data.sources.NAME.weight``; None elsewhere."""
    section, name, *below = map(str, entry["loc"])
    schema = key_schemas().get(f"{section}.{name}", {})
    tables = schema.get("items") or _values_of(schema)
    if "$ref" not in tables:
        return None
    known = Config.model_json_schema()["$defs"][tables["$ref"].rsplit("/", 1)[1]]["properties"]
    key, field = ".".join((section, name, *below[:2])), below[1]
    if entry["type"] == "extra_forbidden":
        return key, f"unknown key {key}{where}{_nearest(field, list(known))}"
    if entry["type"] == "missing":
        return key, f"{key} is missing{where}: {type_text(known[field])}"
    return key, f"{key} = {_toml(entry['input'])}{where}: expected {type_text(known[field])}{_hint(entry['input'])}"


def suggestion(key: str) -> str:
    """The nearest valid name: of the whole path, else a key of the same name in another table."""
    known = list(key_schemas())
    if "." not in key:
        sections = sorted({name.split(".")[0] for name in known})
        return _nearest(key, sections) or f"; tables: {', '.join(sections)}"
    same_name = [name for name in known if name.split(".")[1] == key.split(".", 1)[1]]
    return f"; did you mean {same_name[0]}?" if same_name else _nearest(key, known)


def _nearest(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _hint(value) -> str:
    if isinstance(value, float) and value.is_integer():
        return f" (write {int(value)})"
    if isinstance(value, str):
        if value.lower() in ("true", "false"):
            return f" (write {value.lower()} without quotes)"
        try:
            float(value)
            return " (a number has no quotes)"
        except ValueError:
            return ""
    return ""


def _toml(value) -> str:
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{...}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def line_of(text: str, key: str) -> int:
    """The line of a TOML file that sets ``key``, or else the one that opens its table."""
    table, fallback = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            table = header[1].replace(" ", "")
            full = table
        elif assignment := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            full = f"{table}.{assignment[1]}" if table else assignment[1]
        else:
            continue
        if full == key:
            return number
        if full == key.split(".")[0]:
            fallback = number
    return fallback
