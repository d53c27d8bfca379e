"""JSON Schemas for editors, made from the models and from the tables of keys in docs/job.md and docs/sites.md.

A wheel has no docs: hatch_build.py writes the schemas into it.
"""

import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slurmddp.assets import asset_folder, built_schema
from slurmddp.errors import UserError
from slurmddp.job import types as forms
from slurmddp.job.job import _NODES, Bind, Job, Nodes
from slurmddp.job.layers import submodel
from slurmddp.job.recipe import Copied, Recipe
from slurmddp.job.site import Site, When

Schema = dict[str, Any]

#: A scalar without quotes is text wherever a key wants text: `account: 0123`.
_TEXT: Schema = {"type": ["string", "number", "boolean"]}
_SCALARS: dict[Any, Schema] = {
    str: _TEXT,
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    Any: {},
}
_MEMORY = r"\d{1,12}\s*[KMGTkmgt](?:[iI]?[bB])?"
_TIME = f"{forms._CLOCK}|{forms._UNITS}"
#: What a validator of slurmddp/job/types.py lets through. All others say more than a schema can.
_FORMS: dict[str, Schema] = {
    "_name": _TEXT | {"pattern": f"^{forms._NAME}$"},
    "_sbatch_value": _TEXT | {"pattern": f"^(?!-){forms.SBATCH}$"},
    "_sbatch_flag": {"type": "string", "pattern": f"^(?=--?[A-Za-z]){forms.SBATCH}$"},
    "_interface": {"type": "string", "pattern": f"^{forms._INTERFACE}$"},
    "_env_name": {"type": "string", "pattern": f"^{forms._ENV_NAME}$"},
    "_runtime_option": {"type": "string", "pattern": "^-"},
    "_seconds": {"type": ["string", "number"], "pattern": f"^(?:{_TIME}|{forms._NUMBER})$"},
    "_time_limit": {"type": "string", "pattern": f"^(?:{_TIME})$"},
    "mebibytes": {"type": "string", "pattern": f"^{_MEMORY}$"},
    "_node_memory": {"type": "string", "pattern": rf"^(?:all|{_MEMORY})$"},
    "_ranks": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1024}, {"const": "auto"}]},
}
#: Models that may be written as text instead.
_AS_TEXT: dict[type[BaseModel], str] = {
    Nodes: f"^{_NODES}$",
    Bind: "^[^:]+(?::[^:]+(?::(?:ro|rw))?)?$",
    Copied: "^.+:.+$",
}
#: A job file and a recipe are layers: what they leave out can come from another one.
_LAYERS = (Job, Recipe, Nodes)
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


KINDS: dict[str, type[BaseModel]] = {"job": Job, "site": Site, "recipe": Recipe}


def schema_text(kind: str) -> str:
    """Return the JSON Schema of `job`, `site` or `recipe` files. Raises UserError for others."""
    if kind not in KINDS:
        raise UserError(f"unknown kind of file {kind!r}", todo=f"use {', '.join(KINDS)}")
    built = built_schema(kind)
    return built.read_text(encoding="utf-8") if built.is_file() else _from_models(kind)


def _from_models(kind: str) -> str:
    job = _rows("job.md", 2)
    rows = {"job": job, "site": _rows("sites.md", 1), "recipe": {}}[kind]
    return json.dumps(_whole(kind, KINDS[kind], rows, job), indent=1, ensure_ascii=False) + "\n"


def _rows(page: str, column: int) -> dict[str, str]:
    """Key -> what the page's table says of it."""
    texts: dict[str, str] = {}
    for line in (asset_folder("docs") / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) > column:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cells[column]).strip("| ")
            texts |= dict.fromkeys(re.findall(r"`([A-Za-z_.]+)`", cells[0]), text)
    return texts


def _whole(kind: str, model: type[BaseModel], rows: Mapping[str, str], job: Mapping[str, str]) -> Schema:
    builder = _Builder(job)
    root = builder.model(model, rows, "")
    title = f"slurmddp {kind} file"
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **root, "definitions": builder.known}


