from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any

from meshgate_gateway.engine.monarch_settings import MonarchSettings
from meshgate_wire.messages import ConfigureMonarch, Values


class Configured:
    async def configure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"stop_actor_timeout": "10s", **settings}


def test_the_reply_has_all_settings_in_effect() -> None:
    sent: list[Any] = []

    def send(header: Any, buffers: Any = (), *, stream: int = 0) -> None:
        sent.append((header, buffers, stream))

    (handle,) = MonarchSettings(Configured(), send).handlers().values()
    waiting = handle(ConfigureMonarch(call=3, settings={"rdma_qps_per_cq": 5, "use_direct_spawn": True}), ())
    asyncio.run(waiting)  # type: ignore[arg-type]
    ((header, (buffer,), stream),) = sent
    assert (header, stream) == (Values(call=3), 0)
    assert pickle.loads(buffer) == {"stop_actor_timeout": "10s", "rdma_qps_per_cq": 5, "use_direct_spawn": True}
