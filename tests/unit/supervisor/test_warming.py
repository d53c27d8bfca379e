"""The step of the warm processes is on all usable nodes, and is started again only once all of it has ended."""

from types import SimpleNamespace
from typing import Any

from slurmddp.supervisor import warming


def test_it_runs_beside_the_attempts_on_all_nodes_that_are_left() -> None:
    started: list[tuple[list[str], dict[str, str], Any]] = []

    def start(words: list[str], env: dict[str, str]) -> Any:
        started.append((words, env, SimpleNamespace(code=None)))
        return started[-1][2]

    job: Any = SimpleNamespace(
        run="/runs/books", env={"SLURMDDP_RENDEZVOUS_ID": "books-7-0"}, warm=None, step_options=["--gpus=4"],
        nodes=SimpleNamespace(usable=["n1", "n2", "n3"]), values=SimpleNamespace(node_script=lambda: ["node.sh"]),
        scheduler=SimpleNamespace(job_id="7", step=lambda nodes, options, log, words: ["srun", *options, log, *words]),
        loop=SimpleNamespace(start=start),
    )  # fmt: skip
    warming.keep(job)
    warming.keep(job)
    assert len(started) == 1
    words, env, _ = started[0]
    assert {"--nodelist=n1,n2,n3", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--gpus=4"} < {*words}
    assert (env["SLURMDDP_WARM"], env["SLURMDDP_RENDEZVOUS_ID"], env["SLURMDDP_NODES"]) == (*["books-7-warm"] * 2, "3")
    assert (job.env["SLURMDDP_WARM"], job.env["SLURMDDP_RENDEZVOUS_ID"]) == ("books-7-warm", "books-7-0")

    started[0][2].code = 233  # such as a node that Slurm did not reach
    job.nodes.usable = ["n1", "n3"]
    warming.keep(job)
    assert len(started) == 2 and "--nodelist=n1,n3" in started[1][0]
    started[1][2].code, job.nodes.usable = 0, []
    warming.keep(job)
    assert len(started) == 2
