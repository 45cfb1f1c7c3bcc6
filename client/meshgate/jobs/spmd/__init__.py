"""Jobs that run a script on every rank, as torchrun does (``meshgate.spmd``).

``torchrun`` reads the command, ``job`` has ``serve`` and ``SPMDJob``, ``run`` drives one run on a mesh of hosts,
``rank_actors`` and ``rank_process`` start the script on each rank, ``failures`` reports the first rank that failed.
``appdef`` and ``schedulers`` take torchx's descriptions, ``torchx_app`` starts hosts with it. This package never
imports torch.
"""
