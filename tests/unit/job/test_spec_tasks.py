"""The options of the bundled tasks: a mistake is told at submission, not on the nodes hours later."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from slurmddp.errors import UserError
from slurmddp.job.tasks import check_options
from tests.helpers import LM_JOB, Desk, refusal

LM = "site: gpus\ntrain:\n  task: lm\n"
IMAGES = "site: gpus\ntrain:\n  task: images\n"
PATH = "  data:\n    path: /d\n"


def told(desk: Desk, job: str, *options: str) -> str:
    with pytest.raises(UserError) as caught:
        desk.resolve(job, *options)
    return refusal(caught.value)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", ":2: train.data.path: is missing"),
        ("  data: {context: 64}\n", ":4: train.data.path: is missing"),
        ("  data: {path: }\n", ":4: train.data.path: must be a path or a list of paths, not empty"),
        ("  data: {path: 2024}\n", ":4: train.data.path: must be a path or a list of paths, not 2024"),
        ("  data: {path: []}\n", ":4: train.data.path: must be a path or a list of paths, not []"),
        ("  data: {path: [/a, 3]}\n", ":4: train.data.path: must be a path or a list of paths, not ['/a', 3]"),
        (
            f"{PATH}    contxt: 64\n",
            ":6: train.data.contxt is not an option of the task lm\n  -> did you mean train.data.context?",
        ),
        (
            f"{PATH}    heads: 2\n",
            ":6: train.data.heads is not an option of the task lm\n  -> did you mean train.model.heads?",
        ),
        (
            f"{PATH}    zzz: 2\n",
            ":6: train.data.zzz is not an option of the task lm\n  -> options of train.data: path, context, "
            "glob, exclude,",
        ),
        (f"{PATH}    context: 0\n", ":6: train.data.context: must be a whole number from 1 up, not 0"),
        (f"{PATH}    context: -64\n", ":6: train.data.context: must be a whole number from 1 up, not -64"),
        (f"{PATH}    context: 64.5\n", ":6: train.data.context: must be a whole number from 1 up, not 64.5"),
        (f"{PATH}    context: '64'\n", ":6: train.data.context: must be a whole number from 1 up, not '64'"),
        (f"{PATH}    context: true\n", ":6: train.data.context: must be a whole number from 1 up, not True"),
        (f"{PATH}    context: \n", ":6: train.data.context: must be a whole number from 1 up, not empty"),
        (
            f"{PATH}    validation_fraction: 1.5\n",
            ":6: train.data.validation_fraction: must be a number from 0 to 0.5, not 1.5",
        ),
        (
            f"{PATH}    validation_fraction: -0.1\n",
            ":6: train.data.validation_fraction: must be a number from 0 to 0.5, not -0.1",
        ),
        (
            f"{PATH}    validation_fraction: 2%\n",
            ":6: train.data.validation_fraction: must be a number from 0 to 0.5, not '2%'",
        ),
        (f"{PATH}    glob: /a/*\n", ":6: train.data.glob: must be a pattern of names below the path, not '/a/*'"),
        (f"{PATH}    exclude: '*.c'\n", ":6: train.data.exclude: must be a list of patterns, not '*.c'"),
        (f"{PATH}    format: csv\n", ":6: train.data.format: must be bytes, tokens or jsonl, not 'csv'"),
        (f"{PATH}    dtype: int8\n", ":6: train.data.dtype: must be uint16 or uint32, not 'int8'"),
        (f"{PATH}    key: 3\n", ":6: train.data.key: must be the name of a key, not 3"),
        (
            f"{PATH}    vocabulary: 9\n",
            ":6: train.data.vocabulary is not an option of the task lm\n  -> did you mean train.model.vocabulary?",
        ),
        (f"{PATH}  model: {{vocabulary: 0}}\n", ":6: train.model.vocabulary: must be a whole number from 1 up, not 0"),
        (
            f"{PATH}  model:\n    hed: 2\n",
            ":7: train.model.hed is not an option of the task lm\n  -> did you mean train.model.heads?",
        ),
        (
            f"{PATH}  model:\n    layers: 3\n    width: 130\n",
            ":8: train.model.width: must be a multiple of train.model.heads (4), not 130",
        ),
        (
            f"{PATH}  model:\n    heads: 3\n",
            ":6: train.model.width: must be a multiple of train.model.heads (3), not 128",
        ),
        (f"{PATH}  model: {{heads: 0}}\n", ":6: train.model.heads: must be a whole number from 1 up, not 0"),
        (f"{PATH}  model: {{tied: 1}}\n", ":6: train.model.tied: must be true or false, not 1"),
        (f"{PATH}  model: {{dropout: 1}}\n", ":6: train.model.dropout: must be a number from 0 to below 1, not 1"),
    ],
)
def test_a_mistake_in_lm(desk: Desk, written: str, message: str) -> None:
    shown = told(desk, LM + written)
    assert shown.startswith(f"{desk.project}/job.yaml{message}")
    assert shown.count("job.yaml:") == 1


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", ":2: train.data.path: is missing"),
        ("  data: {path: [/a]}\n", ":4: train.data.path: must be a path, not ['/a']"),
        (
            f"{PATH}    validation_fraction: 1\n",
            ":6: train.data.validation_fraction: must be a number from 0 to below 1, not 1",
        ),
        (
            f"{PATH}    context: 2\n",
            ":6: train.data.context is not an option of the task images\n  -> options",
        ),
        (f"{PATH}    augment: zoom\n", ":6: train.data.augment: must be none, flip, crop or crop+flip, not 'zoom'"),
        (f"{PATH}  model: {{kind: vit}}\n", ":6: train.model.kind: must be mlp or cnn, not 'vit'"),
        (
            f"{PATH}  model: {{hiden: 2}}\n",
            ":6: train.model.hiden is not an option of the task images\n  -> did you mean",
        ),
    ],
)
def test_a_mistake_in_images(desk: Desk, written: str, message: str) -> None:
    shown = told(desk, IMAGES + written)
    assert shown.startswith(f"{desk.project}/job.yaml{message}")
    assert shown.count("job.yaml:") == 1


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"format": "tokens"}, {}, "vocabulary"),
        ({"format": "tokens"}, {"vocabulary": None}, "vocabulary"),
        ({"format": "tokens"}, {"vocabulary": 100}, None),
        ({"format": "jsonl"}, {"vocabulary": 100}, "must be at least 256, as each byte is a token"),
        ({}, {"vocabulary": 255}, "must be at least 256, as each byte is a token (train.data.format is bytes)"),
        ({}, {"vocabulary": 256}, None),
        (None, {"vocabulary": 255}, None),
    ],
)
def test_the_vocabulary_fits_the_format(data: Any, model: dict[str, Any], message: str | None) -> None:
    if message is None:
        check_options("lm", "model", model, data)
        return
    with pytest.raises(ValidationError) as caught:
        check_options("lm", "model", model, data)
    assert message in str(caught.value) and caught.value.errors()[0]["loc"] == ("vocabulary",)


NEEDED = "train.data.format: tokens needs train.model.vocabulary, the number of token ids"


def test_a_missing_vocabulary_is_told_at_the_key_that_needs_it(desk: Desk) -> None:
    assert told(desk, LM + PATH + "    format: tokens\n") == f"{desk.project}/job.yaml:6: {NEEDED}"
    shown = told(desk, LM_JOB, "train.data.format=tokens", "train.model.layers=2")
    assert shown == f"--set train.data.format: {NEEDED}"


@pytest.mark.parametrize(
    "job", [LM + PATH, LM + PATH + "    format: tokens\n  model: {vocabulary: 9}\n", IMAGES + PATH]
)
def test_sorting_by_length_needs_samples_of_their_own_length(desk: Desk, job: str) -> None:
    shown = told(desk, job, "train.batch.by_length=8")
    assert "train has batch.by_length, but all samples of this job have the same length" in shown
    assert shown.endswith("-> remove train.batch.by_length")


def test_documents_and_an_own_task_may_be_sorted(desk: Desk) -> None:
    for job in (LM + PATH + "    format: jsonl\n", "site: gpus\ntrain:\n  task: my.tasks:speech\n"):
        assert desk.resolve(job, "train.batch.by_length=8").job.train.batch.by_length == 8


def test_all_mistakes_are_told_at_once(desk: Desk) -> None:
    shown = told(
        desk, LM + "  steps: many\n  data: {contxt: 1, validation_fraction: 2}\n  model: {heads: 0, widht: 3}\n"
    )
    for key in ("steps", "data.contxt", "data.validation_fraction", "data.path", "model.heads", "model.widht"):
        assert f"train.{key}" in shown
    assert shown.count("job.yaml:") == 6


def test_an_option_on_the_command_line_is_named(desk: Desk) -> None:
    shown = told(desk, LM_JOB, "train.data.context=0", "train.model.heads=3")
    assert "--set train.data.context: must be a whole number from 1 up, not 0" in shown
    assert "--set train.model.heads: train.model.width: must be a multiple of train.model.heads (3), not 128" in shown


def test_what_fits_arrives_as_written(desk: Desk) -> None:
    job = LM + (
        "  data: {path: [$BOOKS/a, /b], context: 64, glob: '*.txt', exclude: ['*.py'], validation_fraction: 0}\n"
        "  model: {layers: 1, heads: 2, width: 32, dropout: 1e-1, tied: false}\n"
    )
    train = desk.resolve(job, BOOKS="/books").job.train
    assert train.data == {
        "path": ["/books/a", "/b"],
        "context": 64,
        "glob": "*.txt",
        "exclude": ["*.py"],
        "validation_fraction": 0,
    }
    assert train.model == {"layers": 1, "heads": 2, "width": 32, "dropout": 0.1, "tied": False}
    # As a resumed run hands it over: JSON, in which every value has its type.
    again = LM + f"  data: {json.dumps(train.data)}\n  model: {json.dumps(train.model)}\n"
    assert desk.resolve(again).job.train == train


def test_an_own_task_and_a_script_take_any_option(desk: Desk) -> None:
    free = "  data: {contxt: 0, held_out: 7}\n  model: {heads: 3, width: 128}\n"
    for what in ("task: my.tasks:speech", "script: train.py"):
        train = desk.resolve(f"site: gpus\ntrain:\n  {what}\n{free}").job.train
        assert (train.data, train.model) == ({"contxt": 0, "held_out": 7}, {"heads": 3, "width": 128})
