"""Shortened look-alikes of logs in public issue threads, in our own words, each with the right answer.

HEALTHY: the run went well, or the log has no sign that it did not: no cause. FAILED: log -> (ids that are right, rank,
node); `unknown` means that no rule has to know it, but that it is a failure. The answers were written before doctor
read the logs.
"""

# ruff: noqa: E501 (lines of logs)

from typing import NamedTuple


def ranks(line: str, count: int = 8) -> str:
    """The same line, as each of the ranks writes it."""
    return "".join(line.format(rank=rank, pid=4100 + rank, us=482913 + 977 * rank) + "\n" for rank in range(count))


STEPS = "".join(f"step {step} loss {3 - step / 100:.3f}\n" for step in range(10, 60, 10))

HEALTHY = {
    "no destroy_process_group, from each rank": STEPS
    + ranks(
        "[rank{rank}]:[W227 10:54:51.{us} ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been "
        "destroyed before we destruct ProcessGroupNCCL. In rare cases this process can exit before this point."
    ),
    "a step that waited for its turn": "srun: Job 235 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
    * 4
    + "srun: Job 235 step creation still disabled, retrying (Requested nodes are busy)\nsrun: Step created for StepId=235.1\n"
    + STEPS,
    "a folder that the node does not have": "slurmstepd: error: couldn't chdir to `/home/u/run': No such file or directory: going to /tmp instead\n"
    * 4
    + STEPS,
    "a prolog and TMPDIR": "slurmstepd: error: Could not run slurm task_prolog [/opt/site/prolog]: No such file or directory\n"
    "slurmstepd: error: TMPDIR [/scratch-local/u] is not writeable\nslurmstepd: error: Setting TMPDIR to /tmp\n"
    + STEPS,
    "factories of TensorFlow, from each rank": ranks(
        "E0000 00:00:1750688708.{us} {pid} cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting to register "
        "factory for plugin cuDNN when one has already been registered"
    )
    + STEPS,
    "a preloaded library that the container does not have": "ERROR: ld.so: object 'libsite.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.\n"
    * 8
    + STEPS,
    "an exception that Python ignored": STEPS
    + "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f7162a08af0>\n"
    "Traceback (most recent call last):\n"
    '  File "/env/lib/python3.10/site-packages/torch/utils/data/dataloader.py", line 1466, in __del__\n'
    "    self._shutdown_workers()\n"
    "    assert self._parent_pid == os.getpid(), 'can only test a child process'\n"
    "AssertionError: can only test a child process\nepoch 2 done\n",
    "a tracker that lost its network for a while": "wandb: Network error (ConnectionError), entering retry loop.\n"
    + STEPS
    + "wandb: Network error resolved after 0:01:10.030828, resuming normal operation.\nstep 60 loss 2.3\n",
    "srun is not used, says Lightning": "lightning/fabric/slurm.py:204: The `srun` command is available on your system but is not used. HINT: prepend it.\n"
    * 4
    + "Epoch 0: 100%|##########| 40/40 [00:10<00:00, 3.9it/s]\n`Trainer.fit` stopped: `max_epochs=1` reached.\n",
    "TensorBoard took another port": "TensorBoard could not bind to port 6006, it was already in use\nNOTE: trying port 6007\n"
    + STEPS,
    "a loss scale that was lowered": "step 1 loss: nan\nGradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    "step 2 loss: nan\nGradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0\n"
    "step 3 loss: nan\n" + STEPS,
    "a restart in place that went well": "2026-03-01 10:00:00 step 100 loss 2.0\n"
    "[rank1]: Traceback (most recent call last):\n[rank1]: ConnectionResetError: [Errno 104] Connection reset by peer\n"
    "E0301 10:00:09.10 77 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 8) of binary: python\n"
    "I0301 10:00:10.20 77 torch/distributed/elastic/agent/server/api.py:900] [default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    "2026-03-01 10:01:00 step 101 loss 1.9\n2026-03-01 10:01:02 step 102 loss 1.9\n"
    "2026-03-01 10:01:05 step 103 loss 1.9\nTraining completed.\n",
    "a bad image that was skipped": "2026-03-01 10:00:00 step 5 loss 2.0\n"
    "2026-03-01 10:00:01 ERROR data.py: cannot read shard 17, skipping it\nTraceback (most recent call last):\n"
    '  File "/home/u/data.py", line 9, in read\nPIL.UnidentifiedImageError: cannot identify image file\n'
    "2026-03-01 10:00:03 step 6 loss 1.9\n2026-03-01 10:00:05 step 7 loss 1.9\n2026-03-01 10:00:07 step 8 loss 1.9\n",
    "one host, so NCCL bootstraps over lo": ranks("n1:{pid}:{pid} [{rank}] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>")
    + STEPS,
    "clients that wait for rank 0 to listen": "".join(
        f"[rank{rank}]:[W301 10:00:0{rank}.1 socket.cpp:697] [c10d] The client socket has failed to connect to "
        f"[n1.site]:29500 (errno: 111 - Connection refused).\n"
        for rank in range(1, 8)
    )
    + STEPS,
    "the submission was accepted": "sbatch: error: *** The partition was changed to gpu-long by the site\nSubmitted batch job 99\n",
    "a hub that answered at the second try": "'(ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.\"))' thrown while requesting HEAD\n"
    "Retrying in 1s [Retry 1/5].\n" + STEPS + "{'train_runtime': 81.2, 'epoch': 1.0}\n",
    "RCCL warns of the kernel's options": "".join(
        f'n1:4{rank}:4{rank} [{rank}] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to a hang!\n'
        for rank in range(8)
    )
    + STEPS,
    "a loss that was NaN three times": "".join(
        f"step {step} loss {'nan' if step in (3, 9, 14) else 2.0}\n" for step in range(1, 40)
    ),
    "pip's resolver": "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.\n"
    "tensorboard 2.1 requires protobuf<4, but you have protobuf 4.1 which is incompatible.\nSuccessfully installed protobuf-4.1\n"
    + STEPS,
}


