"""``python -m meshgate_gateway``: runs one gateway. ``--help`` explains every setting."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from meshgate_gateway.settings import load_settings

if TYPE_CHECKING:
    from meshgate_gateway.gateway import Commands


def main(commands: Commands | None = None) -> None:
    """Runs until the gateway ends. ``commands``: what to run for engines, the real ones if not given."""
    settings = load_settings(sys.argv[1:])
    import asyncio  # noqa: PLC0415  (--help and mistakes are answered without)

    from meshgate_gateway import gateway  # noqa: PLC0415
    from meshgate_gateway.logs import configure_logs  # noqa: PLC0415
    from meshgate_gateway.server import listen  # noqa: PLC0415

    configure_logs(settings.log_level, settings.log_format, [settings.read_token().get_secret_value()])
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        print(  # noqa: T201
            f"meshgate_gateway: cannot listen at {settings.host}:{settings.port}: {error.strerror or error}; "
            f"choose another --host or --port",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    asyncio.run(gateway.serve(settings, listener, commands or gateway.Commands()))


if __name__ == "__main__":
    main()
