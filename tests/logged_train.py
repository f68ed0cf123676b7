"""Run train.py with a log of the samples, but without the report, whose plots take longer than the tests' training."""

import sys

from sample_log import LogSamples

from neuclip_ds.cli import train
from neuclip_ds.cli.program import exit_on_mistake
from neuclip_ds.training.hooks import Hook
from neuclip_ds.training.hooks.optional import WriteReport

if __name__ == "__main__":
    WriteReport.after_run = Hook.after_run  # type: ignore[method-assign]
    with exit_on_mistake():
        train.main(sys.argv[1:], [LogSamples()])
