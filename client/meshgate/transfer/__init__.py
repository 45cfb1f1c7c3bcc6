"""Copies files from the workers to the laptop (``job.pull``).

``pull`` drives, ``host_files`` and ``on_host`` read on the hosts, ``download`` and ``partial_file`` write here, below a
``destination`` that no name can escape. Code is never sent by this package; ``code_sync`` does that.
"""
