"""The exchange between client and gateway: offers, requested pieces, compressed packs.

Never runs on hosts, and never writes to a store.
"""
