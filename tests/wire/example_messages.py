"""One header of each type."""

from __future__ import annotations

from meshgate_wire import messages as m

REF = m.MeshRef(object=3, region=m.Region(labels=("hosts", "gpus"), offset=1, sizes=(2, 4), strides=(8, 1)))
FAILURE = m.Failure(
    kind="actor",
    message="it broke",
    mesh="trainers",
    ranks=(1, 2),
    hosts={1: "pod-1"},
    errors=(m.ErrorGroup(ranks=(1, 2), count=9, buffer=0),),
    total=16,
)
ARGUMENTS = (m.Argument(kind="procs", ref=REF),)

EXAMPLES: list[m.Header] = [
    m.AttachHosts(object=1, mesh="workers"),
    m.SpawnProcs(object=2, hosts=REF, per_host={"gpus": 8}, name="procs", version="abc"),
    m.SpawnActors(object=3, procs=REF, name="trainers", class_name="a.B", kind="async", arguments=ARGUMENTS),
    m.GetControllers(object=5, version="abc", paths=("src",)),
    m.Call(call=1, target=REF, endpoint="step", adverb="choose", arguments=ARGUMENTS),
    m.CancelCall(cancelled=5),
    m.PutValue(call=6, target=REF, keep=8, arguments=ARGUMENTS),
    m.ReadKept(call=7, target=REF, describe=True),
    m.NameKept(kept=8, name="batch", label="x.make.keep()", procs=2, region=REF.region),
    m.SendTo(target=REF, endpoint="step", port=-9, selection="choose"),
    m.Sync(body='{"type": "have"}'),
    m.Reload(call=5, target=REF, version="abc", paths=("src",)),
    m.Stop(call=2, target=REF, shutdown=True),
    m.Initialized(call=3, target=REF),
    m.OpenChannel(object=4, once=True),
    m.PortSend(port=4, arguments=ARGUMENTS),
    m.Adopt(object=-1, kind="actors", name="x", region=REF.region, parent=REF),
    m.Release(objects=(4, -1), at_once=True),
    m.Configure(stream_output=False),
    m.ConfigureMonarch(
        call=9, settings={"stop_actor_timeout": "30s", "max_cast_fanout": 4, "rdma_max_nics_per_buffer": None}
    ),
    m.CollectTelemetry(call=10, retention=3600, host_metrics_interval=0.5, gpu_metrics_interval=2.0),
    m.TelemetryRequest(call=11, path="/api/query"),
    m.EndSession(call=4),
    m.HostsAttached(object=1, hosts=(m.Host(name="pod-0", address="tcp://10.0.0.1:26600"), m.Host(name="pod-1"))),
    m.HostEnding(object=1, host="pod-1", reason="its pod is being deleted", seconds=30.0),
    m.Values(call=1, ranks=(5,), objects={0: m.Adopted(objects=(-1, -2))}),
    m.Item(call=1, rank=3, objects=m.Adopted(objects=(-3,))),
    m.Done(call=2),
    m.Progress(calls=(m.CallProgress(call=1, total=4, answered=3, age=31.5, waiting={1: "pod-1"}),)),
    m.Failed(call=1, rank=2, failure=FAILURE),
    m.ObjectFailed(object=2, failure=FAILURE),
    m.Fault(object=None, mesh="trainers", ranks=(7,), hosts={7: "pod-3"}, report="killed"),
    m.Output(lines=(m.OutputLine(stream="stderr", ranks=(0, 1), count=2, text="50 %", end="\r"),)),
    m.PortMessage(port=4, rank=1, exception=True),
    m.Detach(call=6, name="train"),
    m.Read(calls=(1, 2), released=(3,), ports={4: 9}, output=12, faults=1),
    m.Resume(replay=True),
    m.Fetch(calls=(1,)),
    m.Returned(
        request=m.Call(call=5, target=REF, endpoint="step", adverb="stream", tag="a"),
        reply=m.Item(call=5, rank=1),
        given=1,
    ),
    m.Keeps(calls=(1, 4)),
    m.KeptCalls(
        calls=(m.KeptCall(call=1, target=REF, endpoint="step", adverb="call", tag="a", age=0.5, state="read"),)
    ),
    m.Attached(name="train", takeovers=1, next_object=5, next_call=7, code_version="abc", code_paths=("src",)),
]
