"""Files that a script names and that are not copied."""

import subprocess
from pathlib import Path

from slurmddp.launch.write import _absent
from slurmddp.run.survey import survey


def test_data_that_git_ignores_and_the_script_names(tmp_path: Path) -> None:
    files = {
        ".gitignore": "*.bin\ndata/\nruns/\nout/\n",
        "train.py": "open('data/train.txt'); load(\"./w.bin\"); f('lib.py'); g('runs/x'); h('no/such.txt'); k('out/')\n"
        "print('data'); m('../w.bin')",
        "data/train.txt": "x",
        "w.bin": "x",
        "lib.py": "x",
        "runs/x": "x",
        "unnamed.bin": "x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "out").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    warnings = list(_absent(survey(tmp_path), "train.py", [tmp_path / "runs"]))
    assert [text.split(":")[0] for text in warnings] == ["data/train.txt", "w.bin"]
    assert "not copied, but train.py names it" in warnings[0] and "absolute path" in warnings[0]
