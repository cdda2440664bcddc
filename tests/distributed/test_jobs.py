"""The jobs of docs/distributed.md, as far as they can be read: `test_slurm` runs the first."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from distributed_helpers import HERE, block_of_page, find_mpirun, run_job, succeeded
from helpers import module_from

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (requirements/dev.txt)")


def test_the_job_script_is_one_for_bash():
    subprocess.run(["bash", "-n"], input=block_of_page("bash"), text=True, check=True)


def mpijob() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pods of the launcher and of the workers."""
    job = yaml.safe_load(block_of_page("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    specs = job["spec"]["mpiReplicaSpecs"]
    assert specs.keys() == {"Launcher", "Worker"}
    launcher, worker = (specs[name]["template"]["spec"] for name in ("Launcher", "Worker"))
    return launcher, worker


def test_the_mpijob_has_what_the_training_needs():
    launcher, worker = mpijob()
    (mpirun,), (sshd,) = launcher["containers"], worker["containers"]
    assert mpirun["image"] == sshd["image"]
    arguments = mpirun["args"]
    script = module_from(HERE.parents[1] / "scripts" / "train_caltech.py")
    options = vars(script.parse(arguments[arguments.index("scripts/train_caltech.py") + 1 :]))
    assert options.items() >= {"kvstore": "mpi", "resume": "auto"}.items()
    (mount,) = sshd["volumeMounts"]  # rank 0 is on a worker
    assert [volume["name"] for volume in worker["volumes"]] == [mount["name"]]
    for name in ("data_dir", "output_dir"):
        assert options[name].startswith(mount["mountPath"])


def test_mpirun_takes_the_options_of_the_mpijob(tmp_path):
    (mpirun,) = mpijob()[0]["containers"]
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    places = {"/etc/mpi/hostfile": tmp_path / "hostfile", "/mpgluon": tmp_path}
    arguments = mpirun["args"][: mpirun["args"].index("/mpgluon/.venv/bin/python")]
    variables = {one["name"]: one["value"] for one in mpirun["env"]}
    assert arguments[arguments.index("-x") + 1] in variables
    command = [find_mpirun(), *(str(places.get(one, one)) for one in arguments), "pwd"]
    assert succeeded(run_job(command, variables)).output.splitlines() == [str(tmp_path)] * 2