class Failed(NamedTuple):
    """A log, the ids of causes that are right, and who failed."""

    log: str
    causes: tuple[str, ...]
    rank: int | None = None
    node: str | None = None


FAILED = {
    "the HSA queue of an AMD GPU": Failed(
        ":0:rocdevice.cpp:3586: Callback: Queue 0x7f78cb400000 aborting with error : HSA_STATUS_ERROR_EXCEPTION: "
        "An HSAIL operation resulted in a hardware exception. code: 0x1016\nsrun: error: n3: task 5: Aborted\n",
        ("cuda-fault", "gpu-hardware"),
    ),
    "HIP has no code for the GPU": Failed(
        "RuntimeError: HIP error: no kernel image is available for execution on the device\n", ("gpu-unsupported",)
    ),
    "a script of the image that may not be executed": Failed(
        "INFO:    Using cached SIF image\nFATAL:   exec /opt/run.sh failed: permission denied\n",
        ("permission", "unknown", "container-start"),
    ),
    "the job container": Failed(
        "slurmstepd: error: container_p_join: open failed /scratch/119/.active: No such file or directory\n"
        "slurmstepd: error: container_g_join failed: 119\n",
        ("unknown", "slurm-service"),
    ),
    "the spooled script is gone": Failed(
        "slurmstepd: error: execve(): /tmp/slurmd/job89/slurm_script: No such file or directory\n",
        ("unknown", "slurm-service", "missing-program"),
    ),
    "one node of two, named after the step's line": Failed(
        "slurmstepd: error: *** STEP 9.0 ON gpu02 CANCELLED AT 2026-02-02T02:02:02 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"
        "srun: error: Node failure on gpu05\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n",
        ("node-failure",),
        None,
        "gpu05",
    ),
    "retries that were handled, then a kill": Failed(
        "[rank5]: Traceback (most recent call last):\n[rank5]: TimeoutError: object store is slow, trying again\n"
        + STEPS
        + "E1125 08:00:09.1 77 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 91) of binary: /usr/bin/python3\n"
        "Root Cause (first observed failure):\n[0]:\n  host      : node3\n  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 91)\n",
        ("killed",),
        5,
        "node3",
    ),
    "SPANK cannot load libmunge": Failed(
        "srun: error: plugin_load_from_file: dlopen(/usr/lib64/slurm/auth_munge.so): libmunge.so.2: cannot open shared object file: No such file or directory\n"
        "srun: error: Couldn't load specified plugin name for auth/munge: Dlopen of plugin file failed\n"
        "srun: fatal: failed to initialize auth plugin\n",
        ("slurm-plugin",),
    ),
    "a plugin of SPANK without its library": Failed(
        "srun: error: spank: /usr/lib64/slurm/spank_x.so: Dlopen failed: libslurm.so: cannot open shared object file\n"
        "srun: error: Plug-in initialization failed\n",
        ("slurm-plugin",),
    ),
    "a node whose name has a domain": Failed(
        "srun: error: Node failure on gpu-04.site.org\n", ("node-failure",), None, "gpu-04.site.org"
    ),
    "the ranks are not in the same collective": Failed(
        "[rank0]:[E1 ProcessGroupNCCL.cpp:1] Timeout at collective: ALLREDUCE, #12\nCollectives differ between ranks:\n"
        "\t - [3] finished collective #11, but did not join collective #12 (count from 1)\n"
        "\t - [0-2] joined but did not finish collective #12\n",
        ("nccl-timeout",),
        None,
    ),
    "pyxis cannot mount a folder": Failed(
        "slurmstepd: error: pyxis: container start failed with error code: 1\n"
        "slurmstepd: error: pyxis:     enroot-mount: failed to mount: /data at /tmp/pyxis_1/data: Permission denied\n"
        "slurmstepd: error: pyxis: couldn't start container\nslurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n"
        "srun: error: kis: task 0: Exited with exit code 1\n",
        ("container-start",),
    ),
    "a program that says only FATAL": Failed("FATAL: lock /scratch/u/run.lck is held by another run\n", ("unknown",)),
    "a C assertion": Failed("train: data.c:88: load: Assertion `n > 0' failed.\n", ("unknown", "ended-by-launcher")),
    "a script that the shell may not execute": Failed(
        "/var/spool/slurmd/job12/slurm_script: line 14: ./train.sh: Permission denied\n", ("permission", "unknown")
    ),
    "a task failure that Slurm saw": Failed(
        "slurmstepd: error: *** STEP 5.0 ON nid002888 CANCELLED AT 2026-04-29T23:36:37 DUE TO TASK FAILURE ***\n"
        "srun: error: nid002888: tasks 0-57,59-63: Terminated\nsrun: Force Terminated StepId=5.0\n",
        ("unknown", "ended-by-launcher"),
    ),
    "finished training, then could not save": Failed(
        STEPS + "training finished\nTraceback (most recent call last):\n"
        '  File "/home/u/train.py", line 80, in save\nOSError: [Errno 122] Disk quota exceeded\n',
        ("quota",),
    ),
    "a crash behind buffered output": Failed(
        "Traceback (most recent call last):\n"
        "  File \"/home/u/train.py\", line 12, in <module>\nKeyError: 'labels'\n" + STEPS,
        ("code",),
    ),
    "a step that never got its nodes": Failed(
        "srun: Job 8 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
        "srun: Job 8 step creation still disabled, retrying (Requested nodes are busy)\n"
        * 3
        + "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n",
        ("slurm-refused", "time-limit"),
    ),
    "an echo behind a crash": Failed(
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.\nTraining completed.\n", ("gpu-memory",)
    ),
    "an error level line is all there is": Failed(
        "2026-05-05 10:00:00 CRITICAL trainer: the config names no data set\n", ("unknown",)
    ),
}
