"""One session with a gateway: its objects, pending calls and futures, and the gateway's unsolicited messages.

``session`` is the entry: it names objects, sends requests and closes. ``dispatch`` routes what arrives to
``pending_calls``, ``inbox``, ``output`` and ``errors``. The folder ``transport`` is the connection below them.

This folder never imports a proxy: a session gets a factory for the meshes that endpoints return, and objects that
travel as references subclass ``RemoteReference``. It knows nothing of jobs and files.
"""
