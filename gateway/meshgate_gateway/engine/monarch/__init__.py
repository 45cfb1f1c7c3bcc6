"""The adapter to Monarch: one interface (``interface.py``) and one module per supported release.

``releases.py`` chooses the module by the installed version. The rest of the gateway never imports ``monarch``, except
for ``on_worker``, which runs on workers and uses Monarch's public names. The adapter knows nothing about sessions,
messages or objects.
"""
