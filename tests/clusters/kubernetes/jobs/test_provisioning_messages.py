"""The messages between a client and a provisioning gateway."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from meshgate_kubernetes.errors import NotFound, Rejected
from meshgate_kubernetes.jobs.lifecycle import RunningJob
from meshgate_kubernetes.jobs.provisioning_messages import (
    EndJob,
    FindJob,
    JobEnded,
    JobProgress,
    JobUp,
    ObjectCreated,
    ProvisioningReply,
    ProvisioningRequest,
    RequestRejected,
    StartJob,
    encode_reply,
    parse_reply,
    parse_request,
    rejection,
)
from meshgate_kubernetes.status.diagnosis import ContainerLog, Problem, Stage
from meshgate_kubernetes.status.readiness import MeshProgress, Progress
from tests.clusters.kubernetes.objects import job

PROBLEM = Problem("pod a", "OOMKilled", "it ended", 20.0, ContainerLog("a", "worker", previous=True), log="text")
RUNNING = RunningJob(name="trainer", namespace="team", uid="1", token="secret", meshes={"workers": 2})


@pytest.mark.parametrize(
    "request_",
    [
        StartJob(job=job(), timeout=3),
        FindJob(name="trainer", namespace="team"),
        EndJob(name="trainer", namespace="team"),
        EndJob(name="trainer", namespace="team", uid="1"),
    ],
)
def test_a_request_is_parsed_from_its_encoding(request_: ProvisioningRequest) -> None:
    assert parse_request(request_.model_dump_json()) == request_


@pytest.mark.parametrize(
    "reply",
    [
        ObjectCreated(kind="Pod", name="a"),
        JobProgress(progress=Progress((MeshProgress("workers", 2, ((Stage.READY, 1),)),), (PROBLEM,), "away")),
        JobUp(job=RUNNING),
        JobEnded(),
        RequestRejected(reason="no", missing=True),
    ],
)
def test_a_reply_is_parsed_from_its_encoding(reply: ProvisioningReply) -> None:
    assert parse_reply(encode_reply(reply)) == reply


def test_the_timeout_of_a_problem_keeps_its_name_in_the_protocol() -> None:
    encoded = json.loads(encode_reply(JobProgress(progress=Progress((), (PROBLEM,)))))
    assert encoded["progress"]["problems"][0]["patience"] == 20.0


def test_a_request_without_a_uid_is_one_that_older_gateways_read() -> None:
    without = {"ask": "end", "name": "trainer", "namespace": "team"}
    assert json.loads(EndJob(name="trainer", namespace="team").model_dump_json()) == without


@pytest.mark.parametrize("text", ["", "{}", '{"ask": "steal"}', '{"ask": "find", "name": "a/b", "namespace": "team"}'])
def test_an_invalid_request_raises_and_is_rejected_with_its_field(text: str) -> None:
    with pytest.raises(ValidationError) as error:
        parse_request(text)
    assert rejection(error.value).reason


def test_a_rejection_says_whether_the_job_is_missing() -> None:
    assert rejection(NotFound("gone")) == RequestRejected(reason="gone", missing=True)
    assert rejection(Rejected("invalid")) == RequestRejected(reason="invalid")
