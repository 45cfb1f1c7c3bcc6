"""How a session's messages reach the gateway: the thread that sends, receives and reconnects.

``connection_thread`` runs it, ``send_queue`` holds what callers have posted and blocks them while it is over its limit,
``reconnect`` decides when to dial again and when to give up, ``gateway_connection`` is one websocket.

Nothing here knows what a message means.
"""
