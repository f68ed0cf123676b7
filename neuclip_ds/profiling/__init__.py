"""Profiles of training steps: time by phase and traffic by purpose; see docs/reference/communication.md."""
