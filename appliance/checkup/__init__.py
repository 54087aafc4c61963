"""Collects the symptoms that `doctor` judges: service, setup, machine, access. Reads only; changes nothing.

Rules: it runs when the agent is dead and when the configuration is broken (that is a symptom, not a crash), and as an
ordinary account: what cannot be read is said (`unseen`) and stays unknown. Two children are started, the probe's proof
and the worker's contract; `deep` adds the kernels' self-test and a real generation.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from appliance.checkup import setup
from appliance.checkup.access import access
from appliance.checkup.machine import machine
from appliance.checkup.patient import Patient, patient
from appliance.checkup.service import service
from appliance.probe.host import read_host
from appliance.symptoms import DoctorFacts, Problem

__all__ = ["Patient", "examine", "patient"]



def examine(case: Patient, *, deep: bool = False) -> DoctorFacts:
    """All symptoms. `deep`: seconds to minutes longer."""
    unseen: list[str] = []
    python = setup.worker_python(case)
    contract = setup.contract(python, case.env) if isinstance(python, str) else python
    versions = contract["versions"] if not isinstance(contract, Problem) else {}
    host = read_host("/", store=case.directories.store,
                     versions={name: str(version) for name, version in versions.items() if version})
    if _closed(case.directories.state):
        unseen.append(f"the state folder {case.directories.state}")
    if case.names is None:
        unseen.append(f"the store {case.directories.store}")
    made = setup.setup(case, host, python, contract)
    if deep and isinstance(python, str):
        made = dataclasses.replace(made, selftest=setup.selftest(python, case),
                                   generation=setup.generation(case) if case.running is not None else None)
    return DoctorFacts(service=service(case, unseen), setup=made, host=machine(case, host),
                       access=access(case, unseen), unseen=tuple(unseen))


def _closed(folder: Path) -> bool:
    """Whether there is a folder that this account may not read."""
    try:
        return folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)
    except PermissionError:
        return True
