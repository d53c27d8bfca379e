"""Settings that a program prints, its environment or its arguments, are no evidence of a failure."""

import io

import pytest

from slurmddp.doctor.diagnose import Diagnosis, Examination
from slurmddp.doctor.printed import shows_settings

PRINTED = """\
NCCL_DEBUG=INFO
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=600
TORCH_NCCL_DUMP_ON_TIMEOUT=1
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 # avoids CUDA out of memory
OOM_MESSAGE=CUDA out of memory
NOTE=torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
export RETRY_ON="CUDA out of memory"
declare -x RETRY_ON="NCCL error"
+ export RETRY_ON="Connection refused"
+ python train.py --retry-on 'CUDA out of memory'
SLURM_JOB_REASON=DUE TO TIME LIMIT
args: Namespace(lr=0.1, retry_on='CUDA out of memory', note='No space left on device')
Namespace(retry_on=['CUDA out of memory', 'NCCL error'])
environ({'RETRY_ON': 'CUDA out of memory', 'NCCL_DEBUG': 'INFO'})
{'retry_on': 'CUDA out of memory', 'lr': 0.1}
"retry_on": "CUDA out of memory",
'RETRY_ON': 'No space left on device',
  retry_on: CUDA out of memory
  retry_on: "CUDA out of memory"
retry_on ............ CUDA out of memory
argv: ['train.py', '--retry-on', 'CUDA out of memory']
['train.py', '--retry-on', 'CUDA out of memory']
command: python train.py --retry-on "No space left on device"
torchrun train.py --retry-on "No module named flash_attn"
BASH_FUNC_die%%=() { echo "Segmentation fault" >&2; exit 1
SLURM_SUBMIT_CMD=sbatch --comment="Bus error" job.sh
MSG=srun: error: node1: task 3: Killed
MSG=slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-27T12:00:00 DUE TO TIME LIMIT ***
retry_on=CUDA out of memory
os.environ['RETRY_ON'] = 'CUDA out of memory'
"""
OWN = """\
Traceback (most recent call last):
  File "/home/a/train.py", line 3, in <module>
    main()
ValueError: my own
"""
#: These say what happened.
EVENTS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "RuntimeError: CUDA error: device-side assert triggered",
    "srun: error: node1: task 3: Killed",
    "  exitcode  : -9 (pid: 7)",
    "  error_file: <N/A>",
    "    last_error: CUDA out of memory",
    "error=CUDA out of memory",
    'time="2026-11-27T12:00:00" level=error msg="No space left on device"',
    '{"level": "error", "text": "CUDA out of memory"}',
    '{"message": "CUDA out of memory"}',
    "train.py: error: unrecognized arguments: --x",
    "python: can't open file 'x.py': [Errno 2]",
    "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-27T12:00:00 DUE TO TIME LIMIT ***",
    "bash: line 1: 7 Bus error  python train.py --lr 3",
)


def examined(text: str) -> Diagnosis:
    examination = Examination()
    examination.read("job.log", io.BytesIO(text.encode()))
    return examination.diagnose()


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "0: "])
@pytest.mark.parametrize("line", PRINTED.splitlines())
def test_a_printed_setting_is_no_cause(prefix: str, line: str) -> None:
    assert examined(f"{prefix}{line}\ndone\n").root is None
    answer = examined(f"{prefix}{line}\n{OWN}")
    assert answer.root and answer.root.first.cause.id == "code" and not (*answer.cascades, *answer.others)


@pytest.mark.parametrize("line", EVENTS)
def test_what_happened_is_no_setting(line: str) -> None:
    assert not shows_settings(line)
