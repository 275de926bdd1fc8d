"""Pydantic models given as source: validation in the sandbox, example objects, and errors in them.

    source, texts ──► sandbox: parse, validate ──► [G] bool          `SchemaChecker.validate`
    source        ──► sandbox: JSON schema     ──► example object    `example_of`
                                                   └──► spoiled      `spoiled`

The source of a model, and the texts that claim to fit it, are read in the sandbox only. The system
Python there lacks packages, so pydantic and a YAML parser are copied into it from this environment.

In XML, an object is an element with one child per field, and a list has one `<item>` per entry.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.metadata
import importlib.util
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.sandbox import (
    Sandbox,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
    run_python,
)

__all__ = [
    "ERROR_TYPES",
    "ErrorType",
    "ModelSourceError",
    "SchemaChecker",
    "Syntax",
    "example_of",
    "possible_errors",
    "spoiled",
    "write_object",
]

Syntax = Literal["json", "yaml", "toml", "xml"]
ErrorType = Literal[
    "type_error", "format_error", "constraint_error", "enum_error", "required_field_missing"
]
ERROR_TYPES: tuple[ErrorType, ...] = (
    "type_error",
    "format_error",
    "constraint_error",
    "enum_error",
    "required_field_missing",
)


class ModelSourceError(AtroposError, ValueError):
    """The source of a model cannot be executed, or has no model of the given name."""


PACKAGES = (
    *("pydantic", "annotated_types", "typing_inspection", "typing_extensions", "yaml"),
    *("email_validator", "idna", "dns", "tomli"),
)
"""Packages copied into the sandbox."""
OPTIONAL_PACKAGES = ("typing_inspection", "email_validator", "idna", "dns", "tomli")
"""Those that are left out if they are not installed: for e-mail addresses, and for Python 3.10."""
METADATA = ("email-validator",)
"""Distributions whose version is read at run time."""
CORE = "pydantic_core"

PRELUDE = """
import json, os, sys, types
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "packages.zip")]
result = os.dup(1)
os.dup2(2, 1)
import pydantic
try:
    import tomllib
except ImportError:
    import tomli as tomllib