class _Builder:
    """Collects one definition per model."""

    def __init__(self, job: Mapping[str, str]) -> None:
        self.job = job
        self.known: dict[str, Schema] = {}

    def model(self, model: type[BaseModel], rows: Mapping[str, str], above: str) -> Schema:
        """Define the model once, and return a reference to it. above: its key in the rows of the docs."""
        name = model.__name__
        if name not in self.known:
            self.known[name] = {}  # its place in the file: before those below it
            about, of_fields = _docstring(model)
            properties, required = {}, []
            for field_name, field in model.model_fields.items():
                key = field.alias or field_name
                path = above + key
                inner = submodel(field.annotation)
                text = rows.get(path) or rows.get(f"{path}.NAME") or of_fields.get(key)
                text = text or (_docstring(inner)[0] if inner else None) or _of_row_above(rows, above, key)
                properties[key] = self.field(model, key, field, rows, above) | ({"description": text} if text else {})
                if field.is_required() and model not in _LAYERS:
                    required.append(key)
            whole: Schema = {"type": "object", "description": about, "properties": properties}
            self.known[name] = whole | {"additionalProperties": False} | ({"required": required} if required else {})
        reference = {"$ref": f"#/definitions/{name}"}
        return (
            {"anyOf": [{"type": "string", "pattern": _AS_TEXT[model]}, reference]} if model in _AS_TEXT else reference
        )

    def field(self, model: type[BaseModel], key: str, field: FieldInfo, rows: Mapping[str, str], above: str) -> Schema:
        if model in (Site, When) and key == "job":
            return {"allOf": [self.model(Job, self.job, "")]}
        schema = self.of(field.annotation, field.metadata, rows, f"{above}{key}.")
        if "$ref" in schema:  # what stands beside a reference does not count
            schema = {"allOf": [schema]}
        default = field.get_default()
        if not isinstance(default, str | int | float) or (model is Job and key == "name"):  # of a job: the file's name
            return schema
        unit = forms.unit_of(field)
        return schema | {"default": f"{default}{unit}" if unit else default}

    def of(self, kind: Any, marks: Iterable[Any], rows: Mapping[str, str], above: str) -> Schema:
        """Return the schema of an annotation."""
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:
            return self.of(parts[0], [*parts[1:], *marks], rows, above)
        if form := next((_FORMS[name] for mark in marks if (name := _function(mark)) in _FORMS), None):
            form = form | _limits(marks) if "number" in form.get("type", "") else form
            return _nullable(form) if type(None) in parts else form
        if origin is Literal:
            return {"enum": list(parts)}
        if origin in (typing.Union, types.UnionType):
            schemas = [self.of(part, marks, rows, above) for part in parts if part is not type(None)]
            schemas = [item for each in schemas for item in each.get("anyOf", [each])]
            union = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            return _nullable(union) if type(None) in parts else union
        if origin is tuple:
            length = {} if Ellipsis in parts else {"minItems": len(parts), "maxItems": len(parts)}
            return {"type": "array", "items": self.of(parts[0], (), rows, above), **length}
        if origin is dict:
            names = self.of(parts[0], (), rows, above)
            values = self.of(parts[1], (), rows, f"{above}NAME.")
            named = {"propertyNames": {"pattern": names["pattern"]}} if "pattern" in names else {}
            named |= {"propertyNames": {"enum": names["enum"]}} if "enum" in names else {}
            return {"type": "object", "additionalProperties": values, **named}
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return self.model(kind, rows, above)
        unknown = {_function(mark) for mark in marks} - {"", "_count", "_no_sign"}
        if kind is int and unknown:
            raise TypeError(f"say in _FORMS what {unknown} accept")
        return _SCALARS[kind] | _limits(marks)


def _of_row_above(rows: Mapping[str, str], above: str, key: str) -> str | None:
    """What the row of the key above says, if it names this key."""
    text = rows.get(above.removesuffix(".")) or rows.get(above.removesuffix(".NAME."), "")
    return text if f"`{key}`" in text else None


def _nullable(schema: Schema) -> Schema:
    if "type" in schema:
        listed = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        return schema | {"type": [*listed, "null"]}
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    return {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}


def _function(mark: Any) -> str:
    return getattr(getattr(mark, "func", None), "__name__", "")


def _limits(marks: Iterable[Any]) -> Schema:
    """The limits that `Field(ge=1)` and its like set."""
    flat = [inner for mark in marks for inner in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    return {word: getattr(mark, name) for mark in flat for name, word in _LIMITS.items() if hasattr(mark, name)}


def _docstring(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """Return what a model's docstring says of the whole, and `key: text` of its fields."""
    text = " ".join((model.__doc__ or "").split())
    name = rf"`?(?:{'|'.join(map(re.escape, [*model.model_fields, 'from', 'global']))})`?"
    about, *pairs = re.split(rf"(?:(?<=[.;] )|^)({name}(?:, {name})*): ", text)
    of_fields: dict[str, str] = {}
    for names, description in zip(pairs[::2], pairs[1::2], strict=True):
        of_fields |= dict.fromkeys(re.findall(r"\w+", names), description.strip().rstrip(".;, "))
    return about.strip(), of_fields
