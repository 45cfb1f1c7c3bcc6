"""The two ends of the distribution tree as other packages use them: the gateway's distributor and a host's agent.

Never decides about routes, pieces or timeouts: that is ``relay``. Modules that hosts run import the standard library
only.
"""