"""

RUNNER = (
    PRELUDE
    + '''
call = json.load(open("call.json"))

def finish(answer):
    with open(result, "w") as file:
        json.dump(answer, file)
    os._exit(0)

try:
    module = types.ModuleType("model_source")  # where annotations look names up
    sys.modules["model_source"] = module
    exec(compile(call["source"], "model_source.py", "exec"), module.__dict__)
    model = module.__dict__[call["model_name"]]
    if not (isinstance(model, type) and issubclass(model, pydantic.BaseModel)):
        raise TypeError(call["model_name"] + " is not a pydantic model")
except BaseException as error:
    finish({"error": type(error).__name__ + ": " + str(error)[:500]})
try:
    schema = model.model_json_schema()
except Exception:
    schema = {}

def branches(schema, root):
    """Yield the alternatives of a schema, with references resolved."""
    for _ in range(20):
        if "$ref" not in schema:
            break
        schema = root.get("$defs", {}).get(schema["$ref"].rsplit("/", 1)[-1], {})
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if not options:
        yield schema
    for option in options or ():
        yield from branches(option, root)

def from_xml(element, schema, root):
    options = list(branches(schema, root))
    children = list(element)
    kinds = {option.get("type"): option for option in options}
    if "array" in kinds and (not children or len({child.tag for child in children}) == 1):
        if children or not (element.text or "").strip():
            items = kinds["array"].get("items", {})
            return [from_xml(child, items, root) for child in children]
    if not children:
        text = element.text or ""
        if not text.strip() and "null" in kinds:
            return None
        return {} if not text.strip() and "object" in kinds else text
    rules = kinds.get("object", {})
    found = {}
    for child in children:
        further = rules.get("additionalProperties")
        fallback = further if isinstance(further, dict) else {}
        found.setdefault(child.tag, []).append(
            (child, rules.get("properties", {}).get(child.tag, fallback))
        )
    return {tag: together(same, root) for tag, same in found.items()}

def together(same, root):
    """Return the value of the children of one name; a list may be written as repeated children."""
    arrays = [o for o in branches(same[0][1], root) if o.get("type") == "array"]
    element, tags = same[0][0], {child.tag for child in same[0][0]}
    is_list = len(tags) == 1 or not (tags or (element.text or "").strip())
    if len(same) == 1 and (not arrays or is_list):
        return from_xml(element, same[0][1], root)
    items = arrays[0].get("items", {}) if arrays else {}
    return [from_xml(child, items, root) for child, _ in same]

def parse(text):
    if call["syntax"] == "json":
        return json.loads(text)
    if call["syntax"] == "yaml":
        import yaml
        return yaml.safe_load(text)
    if call["syntax"] == "toml":
        return tomllib.loads(text)
    from xml.etree import ElementTree
    return from_xml(ElementTree.fromstring(text), schema, schema)

def is_valid(text):
    try:
        value = parse(text)
    except Exception:
        return False
    try:
        model.model_validate(value)
    except Exception:
        # A strict model takes a list for a tuple, or text for a date, from JSON only.
        try:
            model.model_validate_json(json.dumps(value))
        except Exception:
            return False
    return True

finish({"schema": schema, "valid": [is_valid(text) for text in call["texts"]]})
'''
)


@lru_cache(maxsize=1)
def packages() -> Mapping[str, bytes]:
    """Return the files of pydantic and of the YAML parser for the sandbox, by path; cached."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name in PACKAGES:
            origin = _origin(name)
            if origin is None and name in OPTIONAL_PACKAGES:
                continue
            if origin is None:
                raise SandboxUnavailableError(f"the package {name} is not installed")
            if origin.name != "__init__.py":
                file.write(origin, origin.name)
                continue
            for path in origin.parent.rglob("*.py"):
                file.write(path, str(path.relative_to(origin.parent.parent)))
        for distribution in METADATA:
            try:
                version = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            folder = f"{distribution.replace('-', '_')}-{version}.dist-info"
            file.writestr(f"{folder}/METADATA", f"Name: {distribution}\nVersion: {version}\n")
    files: dict[str, bytes] = {"packages.zip": archive.getvalue()}
    core = _origin(CORE)
    for path in core.parent.iterdir() if core else ():
        if path.suffix in (".py", ".so"):
            files[f"{CORE}/{path.name}"] = path.read_bytes()
    return files


def _origin(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin) if spec and spec.origin else None


MAX_SCHEMAS = 1000


