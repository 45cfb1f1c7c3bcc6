"""Runs Monarch's own tests on direct Monarch and through a gateway, and reports by file. Never edits the source."""
