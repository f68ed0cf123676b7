"""The examination of machines before a run: checks, each with its findings, and the report that puts the fixes first.

A check is one file in `checks/` and one line in `table.py`. Only `doctor` starts processes: what could crash or hang
runs in one of them, under a time limit, so that its end is a finding.
"""
