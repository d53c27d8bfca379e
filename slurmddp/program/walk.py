"""Which calls a program can reach from its start, and under which conditions each stands."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from slurmddp.program.facts import Place
from slurmddp.program.names import Names, chain, last, targets
from slurmddp.program.source import Source

_RANK = re.compile(
    r"(?:^|_)(?:rank|ranks|rank0|main_process|is_main|is_master|master|on_main|primary|is_primary|rank_zero|global_zero|"
    r"world_process_zero|process_index|chief|main_proc|is_rank0|local_rank|process_zero|coordinator)(?:$|_)",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"(?:^|_)(?:gpu|gpu_id|device|device_id|rank_id|proc_id|global_rank|localrank)$")
#: Asks whether there is one process; whether the program starts several itself is another question.
_SINGLE = re.compile(
    r"(?<!multiprocessing_)distributed|is_initialized|is_available|world_size|ddp|num_gpus|n_gpu", re.IGNORECASE
)
_EXITS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_HOOKED = re.compile(r"Lightning|Callback|Trainer|Strategy|Algorithm|TrainerCallback|Plugin")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
#: The conditions around a statement.
Guards: TypeAlias = tuple[ast.expr, ...]


class Event(NamedTuple):
    """A call that the program can reach. names: what it may call; guards: the conditions around it."""

    unit: Unit
    node: ast.Call
    names: frozenset[str]
    guards: Guards

    @property
    def values(self) -> list[ast.expr]:
        """Return what it is given."""
        return [*self.node.args, *(each.value for each in self.node.keywords)]

    def matches(self, pattern: re.Pattern[str]) -> bool:
        """Return whether one of its names matches as a whole."""
        return any(map(pattern.fullmatch, self.names))

    def argument(self, name: str, position: int | None = None) -> ast.expr | None:
        """Return the value of an argument; None if it is not given here."""
        for keyword in self.node.keywords:
            if keyword.arg == name:
                return keyword.value
        args = self.node.args
        if position is not None and 0 <= position < len(args) and not any(isinstance(a, ast.Starred) for a in args):
            return args[position]
        return None


class Unit:
    """A function, or the top level of a module with its classes' bodies."""

    def __init__(self, source: Source, name: str, of: str, node: ast.AST | None) -> None:
        self.source, self.name, self.of, self.node = source, name, of, node
        self.calls: list[tuple[ast.Call, Guards]] = []
        self.refs: list[tuple[ast.expr, Guards]] = []
        self.assigns: list[tuple[ast.expr, ast.expr, Guards]] = []

    @property
    def decorators(self) -> list[ast.expr]:
        """Return the decorators of a function."""
        return self.node.decorator_list if isinstance(self.node, _Function) else []


