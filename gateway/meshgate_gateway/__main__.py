"""``python -m meshgate_gateway``: runs one gateway. ``--help`` lists all settings."""

from __future__ import annotations

import gc
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from meshgate_gateway.supervisor.supervisor import Inheritance, supervise

if TYPE_CHECKING:
    from meshgate_gateway.gateway import Commands
    from meshgate_gateway.settings import Settings
    from meshgate_gateway.supervisor.link import SupervisorLink

LISTENER = "listener"  # the key of what the supervisor keeps


def main(commands: Commands | None = None) -> NoReturn:
    """Runs the gateway until it shuts down. ``commands``: replaces the commands that start engines.

    This process becomes the supervisor, and the server a child of it. It imports what a server needs before it forks
    one, so that each further server starts within milliseconds.
    """
    from meshgate_gateway.settings import load_settings  # noqa: PLC0415

    settings = load_settings(sys.argv[1:])
    import asyncio  # noqa: PLC0415  (not needed for --help and usage errors)

    from meshgate_gateway import gateway  # noqa: PLC0415
    from meshgate_gateway.logs import configure_logs  # noqa: PLC0415
    from meshgate_gateway.supervisor.link import SupervisorLink  # noqa: PLC0415

    if settings.kubernetes_job is not None or settings.provision_policy is not None:
        import meshgate_gateway.in_cluster  # noqa: PLC0415
    if settings.metrics_port is not None:
        import meshgate_gateway.http.metrics  # noqa: PLC0415
    if settings.slurm_job is not None:
        import meshgate_gateway.on_slurm  # noqa: PLC0415
    if settings.slurm_policy is not None:
        import meshgate_gateway.provisioning.slurm_service  # noqa: F401, PLC0415

    def serve(inheritance: Inheritance) -> None:
        configure_logs(settings.log_level, settings.log_format, [settings.read_token().get_secret_value()])
        supervisor = SupervisorLink(inheritance)
        listener = _listener(settings, supervisor)
        run = asyncio.run
        if settings.forward_to is not None:
            import uvloop  # noqa: PLC0415  (what is forwarded takes less than half the processor time)

            run = uvloop.run
        run(gateway.serve(settings, listener, commands or gateway.Commands(), supervisor))

    supervise(serve, settings.remove_at_end)


def _listener(settings: Settings, supervisor: SupervisorLink) -> socket.socket:
    from meshgate_gateway.http.server import listen  # noqa: PLC0415

    if inherited := supervisor.kept.get(LISTENER):
        return socket.socket(fileno=inherited.descriptors[0])
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        print(  # noqa: T201
            f"meshgate_gateway: cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            f"choose another --host or --port",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    supervisor.keep(LISTENER, {}, [listener.fileno()])
    return listener


if __name__ == "__main__":
    gc.disable()  # until supervise: imports leave no garbage, and to look for it takes a tenth of their time
    main()
