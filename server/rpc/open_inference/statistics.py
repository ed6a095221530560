"""The statistics of models, as messages of the Open Inference Protocol."""

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.statistics import Durations, ModelStatistics, RunDurations

PARTS = ("compute_input", "compute_infer", "compute_output")


def describe(model: LoadedModel) -> pb.ModelStatistics:
    """What a version of a model has done since it was loaded."""
    statistics = model.statistics
    statistics.fold()
    with statistics.lock:
        return pb.ModelStatistics(
            name=model.name,
            version=model.version,
            last_inference=int(statistics.last_run * 1e3),
            inference_count=statistics.queued.count,
            execution_count=sum(runs.compute.count for runs in statistics.runs.values()),
            inference_stats=_requests(statistics),
            batch_stats=[
                pb.InferBatchStatistics(batch_size=sequences, **_parts(runs, 1))
                for sequences, runs in sorted(statistics.runs.items())
            ],
        )


def _requests(statistics: ModelStatistics) -> pb.InferStatistics:
    """The durations of all requests. Each sequence of a run counts, and takes as long as the run."""
    parts = {name: pb.StatisticDuration() for name in PARTS}
    for sequences, runs in statistics.runs.items():
        for name, duration in _parts(runs, sequences).items():
            parts[name].count += duration.count
            parts[name].ns += duration.ns
    return pb.InferStatistics(
        success=_duration(statistics.succeeded),
        fail=_duration(statistics.failed),
        queue=_duration(statistics.queued),
        **parts,
    )


def _parts(runs: RunDurations, times: int) -> dict[str, pb.StatisticDuration]:
    durations = (runs.prepare, runs.compute, runs.split)
    return {name: _duration(own, times) for name, own in zip(PARTS, durations, strict=True)}


def _duration(own: Durations, times: int = 1) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=times * own.count, ns=int(times * own.seconds * 1e9))
