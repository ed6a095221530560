"""Exports the measured models, several at once."""

import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from attention_serving.artifact.manifest import MANIFEST_FILE
from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import Precision
from benchmarks.cuda.models import VERSION, Case, build, cases
from benchmarks.cuda.plan import Run
from benchmarks.cuda.records import Records

MOST_EXPORTERS = 8


def export_all(run: Run, records: Records) -> None:
    """Exports every model that the repository lacks, several at once."""
    wanted = []
    for case in cases(run):
        if (case.folder(run.models) / MANIFEST_FILE).exists():
            records.add(model=case.name, result="present")
        else:
            wanted.append(case)
    exporters = max(1, min(MOST_EXPORTERS, len(os.sched_getaffinity(0)) // 2, len(wanted)))
    with ProcessPoolExecutor(exporters, get_context("spawn")) as pool:
        jobs = {pool.submit(_export, case, run.models): case for case in wanted}
        for job in as_completed(jobs):
            error = job.exception()
            records.add(model=jobs[job].name, result=f"failed: {error}" if error else "exported")


def _export(case: Case, repository: Path) -> None:
    torch.set_num_threads(1)
    write_artifact(
        build(case.module), ModelId(case.name, VERSION), repository, precision=Precision(case.precision)
    )
