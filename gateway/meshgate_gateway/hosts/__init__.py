"""Host providers: the Monarch hosts of each mesh, as local processes, pods or given addresses.

``kubernetes`` reports lost pods and their replacements, ``local`` lost processes. Nothing here
knows about sessions or HTTP requests.
"""