class Program:
    """The units, the reached ones, and their calls."""

    def __init__(self, sources: list[Source]) -> None:
        self.names = Names(sources)
        self.sources = sources
        self.units: list[Unit] = []
        self.where: dict[ast.expr, Unit] = {}  # of each condition
        #: What is false where an early return, raise or exit was not taken; whether a program that trains took none.
        self.passed: dict[ast.expr, bool] = {}
        self.classes: dict[str, list[tuple[Source, ast.ClassDef]]] = defaultdict(list)
        for source in sources:
            top = Unit(source, "", "", None)
            self.units.append(top)
            self._block(source.tree.body, (), top, "")
        self._functions: dict[tuple[str, str], list[Unit]] = defaultdict(list)
        self._methods: dict[str, list[Unit]] = defaultdict(list)
        self._members: dict[str, list[Unit]] = defaultdict(list)
        for unit in self.units:
            if unit.of:
                self._methods[unit.name].append(unit)
                self._members[unit.of].append(unit)
            elif unit.name:
                self._functions[unit.source.module, unit.name].append(unit)
        self.callers: dict[Unit, list[tuple[Unit, Guards]]] = defaultdict(list)
        self._conditions: dict[Unit, list[ast.expr]] = {}
        self.reached = self._reach()
        self.rank_names = self._rank_names()
        self.events = list(self._events())

    def place(self, unit: Unit, node: ast.AST) -> Place:
        """Return where a node stands."""
        line = getattr(node, "lineno", 1)
        lines = unit.source.lines
        text = lines[line - 1].strip() if line <= len(lines) else ""
        return Place(unit.source.path, line, text if len(text) <= 90 else f"{text[:87]}...")

    def _block(self, body: list[ast.stmt], guards: Guards, unit: Unit, of: str) -> None:
        for node in body:
            if isinstance(node, _Function):
                inner = Unit(unit.source, node.name, of, node)
                self.units.append(inner)
                for each in node.decorator_list:
                    self._expressions(each, guards, unit)
                for default in [*node.args.defaults, *node.args.kw_defaults]:
                    self._expressions(default, guards, unit)
                self._block(node.body, (), inner, "")
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name].append((unit.source, node))
                for each in (*node.bases, *node.decorator_list):
                    self._expressions(each, guards, unit)
                self._block(node.body, guards, unit, node.name)
            elif isinstance(node, ast.If):
                if (main := _is_main(node.test)) and unit.source.module != "__main__":
                    continue
                self._expressions(node.test, guards, unit)
                inner_guards = guards if main else (*guards, node.test)
                other = guards if main else (*guards, ast.UnaryOp(ast.Not(), node.test))
                self.where.update(dict.fromkeys((node.test, *other[len(guards) :]), unit))
                self._block(node.body, inner_guards, unit, of)
                self._block(node.orelse, other, unit, of)
                if node.body and (isinstance(node.body[-1], _EXITS) or _is_exit(node.body[-1])) and not node.orelse:
                    self.passed.update(dict.fromkeys(other[len(guards) :], not isinstance(node.body[-1], ast.Return)))
                    guards = other
            else:
                self._statement(node, guards, unit, of)

    def _statement(self, node: ast.stmt, guards: Guards, unit: Unit, of: str) -> None:
        for target, value in targets(node):
            unit.assigns.append((target, value, guards))
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                self._block(value, guards, unit, of)
            elif name in ("handlers", "cases"):
                for each in value:
                    self._block(each.body, guards, unit, of)
            else:
                for each in value if isinstance(value, list) else [value]:
                    self._expressions(each, guards, unit)

    def _expressions(self, node: object, guards: Guards, unit: Unit) -> None:
        if not isinstance(node, ast.AST):
            return
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                unit.calls.append((each, guards))
            elif isinstance(each, (ast.Name, ast.Attribute)) and isinstance(each.ctx, ast.Load):
                unit.refs.append((each, guards))
            elif isinstance(each, ast.withitem):
                unit.assigns += [(target, value, guards) for target, value in targets(each)]

    def _reach(self) -> list[Unit]:
        """Follow references from the top level of each module. A method is reached by its name, if its class is."""
        waiting = [unit for unit in self.units if not unit.name]
        reached = dict.fromkeys(waiting)
        classes: set[str] = set()
        attributes: dict[str, list[tuple[Unit, Guards]]] = defaultdict(list)

        def add(unit: Unit, caller: Unit, guards: Guards) -> None:
            self.callers[unit].append((caller, guards))
            if unit not in reached:
                reached[unit] = None
                waiting.append(unit)

        def add_class(name: str, caller: Unit, guards: Guards) -> None:
            if name in classes:
                return
            classes.add(name)
            for source, node in self.classes[name]:
                bases = (name for base in node.bases for name in self.names.dotted(source.module, base))
                hooked = any(map(_HOOKED.search, bases))
                for method in [unit for unit in self._members.get(name, ()) if unit.source is source]:
                    special = method.name.startswith("__") or method.name == "forward" or hooked
                    if special or method.name in attributes:
                        for origin in attributes.get(method.name) or [(caller, guards)]:
                            add(method, *origin)
                for base in node.bases:
                    add_class(last(base), caller, guards)

        while waiting:
            unit = waiting.pop()
            for node, guards in unit.refs:
                for name in self._local(unit, node):
                    of, _, plain = name.partition(":")
                    if plain in self.classes:
                        add_class(plain, unit, guards)
                    for target in self._functions.get((of, plain), ()):
                        add(target, unit, guards)
                if isinstance(node, ast.Attribute) and not self._is_foreign(unit, node):
                    attributes[node.attr].append((unit, guards))
                    for target in self._methods.get(node.attr, ()):
                        if target.of in classes:
                            add(target, unit, guards)
        return list(reached)

    def _local(self, unit: Unit, node: ast.expr) -> Iterator[str]:
        module = unit.source.module
        if isinstance(node, ast.Name):
            if (module, node.id) in self._functions or node.id in self.classes:
                yield f"{module}:{node.id}"
            if node.id in self.names.aliases[module]:
                yield from (each[1:] for each in self.names.real(self.names.aliases[module][node.id]) if each[0] == "@")
        elif chain(node):
            root = chain(node).split(".")[0]
            if root in self.names.aliases[module]:
                full = ".".join([self.names.aliases[module][root], *chain(node).split(".")[1:]])
                yield from (each[1:] for each in self.names.real(full) if each[0] == "@")

    def _is_foreign(self, unit: Unit, node: ast.Attribute) -> bool:
        """Return whether an attribute is one of a module that is not ours, as in torch.save."""
        root = chain(node).split(".")[0]
        alias = self.names.aliases[unit.source.module].get(root, "") if root else ""
        return bool(alias) and not any(alias == each or alias.startswith(f"{each}.") or each.startswith(f"{alias}.")
                                       for each in self.names.modules)  # fmt: skip

    def _events(self) -> Iterator[Event]:
        for unit in self.reached:
            for node, guards in unit.calls:
                names = self.names.dotted(unit.source.module, node.func)
                if isinstance(node.func, ast.Name) and not names:
                    names = {f"builtins.{node.func.id}"}
                yield Event(unit, node, frozenset(names), guards)

    # Conditions

    def _rank_names(self) -> set[str]:
        """Return names that hold a question about the rank, as in `master = rank == 0`, or that only rank 0 sets."""
        found: set[str] = set()
        for _ in range(3):
            for unit in self.units:
                for target, value, guards in unit.assigns:
                    compares = isinstance(value, (ast.Compare, ast.BoolOp, ast.IfExp, ast.UnaryOp, ast.Call))
                    asks = compares and _asks_rank(value, found) and not _is_number_of_rank(value)
                    only = isinstance(value, ast.Call) and any(_asks_rank(test, found) for test in guards)
                    if (asks or only) and last(target) not in ("model", "optimizer", "device"):
                        found.add(last(target))
        return found

    def of_rank(self, test: ast.expr) -> bool:
        """Return whether a condition asks for the rank."""
        return _asks_rank(test, self.rank_names)

    def leaves_one(self, test: ast.expr, *, true: bool = True) -> bool:
        """Return whether a condition leaves one rank. Of `a or b`, each part must, or ask for a single process.

        true: whether the condition holds, or not.
        """
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.leaves_one(test.operand, true=not true)
        if isinstance(test, ast.BoolOp):
            parts = [self.leaves_one(each, true=true) for each in test.values]
            if isinstance(test.op, ast.And) is true:
                return any(parts)
            alone = [_SINGLE.search(ast.dump(each)) is not None for each in test.values]
            return any(parts) and all(a or b for a, b in zip(parts, alone, strict=True))
        return self.of_rank(test)

    def always_under(self, unit: Unit, guards: Guards, seen: frozenset[Unit] = frozenset()) -> bool:
        """Return whether each way to a call asks for the rank."""
        if any(self.leaves_one(test) for test in guards):
            return True
        if any(_RANK.search(last(d.func if isinstance(d, ast.Call) else d)) for d in unit.decorators):
            return True
        callers = self.callers.get(unit, []) if unit.name else []
        if not callers or unit in seen:
            return False
        return all(self.always_under(caller, tests, seen | {unit}) for caller, tests in callers)

    def conditions(self, unit: Unit, guards: Guards) -> list[ast.expr]:
        """Return the conditions around a call, and those around all calls of its function."""
        return [*guards, *self._above(unit)]

    def _above(self, unit: Unit) -> list[ast.expr]:
        if (known := self._conditions.get(unit)) is None:
            tests: dict[ast.expr, None] = {}
            seen, level = {unit}, [unit]
            for _ in range(6):
                ways = [way for each in level if each.name for way in self.callers.get(each, ())[:8]]
                tests.update(dict.fromkeys(test for _, guards in ways for test in guards))
                level = [caller for caller in dict.fromkeys(caller for caller, _ in ways) if caller not in seen]
                seen.update(level)
            known = self._conditions[unit] = list(tests)
        return known


def _asks_rank(node: ast.AST, known: set[str]) -> bool:
    for each in ast.walk(node):
        name = last(each) or (each.value if isinstance(each, ast.Constant) and isinstance(each.value, str) else "")
        if name and (name in known or _RANK.search(name)):
            return True
        if isinstance(each, ast.Compare) and _DEVICE.search(last(each.left)) and not isinstance(each.ops[0], ast.IsNot):
            if isinstance(each.comparators[0], ast.Constant) and each.comparators[0].value == 0:
                return True
    return False


def _is_number_of_rank(value: ast.AST) -> bool:
    """Return whether a value is a rank, not a question about it: int(os.environ["RANK"]), get_rank(), model(rank)."""
    if not isinstance(value, ast.Call):
        return False
    return not re.search(r"(?:^|_)(?:is|on)_", last(value.func))


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and chain(test.left) == "__name__" and isinstance(test.ops[0], ast.Eq)


def _is_exit(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and chain(call.func) in ("sys.exit", "exit", "quit", "os._exit")
