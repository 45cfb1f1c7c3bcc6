"""The adapter to Monarch: one interface and one module per supported release.

``interface.py`` is the interface, and chooses the module by the installed version. The rest of the gateway never
imports ``monarch``, except for ``on_worker``, which runs on workers and uses Monarch's public names. The adapter knows
nothing about sessions, messages or objects.
"""
