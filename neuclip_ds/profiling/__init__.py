"""Where the time of a training step goes, and what it sends for which purpose; see docs/communication.md."""