class SchemaChecker:
    """Validates texts against models in a sandbox.

    Args:
        sandbox: the sandbox.
        limits: limits of one run, in which all texts of a group are validated.
    """

    def __init__(self, sandbox: Sandbox, limits: SandboxLimits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._files: Mapping[str, bytes] = {}
        self._schemas: dict[tuple[str, str], dict[str, Any]] = {}

    async def open(self) -> None:
        """Collect the packages, and try them in the sandbox.

        Raises:
            SandboxUnavailableError: the Python of the sandbox cannot load them.
        """
        self._files = await asyncio.to_thread(packages)
        result = await self._run(PRELUDE + "os.write(result, pydantic.VERSION.encode())", {})
        if not result.is_success or not result.stdout.startswith("2"):
            raise SandboxUnavailableError(
                "the system Python of the sandbox cannot load pydantic 2 of this environment "
                f"({result.stderr.strip()[-200:]}); use a virtual environment made with "
                "/usr/bin/python3, so that both have the same version of Python"
            )

    async def schema(self, source: str, model_name: str) -> dict[str, Any]:
        """Return the JSON schema of a model, the last 1,000 cached; empty if there is none.

        Raises:
            ModelSourceError: the source fails, or has no model of this name.
        """
        key = (source, model_name)
        if key not in self._schemas:
            answer = await self._ask(source, model_name, "json", [])
            if answer is None:
                raise ModelSourceError(
                    f"{model_name}: its source exceeds the limits of the sandbox"
                )
            while len(self._schemas) >= MAX_SCHEMAS:
                self._schemas.pop(next(iter(self._schemas)))
            self._schemas[key] = answer["schema"]
        return self._schemas[key]

    async def validate(
        self, source: str, model_name: str, syntax: Syntax, texts: Sequence[str]
    ) -> list[bool]:
        """Return for each text whether it parses and fits the model.

        If a text exhausts the limits of the sandbox, it is not valid, and the others are validated
        one by one.

        Raises:
            ModelSourceError: as for `schema`.
        """
        answer = await self._ask(source, model_name, syntax, texts)
        if answer is not None:
            return [bool(valid) for valid in answer["valid"]]
        if len(texts) <= 1:
            return [False] * len(texts)
        return [(await self.validate(source, model_name, syntax, [text]))[0] for text in texts]

    async def _ask(
        self, source: str, model_name: str, syntax: Syntax, texts: Sequence[str]
    ) -> Any | None:
        """Return the answer of the sandbox; None if the program did not end by itself."""
        call = {"source": source, "model_name": model_name, "syntax": syntax, "texts": list(texts)}
        result = await self._run(RUNNER, {"call.json": json.dumps(call)})
        if not result.is_success:
            return None
        try:
            answer = json.loads(result.stdout)
        except (ValueError, RecursionError):
            return None
        if "error" in answer:
            raise ModelSourceError(f"{model_name}: its source fails with {answer['error']}")
        return answer

    async def _run(self, program: str, files: Mapping[str, str | bytes]) -> SandboxResult:
        return await run_python(
            self._sandbox, program, files={**self._files, **files}, limits=self._limits
        )


MAX_DEPTH = 6
MAX_CHARACTERS, MAX_ENTRIES = 10_000, 1_000
"""Of a text and of a list of an example; a model may demand any number."""
FORMATTED = {
    "email": "someone@example.com",
    "date": "2024-05-17",
    "date-time": "2024-05-17T10:30:00Z",
    "time": "10:30:00Z",
    "duration": "PT1H",
    "uri": "https://example.com/page",
    "uuid": "3f2b8c1e-5d4a-4f6b-9a7c-8e1d2f3a4b5c",
    "ipv4": "192.0.2.7",
    "ipv6": "2001:db8::7",
    "binary": "abc",
    "password": "a long passphrase",  # pragma: allowlist secret
}
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron")


def example_of(schema: Mapping[str, Any], source: Random) -> Any:
    """Return an object that fits a JSON schema, apart from patterns and own validators.

    Args:
        schema: the schema of a pydantic model.
        source: random numbers that choose the values.

    Raises:
        ConfigError: the schema is recursive without an end, or demands too long a text or list.
    """
    return _example(schema, schema, source, 0)


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its reference replaced and the first alternative other than null."""
    for _ in range(20):
        options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
        if "$ref" in schema:
            schema = root.get("$defs", {}).get(schema["$ref"].rsplit("/", 1)[-1], {})
        elif options:
            schema = next((o for o in options if o.get("type") != "null"), options[0])
        else:
            return schema
    raise ConfigError("the schema of the model refers to itself without an end")


def _example(schema: Mapping[str, Any], root: Mapping[str, Any], source: Random, depth: int) -> Any:
    if depth > 4 * MAX_DEPTH:
        raise ConfigError("the schema of the model is recursive without an end")
    rules = resolved(schema, root)
    if "const" in rules:
        return rules["const"]
    if rules.get("enum"):
        return source.choice(rules["enum"])
    kind = rules.get("type")
    if kind == "object" or "properties" in rules:
        return _example_object(rules, root, source, depth)
    if kind == "array":
        return _example_list(rules, root, source, depth)
    if kind in ("integer", "number"):
        return _example_number(rules, source, is_integer=kind == "integer")
    if kind == "boolean":
        return source.random() < 0.5
    return None if kind == "null" else _example_text(rules, source)


def _example_object(
    rules: Mapping[str, Any], root: Mapping[str, Any], source: Random, depth: int
) -> dict[str, Any]:
    required = rules.get("required", ())
    fields = {
        name: _example(field, root, source, depth + 1)
        for name, field in rules.get("properties", {}).items()
        if depth < MAX_DEPTH or name in required
    }
    further = rules.get("additionalProperties")
    if isinstance(further, Mapping) and not fields:
        fields[source.choice(WORDS)] = _example(further, root, source, depth + 1)
    return fields


def _example_list(
    rules: Mapping[str, Any], root: Mapping[str, Any], source: Random, depth: int
) -> list[Any]:
    if "prefixItems" in rules:
        return [_example(item, root, source, depth + 1) for item in rules["prefixItems"]]
    low, high = rules.get("minItems", 0), rules.get("maxItems", 100)
    if low > MAX_ENTRIES:
        raise ConfigError(f"a list has at least {low:,} entries; expected at most {MAX_ENTRIES:,}")
    wanted = min(high, max(low, 1 if depth < MAX_DEPTH else 0))
    entries: list[Any] = []
    for _ in range(20 * wanted):
        entry = _example(rules.get("items", {}), root, source, depth + 1)
        if not (rules.get("uniqueItems") and entry in entries):
            entries.append(entry)
        if len(entries) == wanted:
            break
    return entries


def _example_number(rules: Mapping[str, Any], source: Random, *, is_integer: bool) -> float:
    step = rules.get("multipleOf", 1 if is_integer else 0.5)
    low = rules.get("minimum", rules.get("exclusiveMinimum"))
    high = rules.get("maximum", rules.get("exclusiveMaximum"))
    if low is None:
        low = 1 if high is None or high > 1 else high - 10 * step
    if high is None:
        high = low + 20 * step
    first = -(-low // step)  # rounded up
    count = max(0, int(high // step - first))
    numbers = [
        (first + i) * step for i in sorted({0, 1, count // 2, count, source.randint(0, count)})
    ]
    fitting = [number for number in numbers if _is_within(number, rules)]
    if not fitting:
        fitting = [(low + high) / 2]
    number = source.choice(fitting)
    return int(number) if is_integer else float(number)


def _is_within(number: float, rules: Mapping[str, Any]) -> bool:
    return (
        number >= rules.get("minimum", number)
        and number <= rules.get("maximum", number)
        and ("exclusiveMinimum" not in rules or number > rules["exclusiveMinimum"])
        and ("exclusiveMaximum" not in rules or number < rules["exclusiveMaximum"])
    )


def _example_text(rules: Mapping[str, Any], source: Random) -> str:
    if rules.get("format") in FORMATTED:
        return FORMATTED[rules["format"]]
    text = " ".join(source.sample(WORDS, 2))
    low, high = rules.get("minLength", 0), rules.get("maxLength", MAX_CHARACTERS)
    if low > MAX_CHARACTERS:
        raise ConfigError(
            f"a text has at least {low:,} characters; expected at most {MAX_CHARACTERS:,}"
        )
    while len(text) < low:
        text += f" {source.choice(WORDS)}"
    return text[:high].rstrip().ljust(min(low, high), "a")


class ObjectError(NamedTuple):
    """A change of one value that makes an object invalid."""

    kind: ErrorType
    path: tuple[str | int, ...]
    value: Any
    """New value; for `required_field_missing`, None: the field is removed."""


NOT_A_FORMAT = "neither one nor the other"
SIZES = ("minLength", "minItems")
"""Bounds that no value can break if they are 0."""
LARGEST_SIZES = {
    "minLength": MAX_CHARACTERS,
    "maxLength": MAX_CHARACTERS,
    "minItems": MAX_ENTRIES,
    "maxItems": MAX_ENTRIES,
}
"""Larger bounds are not broken: the object would be too large for a prompt, or for the memory."""
BROKEN: dict[str, Callable[[Any, Any], Any]] = {
    "minimum": lambda _, bound: bound - 1,
    "exclusiveMinimum": lambda _, bound: bound,
    "maximum": lambda _, bound: bound + 1,
    "exclusiveMaximum": lambda _, bound: bound,
    "minLength": lambda _, bound: "a" * (bound - 1),
    "maxLength": lambda _, bound: "a" * (bound + 1),
    "minItems": lambda value, bound: value[: bound - 1],
    "maxItems": lambda value, bound: (value * (bound + 1))[: bound + 1],
}
"""Constraint to a value that breaks it, from the present value and the bound."""


def possible_errors(example: Any, schema: Mapping[str, Any]) -> list[ObjectError]:
    """Return the errors that can be introduced in an object, in the order of its fields."""
    return list(_errors(example, schema, schema, ()))


def _errors(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: tuple[str | int, ...]
) -> Iterator[ObjectError]:
    rules = resolved(schema, root)
    if path and value is not None:
        yield from _errors_of_value(value, rules, path)
    if isinstance(value, Mapping):
        for name, field in rules.get("properties", {}).items():
            if name in value:
                if name in rules.get("required", ()):
                    yield ObjectError("required_field_missing", (*path, name), None)
                yield from _errors(value[name], field, root, (*path, name))
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _errors(entry, rules.get("items", {}), root, (*path, i))


def _errors_of_value(
    value: Any, rules: Mapping[str, Any], path: tuple[str | int, ...]
) -> Iterator[ObjectError]:
    if rules.get("enum") or "const" in rules:
        yield ObjectError("enum_error", path, f"not_{value}")
        return
    kind = rules.get("type")
    if kind in ("integer", "number", "boolean", "object", "array"):
        yield ObjectError("type_error", path, "several")
    elif kind == "string" and not rules.get("format"):
        yield ObjectError("type_error", path, {"text": value})
    if rules.get("format") in FORMATTED:
        yield ObjectError("format_error", path, NOT_A_FORMAT)
    for name, wrong in BROKEN.items():
        bound = rules.get(name)
        if bound is None or (name in SIZES and bound == 0):
            continue
        if bound <= LARGEST_SIZES.get(name, bound):
            yield ObjectError("constraint_error", path, wrong(value, bound))


def spoiled(example: Any, errors: Sequence[ObjectError]) -> Any:
    """Return a copy of an object with errors applied; one below an earlier one is left out."""
    broken = copy.deepcopy(example)
    applied: list[tuple[str | int, ...]] = []
    for error in errors:
        if any(error.path[: len(path)] == path for path in applied):
            continue
        applied.append(error.path)
        *parents, last = error.path
        place = broken
        for key in parents:
            place = place[key]
        if error.kind == "required_field_missing":
            del place[last]
        else:
            place[last] = error.value
    return broken


def write_object(value: Any, syntax: Syntax, *, root: str = "object") -> str:
    """Return an object as text; in TOML, fields that are None are left out.

    Args:
        value: JSON values.
        syntax: the syntax.
        root: name of the outermost element in XML.
    """
    if syntax == "json":
        return json.dumps(value, indent=2, ensure_ascii=False)
    if syntax == "yaml":
        import yaml

        return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True)).rstrip()
    if syntax == "xml":
        return "\n".join(_xml_lines(value, root, ""))
    fields = {key: entry for key, entry in value.items() if entry is not None}
    return "\n".join(f"{_toml_key(key)} = {_toml_value(entry)}" for key, entry in fields.items())


def _toml_key(key: str) -> str:
    is_bare = key.isascii() and key.replace("-", "_").isidentifier()
    return key if is_bare else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        fields = [
            f"{_toml_key(key)} = {_toml_value(entry)}"
            for key, entry in value.items()
            if entry is not None
        ]
        return f"{{ {', '.join(fields)} }}" if fields else "{}"
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(entry) for entry in value if entry is not None)}]"
    return json.dumps(value, ensure_ascii=False)


def _xml_lines(value: Any, tag: str, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list) and value:
        pairs = value.items() if isinstance(value, Mapping) else (("item", v) for v in value)
        yield f"{indent}<{tag}>"
        for name, entry in pairs:
            yield from _xml_lines(entry, str(name), indent + "  ")
        yield f"{indent}</{tag}>"
    elif value is None or value in ({}, []):
        yield f"{indent}<{tag}/>"
    else:
        text = json.dumps(value) if isinstance(value, bool) else str(value)
        yield f"{indent}<{tag}>{escape(text)}</{tag}>"
