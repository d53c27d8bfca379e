"""Names of a program resolved to dotted ones: torch.save, accelerate.Accelerator().prepare, @utils:save_on_master."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from slurmddp.program.source import Source, absolute_name

_ALTERNATIVES = 6
_DEPTH = 12
_Def = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def chain(node: ast.AST) -> str:
    """Return `args.resume` for such an expression; empty for anything but names and attributes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def last(node: ast.AST) -> str:
    """Return the last part of a name or attribute; empty for others."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_value(node: ast.AST | None, value: object) -> bool:
    """Return whether a node is this constant."""
    return isinstance(node, ast.Constant) and node.value == value


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value; elements of a tuple get the whole value."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        pairs = [(node.target, node.value)]
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            named = ast.Call(func=node.annotation, args=[], keywords=[])  # trainer: Trainer = instantiate(cfg.trainer)
            pairs.append((node.target, ast.copy_location(named, node.value)))
    elif isinstance(node, ast.For) and isinstance(node.iter, (ast.Name, ast.List, ast.Tuple)):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        pairs = [(node.optional_vars, node.context_expr)]
    else:
        return
    for target, value in pairs:
        if not isinstance(target, (ast.Tuple, ast.List)):
            yield target, value
            continue
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        same = len(values) == len(target.elts)
        yield from ((each, values[i] if same else value) for i, each in enumerate(target.elts))


class Names:
    """The names of all read modules. Assignments are taken without regard to their order."""

    def __init__(self, sources: list[Source]) -> None:
        self.modules = {source.module: source for source in sources}
        self.aliases: dict[str, dict[str, str]] = {}
        self.local: dict[str, dict[str, ast.AST]] = {}
        self.assigned: dict[tuple[str, str], list[ast.expr]] = defaultdict(list)
        #: By the last name of an attribute, and by its last two: x.args.resume is args.resume, too.
        self.anywhere: dict[str, list[tuple[str, ast.expr]]] = defaultdict(list)
        self.bound: dict[str, set[str]] = defaultdict(set)  # by comprehensions
        self._dotted: dict[tuple[str, ast.AST, int], set[str]] = {}
        stars: list[tuple[str, str]] = []
        for source in sources:
            stars += self._read(source)
        for module, origin in stars:
            for name in self.local.get(origin, {}):
                self.aliases[module].setdefault(name, f"{origin}.{name}")
            for name, dotted in self.aliases.get(origin, {}).items():
                self.aliases[module].setdefault(name, dotted)

    def _read(self, source: Source) -> Iterator[tuple[str, str]]:
        aliases = self.aliases.setdefault(source.module, {})
        local = self.local.setdefault(source.module, {})
        for statement in source.tree.body:
            if isinstance(statement, _Def):
                local[statement.name] = statement
        stars = []
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    top = each.name.split(".")[0]
                    aliases[each.asname or top] = each.name if each.asname else top
            elif isinstance(node, ast.ImportFrom):
                base = absolute_name(node, source.package)
                for each in node.names:
                    if each.name == "*":
                        stars.append((source.module, base))
                    else:
                        aliases[each.asname or each.name] = f"{base}.{each.name}".lstrip(".")
            elif isinstance(node, ast.comprehension):
                self.bound[source.module] |= {last(each) for each in ast.walk(node.target)}
            for target, value in targets(node):
                if key := chain(target):
                    self.assigned[source.module, key].append(value)
                    for name in {last(target), _ending(key)}:
                        self.anywhere[name].append((source.module, value))
        return iter(stars)

    def values(self, module: str, node: ast.AST, *, exact: bool = False) -> list[tuple[str, ast.expr]]:
        """Return what is assigned to a name or attribute: in its module, else wherever the same last name is.

        exact: only where the name before the last one is the same.
        """
        here = [(module, value) for value in self.assigned.get((module, chain(node)), ())]
        return here or self.anywhere.get(_ending(chain(node)) if exact else last(node), [])

    def dotted(self, module: str, node: ast.AST, depth: int = 0) -> set[str]:
        """Return what an expression may be, as dotted names; `()` stands for a call; empty if unknown."""
        if depth > _DEPTH:
            return set()
        key = (module, node, depth)
        if key not in self._dotted:
            self._dotted[key] = self._resolve(module, node, depth)
        return self._dotted[key]

    def _resolve(self, module: str, node: ast.AST, depth: int) -> set[str]:
        found: set[str] = set()
        if isinstance(node, ast.Call):
            for each in self.dotted(module, node.func, depth + 1):
                if each == "functools.partial" and node.args:
                    found |= self.dotted(module, node.args[0], depth + 1)
                else:
                    found.add(f"{each}()")
        elif isinstance(node, ast.Subscript):
            found = {f"{each}[]" for each in self.dotted(module, node.value, depth + 1)}
        elif isinstance(node, ast.IfExp):
            found = self.dotted(module, node.body, depth + 1) | self.dotted(module, node.orelse, depth + 1)
        elif isinstance(node, ast.Name) and node.id in self.local.get(module, {}):
            found = self._definition(module, node.id, depth)
        elif isinstance(node, ast.Name) and node.id in self.aliases.get(module, {}):
            found = self.real(self.aliases[module][node.id], depth)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            if isinstance(node, ast.Attribute):
                for each in self.dotted(module, node.value, depth + 1):
                    found |= self.real(f"{each}.{node.attr}", depth)
            if not found or all(each.startswith("@") for each in found):
                for of, value in self.values(module, node)[:_ALTERNATIVES]:
                    if isinstance(value, (ast.Call, ast.Name, ast.Attribute, ast.IfExp)) and value is not node:
                        found |= self.dotted(of, value, depth + 3)
        return found

    def real(self, dotted: str, depth: int = 0) -> set[str]:
        """Follow a dotted name into the modules that were read."""
        head, _, tail = dotted.rpartition(".")
        if head in self.modules and depth <= _DEPTH:
            if tail in self.local[head]:
                return self._definition(head, tail, depth + 1)
            if (onward := self.aliases[head].get(tail)) and onward != dotted:
                return self.real(onward, depth + 1)
            if values := self.assigned.get((head, tail)):
                return set().union(*(self.dotted(head, value, depth + 3) for value in values[:_ALTERNATIVES]))
        return {dotted}

    def _definition(self, module: str, name: str, depth: int) -> set[str]:
        """Return a local function or class as @module:name, and for a class what it inherits from."""
        found = {f"@{module}:{name}"}
        node = self.local[module][name]
        if isinstance(node, ast.ClassDef) and depth < _DEPTH:
            for base in node.bases:
                if last(base) != name:
                    found |= self.dotted(module, base, depth + 2)
        return found
