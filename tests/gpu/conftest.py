"""Print the speed of steps at the end of `make test-gpu`; without GPUs, also list the tests run and skipped."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        return
    for report in terminalreporter.stats.get("passed", []):
        for _, table in report.user_properties:
            terminalreporter.write_line(table)
    if config.getoption("--device") == "cuda":
        return
    for kind, title in (("passed", "No GPU here. Ran on the CPU"), ("skipped", "Skipped, as they need a GPU")):
        nodes = [report.nodeid for report in terminalreporter.stats.get(kind, [])]
        names = sorted({node.partition("[")[0].rpartition("::")[2] for node in nodes})
        terminalreporter.write_line(f"{title}: {', '.join(names) or 'none'}.")
