"""The options of the bundled tasks, checked at submission against the table that the ranks go by."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from slurmddp.shared.task_options import OPTIONS, Mistake, mistakes

BUNDLED = frozenset(OPTIONS)


def check_options(task: str, part: str, given: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> None:
    """`part`: data or model; with model, `data` is what stands below train.data, where that is right itself.

    Raises ValidationError with one error for each option that is wrong, at its own key.
    """
    details = [_detail(task, part, mistake) for mistake in mistakes(task, part, given, data)]
    if details:
        raise ValidationError.from_exception_data(part, details)


def _detail(task: str, part: str, mistake: Mistake) -> InitErrorDetails:
    loc = (mistake.key,)
    if mistake.kind == "missing" and not OPTIONS[task][part][mistake.key].required:
        return InitErrorDetails(type=_needed(mistake), loc=loc, input=None)
    if mistake.kind == "missing":
        return InitErrorDetails(type="missing", loc=loc, input=None)
    if mistake.kind == "value":
        wrong = PydanticCustomError("task_option", "must be {wanted}", {"wanted": mistake.wanted})
        return InitErrorDetails(type=wrong, loc=loc, input=mistake.value)
    error = f"is not an option of the task {task}\n  -> {_hint(task, part, mistake.key)}"
    return InitErrorDetails(type=PydanticCustomError("value_error", "{error}", {"error": error}), loc=loc, input=None)


def _needed(mistake: Mistake) -> PydanticCustomError:
    """An option that is needed because of another one's value: `because` is the key of that one."""
    text = "train.data.format: tokens needs train.model.vocabulary, the number of token ids"
    return PydanticCustomError("task_option_needed", "{text}", {"text": text, "because": "train.data.format"})


def _hint(task: str, part: str, key: str) -> str:
    """The option that is most likely meant: in the same map or, by the same word, in the other one."""
    import difflib

    parts = OPTIONS[task]
    near = difflib.get_close_matches(key, parts[part], 1, 0.6)
    if near:
        return f"did you mean train.{part}.{near[0]}?"
    for other, options in parts.items():
        if key in options:
            return f"did you mean train.{other}.{key}?"
    return f"options of train.{part}: {', '.join(parts[part])}"
