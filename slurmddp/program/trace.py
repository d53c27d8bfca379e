"""Where the value of an expression comes from: constants, command-line options, the environment, calls."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from slurmddp.program.names import chain, last
from slurmddp.program.walk import Event, Program, Unit

_DEPTH = 8
_LIMIT = 2000
_PARTS = {"os.path.join", "pathlib.Path", "str", "builtins.str", "os.path.abspath", "os.path.expanduser", "os.fspath"}
#: Names of what counts steps: they are unknown numbers, and no user changes them.
COUNTER = re.compile(
    r"(?:^|_)(?:epoch|epochs|step|steps|iter|iters|iteration|iter_num|itr|it|i|batch_idx|cur)(?:$|_|\d)"
)


#: Where a program writes: nobody trains without it.
_FOLDER = re.compile(r"out(?:put)?(?:_|$)|dir$|folder$|path$")
#: Names of what holds the user's choices.
_CONFIG = {"args", "opt", "opts", "cfg", "config", "conf", "hps", "hparams", "params", "flags", "FLAGS", "settings"}


class Option(NamedTuple):
    """An argument of the command line. flag: as the user writes it; takes: whether a value follows it.

    computed: a default that is no constant.
    """

    flag: str
    dest: str
    default: object
    takes: bool
    known: bool
    line: int
    computed: tuple[Unit, ast.expr] | None = None


class Origin(NamedTuple):
    """words: identifiers and texts of the expression and of what it came from; unknown: names that could not be traced;
    chosen: attributes of arguments or of a configuration that are not seen here.
    """

    words: set[str]
    calls: set[str]
    options: set[str]
    unknown: set[str]
    chosen: set[str]


class Trace:
    """The options of a program, and the origin and text of its expressions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.options = {option.dest: option for event in program.events if (option := _option(event))}
        self._entries: set[Unit] = set()
        functions = {f"@{unit.source.module}:{unit.name}": unit for unit in program.units if unit.node is not None}
        for event in program.events:
            if "fire.Fire" in event.names and event.node.args:  # each parameter is an argument
                for name in program.names.dotted(event.unit.source.module, event.node.args[0]) & set(functions):
                    self._entries.add(functions[name])
                    self.options |= {each.dest: each for each in _parameters(functions[name])}
        self._tops = {each.source.module: each for each in program.units if not each.name}
        if any(last(event.node.func) == "HfArgumentParser" for event in program.events):
            name = "resume_from_checkpoint"  # a field of transformers.TrainingArguments
            self.options[name] = Option(f"--{name}", name, None, True, True, 0)
        self._origins: dict[tuple[Unit, ast.expr], Origin] = {}
        self._switches: dict[tuple[Unit, int], list[str]] = {}
        self._always: dict[tuple[Unit, ast.expr, re.Pattern[str]], bool] = {}
        self._functions: dict[str, list[Unit]] = {}
        for unit in program.reached:
            self._functions.setdefault(f"@{unit.source.module}:{unit.name}", []).append(unit)
        self._callers: dict[str, list[Event]] = {}
        for event in program.events:
            for name in event.names:
                if name.startswith("@"):
                    self._callers.setdefault(name.rpartition(":")[2].rpartition(".")[2], []).append(event)
            if isinstance(event.node.func, ast.Attribute):
                self._callers.setdefault(f".{event.node.func.attr}", []).append(event)

    def sources(self, unit: Unit, node: ast.expr) -> list[tuple[Unit, ast.expr]]:
        """Return the expressions from which a name or attribute gets its value: arguments of callers, assignments."""
        if isinstance(node, ast.Name) and (found := self._arguments(unit, node.id)) is not None:
            return found
        key = chain(node)
        here = [(unit, value) for target, value, _ in unit.assigns if key and chain(target) == key]
        if here:
            return here
        module, names = unit.source.module, self.program.names
        if isinstance(node, ast.Name):
            of, _, plain = names.aliases[module].get(node.id, f"{module}.{node.id}").rpartition(".")
            return [(self._tops[of], value) for value in names.assigned.get((of, plain), ()) if of in self._tops]
        option = last(node) in self.options and bool(key)
        return [(self._tops[of], value) for of, value in names.values(module, node, exact=option)]

    def _arguments(self, unit: Unit, name: str) -> list[tuple[Unit, ast.expr]] | None:
        """Return what callers pass for a parameter, and its default; None if it is no parameter."""
        if (args := getattr(unit.node, "args", None)) is None:
            return None
        places = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        if name not in {*places, *(arg.arg for arg in args.kwonlyargs)}:
            return None
        defaults = dict(zip(reversed(places), reversed(args.defaults), strict=False))
        defaults |= {arg.arg: value for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value}
        position = places.index(name) - (1 if unit.of else 0) if name in places else None
        passed = [(event.unit, event.argument(name, position)) for event in self._calls_of(unit)]
        return [(of, value) for of, value in ((unit, defaults.get(name)), *passed) if value is not None]

    def _calls_of(self, unit: Unit) -> list[Event]:
        called = f".{unit.name}" if unit.of and unit.name != "__init__" else unit.of or unit.name
        return self._callers.get(called, [])[:12]

    def keyword(
        self, event: Event, name: str, position: int | None = None, depth: int = 0
    ) -> list[tuple[Unit, ast.expr]]:
        """Return what a call gets for an argument, also by `**options`: a dict, or what the caller got."""
        if (value := event.argument(name, position)) is not None:
            return [(event.unit, value)]
        found: list[tuple[Unit, ast.expr]] = []
        for given in (each.value for each in event.node.keywords if each.arg is None):
            own = getattr(event.unit.node, "args", None)
            if own is not None and own.kwarg and own.kwarg.arg == last(given) and depth < 4:
                for call in self._calls_of(event.unit):
                    found += self.keyword(call, name, None, depth + 1)
            for of, value in self.sources(event.unit, given):
                if isinstance(value, ast.Dict):
                    pairs = zip(value.keys, value.values, strict=True)
                    found += [(of, each) for key, each in pairs if isinstance(key, ast.Constant) and key.value == name]
                elif isinstance(value, ast.Call):
                    found += [(of, each.value) for each in value.keywords if each.arg == name]
        return found

    def switches(self, unit: Unit, guards: tuple[ast.expr, ...], depth: int = 0) -> list[str]:
        """Return flags, off by default, without which a call is not reached."""
        found = []
        for test in guards:
            for each in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
                asked = each.left if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.IsNot) else each
                option = self.options.get(last(asked)) if isinstance(asked, ast.Attribute) else None
                off = option and option.known and not (option.default or _FOLDER.search(option.dest))
                if option and off and not self.sources(unit, asked):
                    found.append(option.flag)
        if found or not unit.name or depth >= 6:
            return found
        if (unit, depth) not in self._switches:
            ways = [self.switches(caller, tests, depth + 1) for caller, tests in self.program.callers.get(unit, ())]
            self._switches[unit, depth] = ways[0] if ways and all(ways) else []
        return self._switches[unit, depth]

    def returned(self, names: set[str]) -> list[tuple[Unit, ast.expr]]:
        """Return what local functions of these names return."""
        units = (unit for name in names for unit in self._functions.get(name, ()) if unit.node is not None)
        nodes = ((unit, each) for unit in units for each in ast.walk(unit.node or unit.source.tree))
        return [(unit, n.value) for unit, n in nodes if isinstance(n, ast.Return) and n.value is not None][:4]

    def origin(self, unit: Unit, node: ast.expr) -> Origin:
        """Follow an expression to all that it comes from."""
        if (found := self._origins.get((unit, node))) is None:
            found = self._origins[unit, node] = Origin(set(), set(), set(), set(), set())
            self._follow(unit, node, found, set(), 0)
        return found

    def _follow(self, unit: Unit, node: ast.expr, found: Origin, seen: set[ast.AST], depth: int) -> None:
        for each in ast.walk(node):
            if len(seen) > _LIMIT:
                found.unknown.add("...")  # what was not followed may be anything
                return
            if each in seen:
                continue
            seen.add(each)
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                found.words.add(each.value)
                if each.value in self.options:  # args["resume"], getattr(args, "resume"), cfg.get("resume")
                    found.options.add(each.value)
            elif isinstance(each, ast.Call):
                names = self.program.names.dotted(unit.source.module, each.func)
                found.calls.update(names)
                of_module = chain(each.func).split(".")[0] in self.program.names.aliases[unit.source.module]
                seen.update(ast.walk(each.func) if of_module else [each.func])
                found.words.add(last(each.func))
                if depth < _DEPTH:
                    for of, value in self.returned(names):
                        self._follow(of, value, found, seen, depth + 2)
            elif isinstance(each, (ast.Name, ast.Attribute)) and (name := last(each)):
                found.words.add(name)
                option = name in self.options and (isinstance(each, ast.Attribute) or self._is_parameter(unit, name))
                values = self.sources(unit, each)[:6] if depth < _DEPTH and not COUNTER.search(name) else []
                if option:
                    found.options.add(name)
                    values += [computed] if (computed := self.options[name].computed) else []
                if (option or values) and isinstance(each, ast.Attribute):
                    seen.update(ast.walk(each))  # of args.resume, not args itself
                elif not (option or values) and isinstance(each, ast.Attribute):
                    names = self.program.names.dotted(unit.source.module, each)
                    if _CONFIG & set(chain(each).split(".")[:-1]) or any("parse_" in one for one in names):
                        found.chosen.add(name)
                elif not (option or values) and self._is_open(unit, each):
                    found.unknown.add(name)
                for of, value in values:
                    self._follow(of, value, found, seen, depth + 1)

    def _is_parameter(self, unit: Unit, name: str) -> bool:
        """Return whether a name is a parameter of a function that fire or click calls with an argument."""
        args = getattr(unit.node, "args", None)
        entry = unit in self._entries or any("option" in strings([each]) for each in unit.decorators)
        return entry and args is not None and name in {each.arg for each in (*args.args, *args.kwonlyargs)}

    def always(self, unit: Unit, node: ast.expr, pattern: re.Pattern[str]) -> bool:
        """Return whether each value of an expression comes from such a call, whatever the user's arguments are."""
        key = (unit, node, pattern)
        if key not in self._always:
            self._always[key] = False  # in a circle
            self._always[key] = self._comes_from(unit, node, pattern)
        return self._always[key]

    def _comes_from(self, unit: Unit, node: ast.expr, pattern: re.Pattern[str]) -> bool:
        if isinstance(node, ast.Call):
            names = self.program.names.dotted(unit.source.module, node.func)
            if any(pattern.fullmatch(name) for name in names):
                return not any(self.origin(unit, arg).options for arg in node.args)
            returned = self.returned(names)
            if returned and all(self.always(of, value, pattern) for of, value in returned):
                return True
        elif isinstance(node, (ast.Name, ast.Attribute)) and chain(node):
            values = [] if isinstance(node, ast.Attribute) and node.attr in self.options else self.sources(unit, node)
            return bool(values) and all(self.always(of, value, pattern) for of, value in values)
        some = all if isinstance(node, ast.BoolOp) else any
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else list(ast.iter_child_nodes(node))
        if isinstance(node, ast.IfExp):
            some = all
        parts = [part.value if isinstance(part, ast.keyword) else part for part in parts]
        return some([self.always(unit, part, pattern) for part in parts if isinstance(part, ast.expr)] or [False])

    def _is_open(self, unit: Unit, node: ast.expr) -> bool:
        """Return whether nothing is known of a name."""
        name, module = last(node), unit.source.module
        known = name in self.program.names.bound[module] or hasattr(builtins, name)
        return not (known or COUNTER.search(name) or self.program.names.dotted(module, node))

    def texts(self, unit: Unit, node: ast.expr, depth: int = 0) -> set[str | None]:
        """Return what a path may be: `*` for parts that are numbers or unknown names, None where nothing is known."""
        if depth > _DEPTH:
            return {None}
        if isinstance(node, ast.Constant):
            return {str(node.value)} if isinstance(node.value, (str, int)) else {None}
        if isinstance(node, ast.JoinedStr):
            parts = [self.texts(unit, each, depth + 1) for each in node.values]
            return _product(parts, "")
        if isinstance(node, ast.FormattedValue):
            return {each if each is not None else "*" for each in self.texts(unit, node.value, depth + 1)}
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Div)):
            between = "/" if isinstance(node.op, ast.Div) else ""
            sides = [self.texts(unit, side, depth + 1) for side in (node.left, node.right)]
            return _product(sides, between)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return {each and re.sub(r"%[-\d.]*[sdifgex]", "*", each) for each in self.texts(unit, node.left, depth)}
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
            return set().union(*(self.texts(unit, each, depth + 1) for each in node.elts[:8]))
        if isinstance(node, ast.IfExp):
            return self.texts(unit, node.body, depth + 1) | self.texts(unit, node.orelse, depth + 1)
        if isinstance(node, ast.Call):
            return self._text_of_call(unit, node, depth)
        if isinstance(node, ast.Attribute) and node.attr in self.options and chain(node).count(".") == 1:
            option = self.options[node.attr]
            changed = self.sources(unit, node)
            default = option.default if option.known and isinstance(option.default, str) and option.default else None
            return {default} if not changed else set().union(*(self.texts(of, v, depth + 2) for of, v in changed[:4]))
        if isinstance(node, (ast.Name, ast.Attribute)):
            if COUNTER.search(last(node)):
                return {"*"}
            values = self.sources(unit, node)[:4]
            return set().union(*(self.texts(of, value, depth + 2) for of, value in values)) if values else {None}
        return {None}

    def _text_of_call(self, unit: Unit, node: ast.Call, depth: int) -> set[str | None]:
        names = self.program.names.dotted(unit.source.module, node.func) or {last(node.func)}
        if names & _PARTS and node.args:
            return _product([self.texts(unit, each, depth + 1) for each in node.args], "/")
        if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return {each and re.sub(r"\{[^}]*\}", "*", each) for each in self.texts(unit, node.func.value, depth)}
        return {None}


