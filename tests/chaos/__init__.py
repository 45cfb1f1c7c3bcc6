"""Random faults on real processes, and what they cost: lost, doubled, late, left behind. ``make chaos`` runs it.

It drives meshgate as a user would and never imports the engine.
"""
