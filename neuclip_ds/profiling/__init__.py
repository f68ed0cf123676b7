"""Profiles of training steps: time by phase and traffic by purpose; see docs/how-to/plan_and_profile.md."""