def _product(parts: list[set[str | None]], between: str) -> set[str | None]:
    found: set[str | None] = {""}
    for index, part in enumerate(parts):
        pairs = ((head, tail) for head in found for tail in sorted(part, key=str)[:4])
        found = set(sorted({_joined(head, tail, between, first=index == 0) for head, tail in pairs}, key=str)[:8])
    return found


def _joined(head: str | None, tail: str | None, between: str, *, first: bool) -> str | None:
    if head is None or (tail is None and first):
        return None
    text = "*" if tail is None else tail
    if not head or (between == "/" and text.startswith("/")):
        return text
    return f"{head.rstrip('/') if between else head}{between}{text}"


def _parameters(unit: Unit) -> Iterator[Option]:
    args = unit.node.args  # type: ignore[union-attr]
    given = dict(zip(reversed(args.args), reversed(args.defaults), strict=False))
    for arg in args.args:
        default = given.get(arg)
        value = default.value if isinstance(default, ast.Constant) else None
        yield Option(
            f"--{arg.arg}", arg.arg, value, True, default is None or isinstance(default, ast.Constant), arg.lineno
        )


def _option(event: Event) -> Option | None:
    if last(event.node.func) != "add_argument" and "click.option" not in event.names:
        return None
    flags = [each.value for each in event.node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if not flags:
        return None
    flag = next((each for each in flags if each.startswith("--")), flags[0])
    dest, default, action = event.argument("dest"), event.argument("default"), event.argument("action")
    name = str(dest.value) if isinstance(dest, ast.Constant) else flag.lstrip("-").replace("-", "_")
    takes = action is None or (isinstance(action, ast.Constant) and action.value in ("store", "append"))
    value = default.value if isinstance(default, ast.Constant) else None
    if isinstance(flagged := event.argument("is_flag"), ast.Constant) and flagged.value:
        takes = False
    known = default is None or isinstance(default, ast.Constant)
    computed = None if known or default is None else (event.unit, default)
    return Option(flag, name, value, takes, known, event.node.lineno, computed)


def strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the texts in conditions, and the names in them."""
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value
            elif name := last(each):
                yield name
