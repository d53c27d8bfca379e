"""What bash writes into events.jsonl, and Python into metrics.jsonl, read from their source: event or line -> keys.

A form of writing that this file does not know fails the test, so that no event is missed.
"""

import ast
from collections.abc import Iterator

from slurmddp.records.metrics import Metrics
from tests.helpers import ROOT

#: Stands for the keys that a task chooses.
OF_THE_TASK = "TASK"

Function = ast.FunctionDef


def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / "slurmddp" / path).read_text(encoding="utf-8"))


def function(path: str, name: str, inside: str | None = None) -> Function:
    """A function of a file, or a method of a class in it."""
    place: ast.AST = tree(path)
    if inside:
        (place,) = (node for node in ast.walk(place) if isinstance(node, ast.ClassDef) and node.name == inside)
    (found,) = (node for node in ast.walk(place) if isinstance(node, Function) and node.name == name)
    return found


def keys_of(value: ast.expr, around: Function) -> set[str]:
    """The keys of a dict as the code writes it: a literal, a name for one, or a record() that returns one."""
    if isinstance(value, ast.Dict):
        found: set[str] = set()
        for key, item in zip(value.keys, value.values, strict=True):
            if key is None:
                found |= keys_of(item, around)
            elif isinstance(key, ast.JoinedStr):
                found.add("UNIT" + "".join(str(part.value) for part in key.values if isinstance(part, ast.Constant)))
            else:
                assert isinstance(key, ast.Constant), ast.unparse(value)
                found.add(str(key.value))
        return found
    if isinstance(value, ast.Name):
        given = [node.value for node in assignments(around, value.id) if node.value is not None]
        assert given, f"{ast.unparse(value)} in {around.name}"
        return set[str]().union(*(keys_of(each, around) for each in given)) | items_of(around, value.id)
    if ast.unparse(value) == "self.figures":
        return {OF_THE_TASK}
    raise AssertionError(f"tests/unit/docs/written.py cannot tell the keys of {ast.unparse(value)} in {around.name}")


def assignments(around: Function, name: str) -> Iterator[ast.Assign | ast.AnnAssign]:
    for node in ast.walk(around):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node


def items_of(around: Function, name: str) -> set[str]:
    """The keys that are added to a dict one by one: `name["key"] = value`. A computed key is the task's."""
    found = set()
    for node in ast.walk(around):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                found.add(str(target.slice.value) if isinstance(target.slice, ast.Constant) else OF_THE_TASK)
    return found


def metrics() -> tuple[set[str], set[str]]:
    """The keys of a line of metrics.jsonl, and those below its `seconds`."""
    log = function("runtime/reporting.py", "_log")
    (facts,) = assignments(log, "facts")
    assert isinstance(facts.value, ast.Dict)
    found = items_of(log, "facts")
    plain = ast.Dict([], [])
    for key, value in zip(facts.value.keys, facts.value.values, strict=True):
        if key is not None:
            plain.keys.append(key)
            plain.values.append(value)
        elif ast.unparse(value) == "outcome.means":
            found |= keys_of(ast.Name("result"), function("runtime/measure/loss_accumulator.py", "means")) | {
                OF_THE_TASK
            }
        else:
            assert "self._utilisation.of(" in ast.unparse(value), ast.unparse(value)
            found |= keys_of(ast.Name("peaks"), function("runtime/measure/peak.py", "of", "Utilisation"))
    of_own_script = function("runtime/observe/progress_lines.py", "report")
    found |= keys_of(ast.Name("figures"), of_own_script)
    return found | keys_of(plain, log) | set(Metrics._fields) - {"figures"}, parts_of_a_step()


def parts_of_a_step() -> set[str]:
    """The keys of `seconds`, of the bundled tasks and of own scripts."""
    constants: dict[str, str] = {}
    parts: set[str] = set()
    for path in ("measure/timing", "measure/straggler_detection", "observe/shares"):
        for node in tree(f"runtime/{path}.py").body:
            if not isinstance(node, ast.Assign):
                continue
            name = ast.unparse(node.targets[0])
            if name == "PARTS":
                assert isinstance(node.value, ast.Tuple)
                parts |= {constants[ast.unparse(part)] for part in node.value.elts}
            elif name.isupper() and isinstance(node.value, ast.Constant | ast.Tuple):
                names = name.strip("()").split(", ")
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                constants |= {key: str(ast.literal_eval(value)) for key, value in zip(names, values, strict=True)}
    return parts
